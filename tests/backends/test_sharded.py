"""Weights are displaced from what training goes on with, and come back bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_hessian.backends.sharded import Shard, ShardedWeights, widen
from ds_hessian.vectors import Fragment, Layout, VectorSpace
from ds_hessian.vectors.space import CHUNK


def test_rounded_masters_edited_weights_and_weights_of_their_own() -> None:
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(3, 8, generator=generator)
    rounded, edited, alone = master.bfloat16()
    edited[2] = 5.0  # by somebody, after the optimizer's step
    shards = [Shard(rounded, master[0]), Shard(edited, master[1]), Shard(alone, None)]
    layout = Layout([Fragment(name, 0, 8, torch.Size([8])) for name in "abc"])
    kept, published = [w.clone() for w in (rounded, edited, alone)], list[None]()
    space = VectorSpace(24)
    weights = ShardedWeights(shards, layout, space, lambda: published.append(None))
    origins = [master[0], kept[1].float(), kept[2].float()]
    assert weights.norm() == pytest.approx(torch.cat(origins).double().norm().item(), rel=1e-14)
    v = torch.randn(24, generator=generator)
    for h in (0.25, -0.5):
        change = weights.displace(v, h)
        for w, origin, part in zip((rounded, edited, alone), origins, v.split(8), strict=True):
            assert torch.equal(w, (origin + h * part).bfloat16())
        assert change[0] * h > 0
    weights.displace(v, 0.5, across=True)  # free masters: rounded once, from them
    for w, origin, part in zip((rounded, edited, alone), origins, v.split(8), strict=True):
        assert torch.equal(w, (origin + 0.5 * part).bfloat16())
    weights.restore()
    assert all(map(torch.equal, (rounded, edited, alone), kept))
    assert len(published) == 3  # the host publishes what is restored, on all ranks


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that a call returns."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.size = max(self.size, made.numel() if isinstance(made, Tensor) else 0)
        return made


@pytest.mark.parametrize("shape", [(), (3, 4), (CHUNK + 7,)])
def test_edited_weights_are_widened_without_the_memory_of_all(shape: tuple[int, ...]) -> None:
    """It took 13 bytes for each, next to fp32 weights of four."""
    master = torch.randn(shape)
    weight, wide = master.bfloat16(), torch.empty(shape)
    weight.view(-1)[::2] += 1.0
    expected = torch.where(weight == master.bfloat16(), master, weight.float())
    with Largest() as largest:
        widen(wide, weight, master)
    assert torch.equal(wide, expected) and largest.size <= CHUNK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_masters_that_weights_hold_one_side_is_reached_from_the_other(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(16, generator=generator).to(dtype)
    master, v = w.float().clone(), torch.randn(16, generator=generator)
    layout = Layout([Fragment("a", 0, 16, torch.Size([16]))])
    weights = ShardedWeights([Shard(w, master)], layout, VectorSpace(16), lambda: None)
    h = 2 * torch.finfo(dtype).eps
    weights.displace(v, h)
    there = w.clone()
    change = weights.displace(v, -h, across=True)
    assert torch.equal(w, (there.float() - 2 * h * v).to(dtype))
    assert not torch.equal(w, (master - h * v).to(dtype))
    moved = w.double() - there.double()
    assert torch.allclose(change, torch.stack([moved @ v.double(), moved @ moved]), rtol=1e-14)
    weights.restore()
    assert torch.equal(w.float(), master)
