"""Plain torch: exact products, the same in every layout, and training that does not notice."""

from __future__ import annotations

import copy
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.overrides import TorchFunctionMode, _len_torch_function_stack
from torch.utils.checkpoint import checkpoint

import ds_hessian
from ds_hessian.backends import Passes
from ds_hessian.backends.adam import moments
from ds_hessian.backends.plain import ModuleBackend, stand_ins
from ds_hessian.errors import ConfigError, MeasurementError, NumericsError, UnsupportedError
from ds_hessian.operators import FiniteDifferenceHessian
from ds_hessian.ranks.lockstep import LockstepError
from tests.nets import TinyGPT, batch
from tests.operators.nets import Exact, batches, loss_of, mlp, relative, train
from tests.plain import jobs
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]
DDP: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket view": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "small buckets": {"bucket_cap_mb": 1e-4},
    "own buffers": {"broadcast_buffers": False},
}


@pytest.mark.parametrize("accumulate", cells([False, True], [True]))
def test_training_in_one_process_is_bitwise_the_same(accumulate: bool) -> None:
    assert jobs.is_neutral(None, accumulate=accumulate, odd=True)


@pytest.mark.parametrize("name", cells(DDP, ["unused"]))
def test_training_in_ddp_is_bitwise_the_same(ranks: Ranks, name: str) -> None:
    options = {"odd": name == "unused", "accumulate": name in ("plain", "bucket view")}
    # A layer without a gradient would leave DDP waiting: only "unused" has one.
    assert all(ranks(2).run(jobs.is_neutral, DDP[name], **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", ["model", "fp32"])
def test_products_are_those_of_double_backward(dtype: torch.dtype, precision: Any) -> None:
    data, net = batches(), train(mlp(), batches(), 40).to(dtype)
    backend, exact = ModuleBackend(net), Exact(net, data)
    before = [p.detach().clone() for p in net.parameters()]
    passes = Passes(precision=precision)
    with backend.measuring(backend.objective(data, loss_of), passes) as session:
        operator = FiniteDifferenceHessian(session)
        v, truth = next(exact.krylov(backend, 1))
        error = relative(operator.matvec(v).vector, truth)
    narrow = dtype != torch.float32 and precision == "model"
    assert error < (0.3 if narrow else 3e-4)
    assert all(map(torch.equal, before, net.parameters()))


@pytest.mark.parametrize("factor", [1.0, 1e-6, 1e3])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_in_fp16_are_not_lost_below_its_smallest_number(
    factor: float, autocast: bool
) -> None:
    """Nor above its largest one; the gradient is the same but for its own rounding."""
    net, data = train(mlp(), batches(), 40), batches()

    def scaled(net: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            return factor * loss_of(net, batch)

    exact = Exact(net if autocast else net.half(), data)
    backend = ModuleBackend(net)
    passes = Passes(precision="model")
    with backend.measuring(backend.objective(data, scaled), passes) as session:
        operator = FiniteDifferenceHessian(session)
        assert relative(operator.gradient * operator.scale, factor * exact.gradient) < 0.01
        v, truth = next(exact.krylov(backend, 1))
        product = operator.matvec(v)
    error = relative(product.vector, factor * truth)
    print(f"error {error:.1e}, estimate {product.error:.1e}")
    assert product.error is not None and error < 0.05 and error < 3 * product.error


class Features(nn.Module):
    """Tied, frozen and unused parameters, a recurrence, checkpointing, channels-last weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.rnn, self.unused = nn.GRU(4, 6, batch_first=True), nn.Linear(3, 3)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, 6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """A scalar."""
        hidden = torch.tanh(self.conv(x)).flatten(2).transpose(1, 2)
        hidden = self.rnn(hidden)[0] * self.frozen
        for reentrant in (True, False):
            hidden = checkpoint(
                lambda h: torch.tanh(self.second(torch.tanh(self.first(h)))),
                hidden,
                use_reentrant=reentrant,
            )
        return hidden.square().mean()


def test_tied_frozen_unused_recurrent_checkpointed_and_channels_last_parameters() -> None:
    torch.manual_seed(0)
    net = Features()
    data = [torch.randn(2, 2, 5, 5) for _ in range(2)]
    wide = copy.deepcopy(net).double()
    parameters = [p for p in wide.parameters() if p.requires_grad]
    loss = torch.stack([_plain(wide, x.double()) for x in data]).mean()
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
    flat = torch.cat([g.reshape(-1) for g in gradients])
    backend = ModuleBackend(net)
    assert [name for name, _ in backend.parameters] == [
        n for n, p in net.named_parameters() if p.requires_grad
    ]
    v = torch.nn.functional.normalize(torch.randn(flat.numel()), dim=0)
    product = torch.autograd.grad(flat @ v.double(), parameters, materialize_grads=True)
    exact = torch.cat([p.reshape(-1) for p in product])
    with backend.measuring(backend.objective(data)) as session:
        operator = FiniteDifferenceHessian(session)
        assert relative(operator.gradient * operator.scale, flat) < 1e-5
        assert relative(operator.matvec(v).vector, exact) < 3e-3
    assert all(p.grad is None for p in net.parameters())


def _plain(net: Features, x: Tensor) -> Tensor:
    hidden = torch.tanh(net.conv(x)).flatten(2).transpose(1, 2)
    with torch.backends.mkldnn.flags(enabled=False):
        hidden = net.rnn(hidden)[0] * net.frozen
    for _ in range(2):
        hidden = torch.tanh(net.second(torch.tanh(net.first(hidden))))
    return hidden.square().mean()


def close(a: Any, b: Any) -> bool:
    """Coefficients, up to what the rounding of fp32 gradients makes of sums in another order."""
    scale = abs(a[0]).max()
    return all(bool(np.abs(x - y).max() < 1e-4 * scale) for x, y in zip(a, b, strict=True))


def test_coefficients_are_those_of_ddp_and_of_zero_0(ranks: Ranks) -> None:
    (alone,) = ranks(1).run(jobs.gpt, False, 6)
    wrapped, _ = ranks(2).run(jobs.gpt, True, 6)
    replicated, _ = ranks(2).run(jobs.gpt, False, 6)
    zero, _ = ranks(2).run(jobs.zero_0)
    assert all(np.array_equal(a, b) for a, b in zip(wrapped, replicated, strict=True))
    assert close(alone, wrapped) and close(alone, zero)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_on_one_rank_ends_on_all(ranks: Ranks, rank: int) -> None:
    for message, kept in ranks(2).run(jobs.failing, rank):
        assert f"rank {rank}: OSError: on purpose" in message and kept


def test_ranks_that_have_counted_different_steps_are_refused(ranks: Ranks) -> None:
    for message in ranks(2).run(jobs.different_steps):
        assert "step: 3 on rank 0, 4 on rank 1; all ranks must give the same" in message


def test_other_weights_on_each_rank_are_refused(ranks: Ranks) -> None:
    for message in ranks(2).run(jobs.different_weights):
        assert "weights differ between the ranks" in message


def test_adams_denominator_and_last_step() -> None:
    torch.manual_seed(0)
    net = TinyGPT(dropout=0.0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.0)
    backend = ModuleBackend(net, optimizer)
    with pytest.raises(ConfigError, match="make an optimizer step"):
        backend.adam()
    for i in range(3):
        before = torch.cat([p.detach().flatten() for p in net.parameters()])
        optimizer.zero_grad()
        net(*batch(i, 0)).backward()
        optimizer.step()
    state, after = backend.adam(), torch.cat([p.detach().flatten() for p in net.parameters()])
    # The difference of two weights near 1 is exact to 6e-8, of a step of 1e-2.
    assert torch.allclose(state.last_step, after - before, atol=1e-6)
    with pytest.raises(ConfigError, match="there is no optimizer"):
        ModuleBackend(net).adam()


def test_adams_steps_may_be_counted_in_the_state_of_one_tensor() -> None:
    """As DeepSpeed's FusedAdam does, which counts those of the last of a group: of others they were
    0, and what reads Adam's state ended with a ZeroDivisionError.
    """
    torch.manual_seed(0)
    net = TinyGPT(dropout=0.0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    backend = ModuleBackend(net, optimizer)
    for i in range(3):
        optimizer.zero_grad()
        net(*batch(i, 0)).backward()
        optimizer.step()
    expected = backend.adam()
    *others, _ = (optimizer.state[p] for p in net.parameters() if p in optimizer.state)
    for state in others:
        state["step"] = 0
    assert all(torch.equal(a, b) for a, b in zip(backend.adam(), expected, strict=True))


def test_adams_last_step_has_the_settings_it_was_made_with() -> None:
    """Schedulers have changed them since, of each group in another way: OneCycleLR the betas too.
    At the end of a decay, where the rate is 0, there was no preconditioned sharpness.
    """
    torch.manual_seed(0)
    net, data = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(5, 3)
    first, last = ({"params": net[i].parameters()} for i in (0, 2))
    optimizer = torch.optim.Adam([first, last], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 3e-2], total_steps=4)
    hessian: Any = ds_hessian.attach(net, optimizer, {"progress": False})
    hessian.use([data], lambda net, x: net(x).square().mean())
    for _ in range(3):
        before = torch.cat([p.detach().flatten() for p in net.parameters()])
        optimizer.zero_grad()
        net(data).square().mean().backward()
        optimizer.step()
        scheduler.step()
    after = torch.cat([p.detach().flatten() for p in net.parameters()])
    # The difference of weights up to 1 is exact to 6e-8, of a step of 2e-2.
    assert torch.allclose(hessian.backend.adam().last_step, after - before, atol=1e-7)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    sharpness = hessian.sharpness()
    assert sharpness.update_norm == pytest.approx(float((after - before).norm()), rel=1e-5)
    optimizer.step()  # which moves nothing
    sharpness = hessian.sharpness(max_matvecs=4)
    assert sharpness.preconditioned is not None and sharpness.table()
    assert sharpness.update_norm == 0 and sharpness.update_curvature is None
    assert hessian.alignment(k=1).update is None
    assert hessian.curvatures().directions == ("gradient",)
    with pytest.raises(ConfigError, match="last step was of length zero"):
        hessian.curvatures(directions=["update"])


@pytest.mark.parametrize("kind", ["RAdam", "NAdam", "Adan", "MSVAG"])
def test_what_is_no_adam_has_no_state_of_adam_although_it_keeps_such_moments(kind: str) -> None:
    """RAdam's first steps have no divisor, and NAdam's look ahead: both were taken for Adam's.
    Those with three betas, or another name for them, ended in a ValueError or KeyError.
    """
    net = nn.Linear(3, 1)
    made = getattr(torch.optim, kind, None)
    if made is None:
        reason = "pytorch-optimizer is not installed"
        made = getattr(pytest.importorskip("pytorch_optimizer", reason=reason), kind)
    optimizer = made(net.parameters(), lr=1e-2)
    net(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()
    backend = ModuleBackend(net, optimizer)
    with pytest.raises(ConfigError, match=f"{kind} has no second moments of Adam"):
        backend.adam()
    described = backend.describe().optimizer
    assert described is not None and described.preconditioned_edge is None


def test_state_that_is_made_before_the_first_step_has_no_step() -> None:
    """As DeepSpeed's Muon makes it at stage 0, whose sharpness ended in a ZeroDivisionError."""
    state = {"step": 0, "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    found = moments(state, {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}, 0, 3)
    assert found is not None and not found.moved
    assert found.denominator.tolist() == [torch.tensor(1e-8).item()] * 3
    assert found.last_step.tolist() == [0.0] * 3


@pytest.mark.full
def test_adams_state_is_whole_where_ranks_share_it_out(ranks: Ranks) -> None:
    """As torch's ZeroRedundancyOptimizer does, by whole parameters."""
    for found in ranks(2).run(jobs.adam_shared_out):
        (*whole, named, _), (*shared, inner, _) = found["whole"], found["shared"]
        assert all(map(torch.equal, whole, shared))
        assert inner == named and inner.name == "Adam"


def test_what_no_rank_steps_has_no_state_of_adam(ranks: Ranks) -> None:
    """It was taken for another rank's, and its denominators were 0."""
    for said in ranks(2).run(jobs.adam_of_others):
        assert "no second moments" in said and "for all trainable parameters" in said


def test_a_state_of_adam_that_differs_between_ranks_is_refused_by_name(ranks: Ranks) -> None:
    """As in local SGD: each rank preconditioned with its own, and figures were of no matrix."""
    for *figures, said in ranks(2).run(jobs.adam_of_each):
        assert figures == ["True", "True"] and "differs between the ranks" in said


class Image(nn.Module):
    """A convolution, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.conv, self.head = nn.Linear(2, 2), nn.Conv2d(3, 4, 3), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        return self.head(torch.tanh(self.conv(x)).flatten(1)).square().mean()


def test_adams_state_of_other_memory_formats_and_of_what_has_had_no_gradient() -> None:
    torch.manual_seed(0)
    net = Image().to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 4, 4).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-7)
    hessian = ds_hessian.attach(net, optimizer, {"progress": False}).use([x])
    with pytest.raises(ConfigError, match="make an optimizer step"):
        hessian.backend.adam()
    for _ in range(3):
        before = torch.cat([p.detach().flatten() for p in net.parameters()])
        optimizer.zero_grad()
        net(x).backward()
        optimizer.step()
    assert not optimizer.state[net.conv.weight]["exp_avg"].is_contiguous()
    state, after = (
        hessian.backend.adam(),
        torch.cat([p.detach().flatten() for p in net.parameters()]),
    )
    assert torch.allclose(state.last_step, after - before, atol=1e-6)
    n = sum(p.numel() for p in net.unused.parameters())
    assert (state.denominator[:n] == optimizer.defaults["eps"]).all()
    assert (state.denominator[n:] > 1e-6).all()
    assert hessian.sharpness(max_matvecs=4).preconditioned is not None


class Aside(nn.Module):
    """A layer, and a weight that something else keeps too: a list that grows, or an object."""

    def __init__(self, listed: bool) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 4), nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.kept = [self.scale] if listed else types.SimpleNamespace(scale=self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs."""
        if isinstance(self.kept, types.SimpleNamespace):
            return self.layer(x).tanh() * self.kept.scale.square()
        self.kept.append(nn.Parameter(x))
        return self.layer(x).tanh() * self.kept[0].square()


@pytest.mark.parametrize("listed", [False, True])
def test_a_weight_that_something_else_than_a_module_keeps_is_displaced_too(listed: bool) -> None:
    net, data = Aside(listed), [torch.randn(8, 3)]
    before = [net.scale] if listed else net.scale
    backend = ModuleBackend(net)
    objective = backend.objective(data, lambda model, x: model(x).square().mean())
    with backend.measuring(objective) as session:
        operator = FiniteDifferenceHessian(session)
        v = torch.linspace(-1, 1, 20)
        found = operator.matvec(v).vector
    kept: Any = net.kept
    pairs = zip(kept, before, strict=True) if listed else [(kept.scale, before)]
    assert all(a is b for a, b in pairs)
    weights = list(net.parameters())
    loss = net(data[0]).square().mean()
    gradient = torch.autograd.grad(loss, weights, create_graph=True)
    sizes = [p.numel() for p in weights]
    along = [part.view_as(p) for part, p in zip(v.split(sizes), weights, strict=True)]
    truth = torch.cat([t.flatten() for t in torch.autograd.grad(gradient, weights, along)])
    assert relative(found, truth) < 1e-3


def test_a_parameter_that_is_used_past_the_model_is_refused() -> None:
    net = nn.Linear(3, 1)
    backend = ModuleBackend(net)
    weight = net.weight
    objective = backend.objective([torch.ones(2, 3)], lambda model, x: (model(x) * weight).sum())
    with backend.measuring(objective) as session, pytest.raises(UnsupportedError, match="past the"):
        FiniteDifferenceHessian(session)


def test_a_parameter_frozen_since_is_refused() -> None:
    net = nn.Linear(3, 1)
    backend = ModuleBackend(net)
    net.bias.requires_grad_(False)
    with pytest.raises(ConfigError, match="have changed.*bias"):
        backend.require_measurable()


def test_autocast_in_the_loss_is_seen_and_refused_in_fp32() -> None:
    net = nn.Linear(3, 1)
    backend = ModuleBackend(net)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    objective = backend.objective([torch.ones(2, 3)], loss)
    with backend.measuring(objective) as session:
        FiniteDifferenceHessian(session)
        assert session.unit_roundoff == 2.0**-8
    fp32 = Passes(precision="fp32")
    refused = pytest.raises(UnsupportedError, match="uses torch.autocast")
    with backend.measuring(objective, fp32) as session, refused:
        FiniteDifferenceHessian(session)


def test_autocast_inside_of_the_model_is_seen() -> None:
    """As Accelerate puts it there: around the model's own forward, which a hook on it precedes."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    net.forward = torch.autocast("cpu", torch.bfloat16)(net.forward)  # type: ignore[method-assign]
    backend = ModuleBackend(net)
    objective = backend.objective([torch.ones(2, 3)], lambda m, x: m(x).float().square().mean())
    with backend.measuring(objective) as session:
        FiniteDifferenceHessian(session)
        assert session.unit_roundoff == 2.0**-8
    assert not torch.nn.modules.module._global_forward_pre_hooks


def _failing(where: str, call: int) -> tuple[Any, Any]:
    """Batches and a loss, of which the n-th call fails at a place."""
    calls = {where: -call}

    def reached(place: str) -> None:
        if place in calls:
            calls[place] += 1
            if not calls[place]:
                raise OSError("on purpose")

    def given() -> Any:
        for entry in batches(3):
            reached("batches")
            yield entry

    def loss(model: nn.Module, entry: Any) -> Tensor:
        reached("forward")
        found = loss_of(model, entry)
        if where == "backward":
            found.register_hook(lambda _: reached("backward"))
        reached("loss")
        return found

    return given(), loss


@pytest.mark.parametrize("where", ["batches", "forward", "loss", "backward"])
def test_a_failure_in_a_process_without_ranks_is_raised(where: str) -> None:
    net = train(mlp(), batches(), 2)
    hessian = ds_hessian.attach(net, config={"progress": False, "plot": False})
    before = [p.detach().clone() for p in net.parameters()]
    gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    given, loss = _failing(where, 2 if where == "batches" else 7)
    with pytest.raises(MeasurementError, match="rank 0: OSError: on purpose"):
        hessian.spectrum(given, loss, num_matvecs=3)
    assert all(map(torch.equal, before, net.parameters()))
    assert all(map(torch.equal, gradients, [p.grad for p in net.parameters()]))
    assert hessian.spectrum(batches(3), loss_of, num_matvecs=3).n == sum(p.numel() for p in before)


def test_a_failure_as_a_pass_ends_leaves_no_mode_of_torch_entered() -> None:
    hessian = ds_hessian.attach(mlp()).use(batches(), loss_of)
    before = _len_torch_function_stack()
    with mock.patch.object(TorchFunctionMode, "__exit__", side_effect=MemoryError("full")):
        with pytest.raises(MeasurementError, match="full"):
            hessian.matvec(hessian.random_vector())
    assert _len_torch_function_stack() == before
    hessian.matvec(hessian.random_vector())


def test_a_failure_to_restore_ends_the_job_of_one_process_too(tmp_path: Path) -> None:
    """A schedule would go on with what is left of the training state."""
    net = train(mlp(), batches(), 2)
    settings = {"progress": False, "plot": False, "interval": 1, "num_micro_batches": 1}
    hessian: Any = ds_hessian.attach(net, config={**settings, "output_path": str(tmp_path)})
    hessian.use(batches(2), loss_of)
    with (
        mock.patch.object(stand_ins, "_put_back", side_effect=OSError("on purpose")),
        pytest.raises(LockstepError, match="on purpose; the training state is lost, end the job"),
    ):
        hessian.step()


def test_compiled_modules_are_measured_eagerly_under_the_same_names() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    compiled = torch.compile(net, backend="eager")
    assert isinstance(compiled, nn.Module)
    data = [torch.ones(2, 3), torch.zeros(2, 3)]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        found = model(x).square().mean()
        assert isinstance(found, Tensor)
        return found

    found = [jobs.coefficients(module, data, loss) for module in (net, compiled)]
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(compiled(data[0]), net(data[0]))


class _Recurrent(nn.Module):
    """A recurrence with kinks, in which parameters are closed over: torch's `scan`, or a loop."""

    def __init__(self, scans: bool) -> None:
        super().__init__()
        self.cell, self.gate, self.scans = nn.Linear(3, 3), nn.Linear(3, 3), scans

    def _step(self, state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        above: Any = state.sum() > 0
        if self.scans:
            x = torch.cond(above, lambda y: torch.relu(self.gate(y)), torch.sin, (x,))
        else:
            x = torch.relu(self.gate(x)) if above else torch.sin(x)
        state = torch.relu(self.cell(state) + x) * state.detach().abs().mean()
        return state, state * 1.0

    def forward(self, x: Tensor) -> Tensor:
        state, states = torch.ones(3), []
        if self.scans:
            found = scan(self._step, state, x)[1]
            assert isinstance(found, Tensor)
            return found
        for each in x:
            state, out = self._step(state, each)
            states.append(out)
        return torch.stack(states)


def _recurrence(scans: bool) -> list[Any]:
    torch.manual_seed(2)
    net = _Recurrent(scans)
    data = [torch.randn(5, 3) for _ in range(2)]
    return jobs.coefficients(net, data, lambda model, x: model(x).square().mean())


def test_operators_that_are_given_functions_are_measured_as_loops_of_these() -> None:
    scanned, looped = _recurrence(True), _recurrence(False)
    for a, b in zip(scanned, looped, strict=True):
        assert np.allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.full
def test_a_measurement_may_be_the_first_to_compile() -> None:
    program = (
        "import sys; from tests.plain import test_plain; assert 'torch._dynamo' not in sys.modules;"
        "test_plain.test_operators_that_are_given_functions_are_measured_as_loops_of_these();"
        "assert 'torch._dynamo' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_what_is_not_supported_is_refused_by_name() -> None:
    net = nn.Linear(3, 1)
    with pytest.raises(UnsupportedError, match="not support DataParallel"):
        ModuleBackend(nn.DataParallel(net))
    with pytest.raises(UnsupportedError, match="not support lazy modules"):
        ModuleBackend(nn.LazyLinear(3))
    with pytest.raises(UnsupportedError, match="not support parameters on the meta device"):
        ds_hessian.attach(nn.Linear(3, 1, device="meta"))
    with pytest.raises(UnsupportedError, match="without trainable parameters"):
        ModuleBackend(net.requires_grad_(False))
    with pytest.raises(UnsupportedError, match="not support sparse gradients"):
        ModuleBackend(nn.Embedding(3, 2, sparse=True))
    for scripted in (torch.jit.script(net), nn.Sequential(torch.jit.script(nn.Linear(3, 1)))):
        with pytest.raises(UnsupportedError, match="not support modules of torch.jit"):
            ModuleBackend(scripted)
    partitioned = nn.Linear(3, 1)
    partitioned.weight.ds_id = 0  # type: ignore[assignment]  # as zero.Init marks them
    with pytest.raises(UnsupportedError, match="ZeRO-3 has partitioned; attach the engine"):
        ModuleBackend(partitioned)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (nn.Module.double, "trainable parameters in torch.float64"),
        (lambda net: net.requires_grad_(False), "without trainable parameters"),
        (lambda net: net.append(torch.jit.script(nn.Tanh())), "modules of torch.jit"),
    ],
)
def test_what_a_module_has_become_is_refused_by_name_too(
    change: Callable[[nn.Module], object], message: str
) -> None:
    net = nn.Sequential(nn.Linear(3, 1))
    hessian = ds_hessian.attach(net, config={"progress": False})
    hessian.use([torch.ones(2, 3)], lambda model, x: model(x).square().mean())
    change(net)
    with pytest.raises(UnsupportedError, match=message):
        hessian.spectrum(num_matvecs=1)


def test_weights_that_are_not_finite_are_said() -> None:
    net = nn.Sequential(nn.Linear(3, 1), nn.Tanh())
    net[0].weight.data[0, 0] = torch.inf
    hessian = ds_hessian.attach(net, config={"progress": False})
    with pytest.raises(NumericsError, match="the weights are not finite"):
        hessian.spectrum([torch.ones(2, 3)], lambda model, x: model(x).sum(), num_matvecs=1)


@pytest.mark.parametrize("kind", ["FSDP", "FSDP2"])
def test_sharded_modules_are_refused_by_name(ranks: Ranks, kind: str) -> None:
    expected = {"FSDP": "FullyShardedDataParallel", "FSDP2": "DTensors"}[kind]
    for message in ranks(2).run(jobs.sharded_refusal, kind):
        assert expected in message
