"""Which tokens are samples of Kronecker factors, and in which units these are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_hessian.operators.kronecker.samples import Samples
from tests.operators.nets import batches, loss_of, mlp, train
from tests.plain.test_kronecker import factors_of, matrices, matrix_of, seen

DATA = batches(4)
TOKENS, WIDTH, CLASSES = 6, 8, 5


class Attention(nn.Module):
    """A block of one head whose queries, keys and values are three layers.

    Args:
        causal: Whether tokens see those before them alone.
    """

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """`(batch, time, width)` to the same; `mask` is False for padding."""
        scores = self.q(x) @ self.k(x).mT
        seen = mask[:, None, :].expand(-1, x.shape[1], -1)
        seen = seen.tril() if self.causal else seen
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)
        x = x + self.out(weights @ self.v(x))
        return x + torch.tanh(self.up(x))


class Net(nn.Module):
    """Two blocks; logits of every token, or of the first one."""

    def __init__(self, causal: bool, first: bool = False) -> None:
        super().__init__()
        self.first, self.embed = first, nn.Embedding(CLASSES, WIDTH)
        self.place = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Attention(causal) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Logits."""
        x = self.embed(tokens) + self.place.weight
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(x[:, 0] if self.first else x)
        return logits


def loss(net: nn.Module, entry: Any) -> Tensor:
    """The mean over the labels of a micro-batch."""
    tokens, mask, labels = entry
    return functional.cross_entropy(net(tokens, mask).flatten(0, -2), labels.flatten())


def micro_batches(kind: str, count: int = 3) -> list[Any]:
    """Tokens, masks and labels, as many labels in each micro-batch."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(count):
        tokens = torch.randint(CLASSES, (4, TOKENS), generator=generator)
        mask, place = torch.ones_like(tokens, dtype=torch.bool), torch.arange(TOKENS)
        labels = tokens.roll(-1, 1)
        if kind == "prompt":
            labels = labels.masked_fill(place < 3, -100)
        elif kind == "padding":
            mask = place < torch.tensor([[4], [6], [3], [5]])
            labels = labels.masked_fill(~mask, -100)
        elif kind == "some labels":
            labels = tokens.masked_fill(place != torch.tensor([[1], [4], [2], [5]]), -100)
        elif kind == "first":
            labels = tokens[:, 1]
        found.append((tokens, mask, labels))
    return found


EXPECTED = {
    # Samples of the first block's keys and of the last block's queries, and terms of the loss.
    "prompt": (72, 36, 36),
    "padding": (54, 42, 54),
    "some labels": (72, 12, 12),
    "first": (72, 12, 12),
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_tokens_on_which_the_loss_does_not_depend_are_no_samples(kind: str) -> None:
    """All tokens were: of masked prompts, padding, and what is behind the last attention."""
    torch.manual_seed(0)
    net, data = Net(kind in ("prompt", "padding"), kind == "first"), micro_batches(kind)
    found = {f.layer.name: f for f in factors_of(net, data, loss, kinds=("kfac", "ekfac"))}
    exact = seen(net, data, loss)
    keys, queries, terms = EXPECTED[kind]
    assert found["blocks.0.k.weight"].samples["kfac"] == keys
    for name, f in found.items():
        parts = [(a, c, c.abs().amax(1) > 1e-14) for a, c in exact[name]]
        parts = [(a[told], c[told]) for a, c, told in parts]
        assert f.samples["kfac"] == f.samples["ekfac"] == sum(len(a) for a, _ in parts), name
        assert f.terms == terms
        for which, matrix in matrices(parts).items():
            if which != "shampoo":
                matrix = matrix * terms / f.samples["kfac"]
                assert (matrix_of(f.forms[which]) - matrix).norm() < 1e-4 * matrix.norm(), name
    assert found["blocks.1.q.weight"].samples["kfac"] == queries


def test_masked_labels_of_a_classifier_are_no_samples() -> None:
    """They were in the covariance of the inputs, in the scale of EK-FAC and in `samples`."""
    net = train(mlp(), batches(), 40)
    masked = [
        (x, y.masked_fill(torch.arange(len(y)) % 4 > i, -100)) for i, (x, y) in enumerate(DATA)
    ]

    def masking(net: Any, entry: Any) -> Tensor:
        x, y = entry
        return functional.cross_entropy(net(x.to(net[0].weight)), y)

    exact, told = seen(net, masked, masking), sum(int((y >= 0).sum()) for _, y in masked)
    for f in factors_of(net, masked, masking):
        parts = exact[f.layer.name]
        parts = [(a[c.ne(0).any(1)], c[c.ne(0).any(1)]) for a, c in parts]
        assert f.samples["kfac"] == f.samples["ekfac"] == f.terms == told < 64
        for kind, matrix in matrices(parts).items():
            assert (matrix_of(f.forms[kind]) - matrix).norm() < 1e-4 * matrix.norm(), kind


def test_a_micro_batch_whose_labels_are_masked_is_no_sample() -> None:
    def summed(net: Any, entry: Any) -> Tensor:
        x, y = entry
        return functional.cross_entropy(net(x), y, reduction="sum") / 16

    masked = [*DATA[:3], (DATA[3][0], torch.full_like(DATA[3][1], -100))]
    found = factors_of(mlp(), masked, summed)
    assert len(found) == 3
    for f in found:
        assert f.samples == {"kfac": 48, "ekfac": 48, "shampoo": 3, "klshampoo": 3}
        assert f.mismatch < 1e-5 and all(bool(k.values.isfinite().all()) for k in f.forms.values())


def test_a_token_whose_cotangent_is_what_rounding_leaves_is_no_sample() -> None:
    """As the first query of causal attention, where other layouts have an exact zero."""
    c, unit = torch.full((4, 3), 1e-3), torch.tensor([1.0, 1.0, 1e-6, 0.0])[:, None]
    for rounded in (0.0, 1e-7, -2e-7):
        samples = Samples()
        assert samples.among(1, c * unit).tolist() == [True, True, True, False]
        query = torch.tensor([rounded, 1.0, 1e-6, 1e-9])[:, None] * 1e-2
        assert samples.among(1, c * query).tolist() == [False, True, True, True]
        other = samples.among(2, c * query)  # backward, of another micro-batch
        assert other is None if rounded else other is not None and not other[0]
    samples = Samples()  # where nothing is left of all of them it is not for one of them
    assert samples.among(1, c) is None and samples.among(1, 1e-12 * c) is None
    assert samples.among(1, 0 * c).tolist() == [False] * 4
    assert samples.among(1, torch.full((4, 3), math.nan)) is None


@pytest.mark.parametrize("draws", [0, 2])
def test_a_loss_that_tells_of_all_tokens_has_all_samples(draws: int) -> None:
    for f in factors_of(mlp(), DATA, loss_of, kinds=("kfac",), draws=draws):
        assert f.samples["kfac"] == 64 * max(draws, 1) and f.terms == 64 * max(draws, 1)
