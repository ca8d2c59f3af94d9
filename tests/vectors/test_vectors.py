"""Probes and spaces: layout independence on one process, statistics, agreement between ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from ds_hessian.errors import ConfigError, HessianError, MeasurementError
from ds_hessian.ranks import together
from ds_hessian.vectors import (
    Box,
    Fragment,
    Layout,
    Partition,
    VectorSpace,
    probes,
    random_vector,
)
from tests.ranks import RankPool


def draw(fragments: list[Fragment], kind: str, probe: int = 0) -> torch.Tensor:
    layout = Layout(fragments)
    space = VectorSpace(layout.n_local, layout.n_owned)
    return random_vector(layout, space, seed=3, probe=probe, kind=kind)


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_a_probe_does_not_depend_on_how_a_parameter_is_cut(kind: str) -> None:
    shape = torch.Size([1001])
    whole = draw([Fragment("w", 0, 1001, shape)], kind)
    cuts = [0, 1, 338, 500, 1001]
    pieces = [Fragment("w", a, b - a, shape) for a, b in zip(cuts, cuts[1:], strict=False)]
    assert torch.equal(draw(pieces, kind), whole)


@pytest.mark.parametrize("chunk", [7, 64, 1 << 18])
def test_a_block_draws_what_the_whole_parameter_draws_there(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns of a matrix, and rows of one, drawn in several chunks."""
    monkeypatch.setattr(probes, "CHUNK", chunk)
    shape, names = torch.Size([12, 10]), ("w", "u")
    whole = draw([Fragment(name, 0, 120, shape) for name in names], "gaussian").view(2, 12, 10)
    boxes = [Box((0, 4), (12, 6)), Box((3, 0), (9, 10))]
    rests = [Box((0, 0), (12, 4)), Box((0, 0), (3, 10))]
    blocks = [
        Fragment.in_block(name, 0, math.prod(box.shape), shape, box)
        for pair in (boxes, rests)
        for name, box in zip(names, pair, strict=True)
    ]
    columns, rows, *_ = draw(blocks, "gaussian").split([72, 90, 48, 30])
    assert torch.equal(columns.view(12, 6), whole[0, :, 4:])
    assert torch.equal(rows.view(9, 10), whole[1, 3:])


def test_probes_differ_between_numbers_names_and_indices() -> None:
    shape = torch.Size([20000])
    a = draw([Fragment("a", 0, 20000, shape)], "gaussian")
    others = [
        draw([Fragment("a", 0, 20000, shape)], "gaussian", probe=1),
        draw([Fragment("b", 0, 20000, shape)], "gaussian"),
        a.roll(1),
    ]
    for other in others:  # correlations of independent vectors are N(0, 1/n): 5 sigma
        assert abs(float(a @ other)) < 5 / 20000**0.5


def test_replicas_count_once_and_owned_fragments_come_first() -> None:
    shape = torch.Size([4])
    layout = Layout([Fragment("a", 0, 4, shape, owned=False), Fragment("b", 0, 4, shape)])
    assert [f.name for f, _ in layout] == ["b", "a"]
    space = VectorSpace(layout.n_local, layout.n_owned)
    assert space.n == 4
    v = torch.tensor([1.0, 1, 1, 1, 100, 100, 100, 100])
    assert space.dot(v, v) == 4.0


def fail_on(rank_that_fails: int, error: type[Exception]) -> str:
    import torch.distributed as dist

    try:
        with together("trying"):
            if dist.get_rank() == rank_that_fails:
                raise error("boom")
    except HessianError as caught:
        return f"{type(caught).__name__}: {caught}"
    return "no error"


def test_a_failure_on_one_rank_is_raised_on_all(ranks: Callable[[int], RankPool]) -> None:
    message = "MeasurementError: while trying, rank 1: ValueError: boom"
    assert ranks(2).run(fail_on, 1, ValueError) == [message, message]
    assert ranks(2).run(fail_on, 5, ValueError) == ["no error", "no error"]
    own = ranks(2).run(fail_on, 0, ConfigError)
    assert own[0] == "ConfigError: boom" and own[1].startswith("MeasurementError: while trying")


def test_together_keeps_the_cause() -> None:
    with pytest.raises(MeasurementError, match="while reading, rank 0: ValueError: bad") as caught:
        with together("reading"):
            raise ValueError("bad")
    assert isinstance(caught.value.__cause__, ValueError)


def test_replicas_do_not_count_in_the_sizes_of_blocks() -> None:
    shape = torch.Size([4])
    fragments = [Fragment(name, 0, 4, shape, name != "replica") for name in ("a", "b", "replica")]
    layout = Layout(fragments)
    space = VectorSpace(layout.n_local, layout.n_owned)
    partition = Partition(layout, space, {"a": "first", "b": "second", "replica": "second"})
    assert partition.sizes.tolist() == [4, 4]
