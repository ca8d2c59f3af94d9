"""Passes of Kronecker factors without the gradients of weights: what they spare, leave and see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.errors import HessianError, UnsupportedError
from ds_hessian.operators.kronecker import Settings, estimate, find_layers
from tests.operators.nets import batches, loss_of
from tests.plain.test_kronecker import matrices, matrix_of, seen

DATA = batches(4)


class Net(nn.Module):
    """Four layers; `last` of them is used where the first label is 0, and `tied` twice there."""

    def __init__(self, ties: bool = False, checkpointing: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.tied = nn.Linear(10, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.ties, self.checkpointing = ties, checkpointing

    def body(self, x: Tensor) -> Tensor:
        """`(T, 8)`."""
        hidden = torch.tanh(self.middle(x))
        return torch.tanh(self.tied(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        hidden = torch.tanh(self.first(x))
        if self.checkpointing is None:
            hidden = self.body(hidden)
        else:
            hidden = checkpoint(self.body, hidden, use_reentrant=self.checkpointing)
        if x[0, 0] > 0:
            hidden = torch.tanh(self.last(hidden))
            if self.ties:
                hidden = functional.linear(hidden, self.tied.weight)
        return self.head(hidden)


def signed(positive: int) -> list[Any]:
    """Four micro-batches, of which one is positive in its first number."""
    found = []
    for i, (x, y) in enumerate(DATA):
        moved = x.clone()
        moved[0, 0] = 1.0 if i == positive else -1.0
        found.append((moved, y))
    return found


def measured(net: nn.Module, entries: list[Any]) -> tuple[list[Any], list[dict[str, float]]]:
    """K-FAC of all layers, and the norm of each weight's gradient in each unit."""
    backend, norms = ModuleBackend(net), list[dict[str, float]]()
    layers, _ = find_layers(backend, None)
    with backend.measuring(backend.objective(entries, loss_of)) as session:
        inner = session.add_gradient

        def add_gradient(out: Tensor, units: range) -> None:
            mine = torch.zeros_like(out)
            inner(mine, units)
            norms.append({f.name: float(mine[part].norm()) for f, part in session.layout})
            out += mine

        session.add_gradient = add_gradient  # type: ignore[method-assign]
        found = estimate(session, backend, layers, Settings(("kfac",)))
    assert all(p.requires_grad for p in net.parameters())
    return found, norms


def test_weights_have_gradients_until_each_layer_was_seen_and_then_none() -> None:
    """But the first one, whose inputs have no graph that a backward could be for."""
    found, norms = measured(Net(), signed(positive=1))
    weights = [f.layer.name for f in found]
    for unit, each in enumerate(norms):
        with_gradient = {name for name in weights if each[name] > 0}
        wanted = {
            0: {"first.weight", "middle.weight", "tied.weight", "head.weight"},
            1: {"first.weight", "last.weight"},
        }
        assert with_gradient == wanted.get(unit, {"first.weight"}), unit
        assert each["head.bias"] > 0
    exact = seen(Net(), signed(positive=1), loss_of)
    for f in found:
        assert f.mismatch < 1e-5
        matrix = matrices(exact[f.layer.name])["kfac"]
        if f.layer.name != "last.weight":  # whose mean is one over all micro-batches there
            assert (matrix_of(f.forms["kfac"]) - matrix).norm() < 1e-4 * matrix.norm()
    assert {f.layer.name: f.samples["kfac"] for f in found}["last.weight"] == 16


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant: bool) -> None:
    """A recomputation without reentry ends early, by an exception in the forward of a layer."""
    plain, _ = measured(Net(), signed(positive=1))
    found, norms = measured(Net(checkpointing=reentrant), signed(positive=1))
    for a, b in zip(found, plain, strict=True):
        assert a.layer.name == b.layer.name and a.samples == b.samples
        assert torch.allclose(matrix_of(a.forms["kfac"]), matrix_of(b.forms["kfac"]), rtol=1e-5)
    assert norms[2]["middle.weight"] == norms[2]["tied.weight"] == 0


@pytest.mark.parametrize("positive", [0, 3])
def test_a_weight_that_is_used_in_another_way_in_one_unit_is_refused(positive: int) -> None:
    with pytest.raises(UnsupportedError, match=r"not that of one linear layer .*: tied\.weight"):
        measured(Net(ties=True), signed(positive))


def test_a_forward_that_fails_leaves_every_weight_with_a_gradient() -> None:
    net, calls = Net(), [0]

    def failing(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise OSError("on purpose")

    net.middle.register_forward_hook(failing)
    with pytest.raises(HessianError, match="OSError: on purpose"):
        measured(net, DATA)
    assert all(p.requires_grad for p in net.parameters())
    assert all(len(m._forward_pre_hooks) == 0 for m in net.modules())
