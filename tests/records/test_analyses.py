"""Records of the analyses: what is saved is what is loaded, and nothing else is."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_hessian.errors import ResultError
from ds_hessian.krylov import block_coupling, eigenpairs, hutchinson, off_block_share, solve
from ds_hessian.records import (
    Bounded,
    Estimate,
    HessianAlignment,
    HessianBlockCoupling,
    HessianBlockSpectra,
    HessianCurvatures,
    HessianEigenpairs,
    HessianInfluence,
    HessianKronecker,
    HessianOffBlockShare,
    HessianSharpness,
    HessianSolution,
    HessianTrace,
)
from ds_hessian.show.monitor import monitor_events
from ds_hessian.vectors import Partition
from tests.krylov.matrices import SPECTRA, Matrix
from tests.records.makers import COST, PROVENANCE, spectrum_of

MEASURED = {"cost": COST, "provenance": PROVENANCE}


def records() -> list[Any]:
    """One of each kind, of a matrix whose Krylov results are real ones."""
    operator = Matrix.of(SPECTRA["spiked"], noise=1e-3)
    draw, partition = operator.fresh(), None
    partition = Partition(operator.layout, operator.space, {name: name for name in "abc"})
    pairs = eigenpairs(operator, draw(0), 2, draw)
    solution = solve(operator, draw(1), [0.0, 6.0], draw, "minres", num_matvecs=5)
    shares = {name: np.array([0.25, 0.5]) for name in ("a", "b.weight/x")}
    systems = {
        name: getattr(solution, name)
        for name in ("dampings", "residuals", "converged", "negative_curvature", "num_matvecs")
    }
    sharpness = {
        "eigenvalue_max": Estimate(3.0, 0.1),
        "converged": (True, False),
        "gradient_curvature": 1 / 3,
        "gradient_curvature_error": 1e-4,
        "update_curvature": None,
        "update_norm": None,
        "gradient_norm": 2.0,
        "loss": 1.0,
        "warm": False,
        "num_matvecs": 4,
    }
    alignment = {
        "n": 60,
        "which": "LA",
        "values": np.array([3.0, 2.0]),
        "errors": np.array([0.1, 0.2]),
        "vectors": torch.zeros(2, 5),
        "gradient_norm": 2.0,
        "loss": 1.0,
        "num_matvecs": 40,
    }
    return [
        HessianAlignment(
            **alignment,
            next_value=Estimate(1.0, 1 / 3),
            angle=0.1,
            gradient=Bounded(0.5, 0.4, 2 / 3),
            gradient_shares=np.array([0.1, 0.4]),
            update=Bounded(0.1, 0.0, 1.0),
            update_shares=np.array([0.1, 0.0]),
            update_norm=1e-3,
            principal_angles=np.array([0.1, 0.2]),
            overlap=Bounded(0.97, 0.9, 1.0),
            **MEASURED,
        ),
        HessianAlignment(
            **alignment,
            next_value=None,
            angle=math.pi / 2,
            gradient=None,
            gradient_shares=np.zeros(0),
            update=None,
            update_shares=np.zeros(0),
            update_norm=None,
            principal_angles=np.zeros(0),
            overlap=None,
            **MEASURED,
        ),
        HessianEigenpairs(
            **vars(pairs), concentrations=shares, sampling_errors=np.zeros(0), **MEASURED
        ),
        HessianTrace(**vars(hutchinson(operator, draw, 4, partition)), **MEASURED),
        HessianTrace(**vars(hutchinson(operator, draw, 4)), **MEASURED),
        HessianSolution(**vars(solution), **MEASURED),
        HessianInfluence(
            **systems,
            scores=np.ones((2, 3)),
            errors=np.full((2, 3), math.inf),
            query_loss=math.inf,
            **MEASURED,
        ),
        HessianBlockCoupling(**vars(block_coupling(operator, partition, draw(0))), **MEASURED),
        HessianBlockSpectra.of(
            {"a": spectrum_of(np.linspace(-1, 4, 50), 8), "b": spectrum_of(np.ones(3), 8)},
            PROVENANCE,
        ),
        kronecker(),
        HessianOffBlockShare(**vars(off_block_share(operator, partition, draw, 2, 0)), **MEASURED),
        HessianCurvatures(
            directions=("gradient", "vector 1"),
            values=np.array([1 / 3, -1e-300]),
            errors=np.array([math.inf, 0.1]),
            norms=np.ones(2),
            displacements=np.array([1e-3, 1e-2]),
            gradient_norm=2.0,
            loss=1.0,
            **MEASURED,
        ),
        HessianSharpness(**sharpness, preconditioned=Estimate(1e-300, math.nan), **MEASURED),
        HessianSharpness(**sharpness, preconditioned=None, **MEASURED),
    ]


def kronecker() -> HessianKronecker:
    """Of two layers and two kinds; the largest eigenvalues were not measured."""
    rng = np.random.default_rng(0)
    unknown = np.full((2, 2), math.nan)
    pairs = ("cosines", "cosine_errors", "scales", "scale_errors", "shares", "share_errors")
    columns = ("norms", "norm_errors", "tops", "plain_shares", "plain_share_errors", "residuals")
    return HessianKronecker(
        layers=("blocks.0.up.weight", "decoder.layers.self_attention.linear_qkv.weight"),
        kinds=("kfac", "shampoo"),
        sizes=np.array([[8, 4], [12, 4]]),
        samples=np.array([[512, 4], [512, 4]]),
        **{name: rng.random((2, 2)) for name in (*pairs, "solves", "solve_errors")},
        **{name: rng.random(2) for name in (*columns, "mismatches")},
        extremes=unknown,
        extreme_errors=unknown,
        draws=0,
        damping=0.1,
        ridge=0.01,
        left_out={"embed.weight": "it is an embedding"},
        num_matvecs=48,
        **MEASURED,
    )


RECORDS = records()
NAMES = [type(record).__name__ for record in RECORDS]


def alike(a: Any, b: Any) -> bool:
    """The same values and types, arrays bit for bit; of vectors their number."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if torch.is_tensor(a):
        return b.shape == (len(a), 0)
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[name], b[name]) for name in a)
    return repr(a) == repr(b)


@pytest.mark.parametrize("record", RECORDS, ids=NAMES)
def test_load_gives_back_every_bit(tmp_path: Path, record: Any) -> None:
    found = type(record).load(record.save(tmp_path))
    assert type(found) is type(record)
    for field in dataclasses.fields(record):
        assert alike(getattr(record, field.name), getattr(found, field.name)), field.name


def test_files_are_named_after_the_record_and_strict_json(tmp_path: Path) -> None:
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    for record in RECORDS:
        record.save(tmp_path)
    kinds = sorted({record.kind for record in RECORDS})
    assert sorted({path.stem for path in tmp_path.iterdir()}) == kinds
    for kind in kinds:
        text = (tmp_path / f"{kind}.json").read_text()
        content = json.loads(text, parse_constant=refuse)
        assert content["schema_version"] == 1 and content["provenance"]["seed"] == 0


@pytest.mark.parametrize("record", RECORDS, ids=NAMES)
def test_damage_is_one_clear_error(tmp_path: Path, record: Any) -> None:
    def check(message: str) -> None:
        with pytest.raises(ResultError, match=message):
            type(record).load(tmp_path)
        record.save(tmp_path)

    check("no .* in .*cannot read .*json")
    arrays, figures = next(tmp_path.glob("*.npz")), next(tmp_path.glob("*.json"))
    arrays.write_bytes(arrays.read_bytes()[:-1])
    check(r"npz \(\d+ bytes\) is truncated, changed, or belongs to another")
    arrays.unlink()
    check("cannot read .*npz, which .*json names")
    figures.write_text(figures.read_text()[:-20])
    check("is damaged, it is not JSON")
    content = json.loads(figures.read_text())
    figures.write_text(json.dumps({**content, "schema_version": 2}))
    check("has schema version 2, this ds_hessian reads 1")
    figures.write_text(json.dumps({**content, "cost": {"speed": 1}}))
    check("does not hold a")
    del content[next(name for name in ("num_matvecs", "value", "loss") if name in content)]
    figures.write_text(json.dumps(content))
    check("does not hold a")


def test_sharpness_as_monitor_events_and_as_a_line() -> None:
    full, plain = RECORDS[-2:]
    events = {tag: (value, step) for tag, value, step in monitor_events(full)}
    prefix = "Train/Hessian/sharpness/"
    assert all(tag.startswith(prefix) for tag in events)
    assert events[prefix + "eigenvalue_max"] == (3.0, PROVENANCE.step)
    assert events[prefix + "eigenvalue_max_error"] == (0.1, PROVENANCE.step)
    assert events[prefix + "preconditioned"][0] == 1e-300
    assert events[prefix + "converged"][0] == 0.0
    assert prefix + "preconditioned_error" not in events  # NaN
    assert not any("update" in tag or "preconditioned" in tag for tag, *_ in monitor_events(plain))
    assert "largest eigenvalue 3.00 ± 0.10 (not converged); 4 products" in plain.table()


def test_a_share_without_an_error_is_printed_without_one() -> None:
    """Of two probes no pair is left where one is left out."""
    found = replace(kronecker(), share_errors=np.full((2, 2), math.nan))
    lines = str(found.table()).splitlines()
    assert not any("± nan" in line for line in lines)
    assert any(f"{found.shares[0, 0]:.3f}" in line and "±" in line for line in lines)


def test_a_damped_matrix_with_negative_curvature_is_called_by_its_name() -> None:
    """It was "H + damping I" whatever the operator."""
    (solution,) = (record for record in RECORDS if isinstance(record, HessianSolution))
    provenance = replace(solution.provenance, operator="residual")
    negative = np.ones(len(solution.dampings), bool)
    found = replace(solution, provenance=provenance, negative_curvature=negative)
    assert "the residual + damping I has negative curvature at damping" in found.table()
