"""Weights are displaced from what training goes on with, and come back bit for bit."""

from __future__ import annotations

import pytest
import torch

from ds_hessian.backends.sharded import Shard, ShardedWeights
from ds_hessian.vectors import Fragment, Layout, VectorSpace


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
    weights.restore()
    assert all(map(torch.equal, (rounded, edited, alone), kept))
    assert len(published) == 2  # the host publishes what is restored, on all ranks
