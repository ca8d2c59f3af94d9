"""What a caller may give by mistake, and models and vectors at the edge of what there is."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune, weight_norm
from torch.nn.utils.parametrize import register_parametrization

import ds_hessian
from ds_hessian import HessianConfig, HessianSpectrum
from ds_hessian.backends.state import hooks_in
from ds_hessian.errors import ConfigError, HessianError, NumericsError, UnsupportedError
from ds_hessian.hosts import settings_for
from tests.operators.nets import Exact, batches, loss_of, mlp
from tests.plain import jobs
from tests.ranks import RankPool
from tests.tiers import cells

QUIET = {"num_matvecs": 3, "progress": False, "plot": False}


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


@pytest.fixture
def hessian(net: nn.Module) -> Any:
    return ds_hessian.attach(net, config=QUIET).use(batches(), loss_of)


@pytest.fixture(scope="module")
def spectrum(net: nn.Module) -> HessianSpectrum:
    return ds_hessian.attach(net, config=QUIET).use(batches(), loss_of).spectrum()


def test_settings_may_be_numbers_and_arrays_of_numpy_and_torch() -> None:
    given = HessianConfig(
        num_matvecs=np.int64(5),
        seed=torch.tensor(3),
        sampling=np.bool_(False),
        steps=np.array([1, 2]),
        parameters=np.array(["a", "b"]),
        finite_difference={"displacement": np.float32(0.5)},
    )
    plain = HessianConfig(
        num_matvecs=5,
        seed=3,
        steps=[1, 2],
        parameters=["a", "b"],
        finite_difference={"displacement": 0.5},
    )
    assert given == plain and HessianConfig(steps=range(1, 3)).steps == (1, 2)
    with pytest.raises(ConfigError, match=r"num_matvecs: must be an integer.*got \[5, 6\]"):
        HessianConfig(num_matvecs=np.array([5, 6]))


@pytest.mark.parametrize(
    "given",
    [torch.optim.AdamW, "list", "scheduler", "parameters"],
    ids=["class", "list", "scheduler", "parameters"],
)
def test_what_is_no_optimizer_is_refused_with_and_without_settings(
    net: nn.Module, given: Any
) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    made = {
        "list": [optimizer],
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "parameters": net.parameters(),
    }
    wrong = made[given] if isinstance(given, str) else given
    for settings in ((), (QUIET,)):
        with pytest.raises(ConfigError, match="the optimizer must be the one that steps"):
            ds_hessian.attach(net, wrong, *settings)


class DeepSpeedEngine:
    """What is taken for an engine, without anything that one has."""


@pytest.mark.parametrize("settings", [{"num_matvec": 5}, {"hessian": {"num_matvec": 5}}], ids=str)
def test_settings_of_an_engine_are_read_with_and_without_the_name_of_their_section(
    settings: dict[str, Any],
) -> None:
    """Without it they were taken for a DeepSpeed config that has none, and not looked at."""
    engine: Any = DeepSpeedEngine()
    with pytest.raises(ConfigError, match="num_matvec: unknown key; did you mean"):
        settings_for(engine, settings)
    assert settings_for(engine, {"num_matvecs": 5}).num_matvecs == 5
    assert settings_for(engine, {"train_batch_size": 5}) == HessianConfig()


@pytest.mark.parametrize("step", ["a", None, -1, 1.5, True])
def test_a_step_that_is_no_count_is_refused(hessian: Any, step: Any) -> None:
    with pytest.raises(ConfigError, match="step must be an integer, at least 0"):
        hessian.step = step
    hessian.step = np.int64(7)
    assert hessian.step == 7


def test_settings_that_are_set_are_settings() -> None:
    hessian = ds_hessian.attach(nn.Linear(3, 1))
    with pytest.raises(ConfigError, match="config must be a HessianConfig, got .*with_overrides"):
        hessian.config = {"num_matvecs": 3}
    hessian.config = hessian.config.with_overrides(num_matvecs=3)
    assert hessian.memory_plan("spectrum", num_matvecs=3) == hessian.memory_plan("spectrum")
    with pytest.raises(ConfigError, match="intervals or steps, and this job was attached without"):
        hessian.config = hessian.config.with_overrides(interval=5)


def test_a_folder_that_is_set_has_the_next_records(
    hessian: Any, spectrum: HessianSpectrum, tmp_path: Path
) -> None:
    before = hessian.config
    hessian.config = before.with_overrides(output_path=str(tmp_path / "elsewhere"), plot=False)
    assert hessian.save(spectrum) == tmp_path / "elsewhere" / "step_000000"
    hessian.config = before


@pytest.mark.parametrize("name", ["num_matvecs", "output", "batches", "device", "rank"])
def test_what_would_be_set_without_effect_is_refused(hessian: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"hessian.{name} cannot be set: settings are set by"):
        setattr(hessian, name, 3)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_the_hessian_of_a_job_is_not_copied_but_records_are(
    hessian: Any, spectrum: HessianSpectrum, copied: Any
) -> None:
    with pytest.raises(UnsupportedError, match="copying or pickling a job's Hessian"):
        copied(hessian)
    assert pickle.loads(pickle.dumps(spectrum)) == spectrum == copy.deepcopy(spectrum)


def test_paths_that_are_none_are_refused(
    hessian: Any, spectrum: HessianSpectrum, tmp_path: Path
) -> None:
    calls = (HessianSpectrum.load, spectrum.save, spectrum.plot, hessian.load_vectors)
    nothing: Any = None
    for call in calls:
        with pytest.raises(ConfigError, match="a path must be a text or a Path, got None"):
            call(nothing)
    with pytest.raises(
        ConfigError, match=r"is a folder: give a name in it, such as .*spectrum.png"
    ):
        spectrum.plot(tmp_path)
    with pytest.raises(ConfigError, match=r"it must end in one of .*png"):
        spectrum.plot(tmp_path / "a.xyz")
    with pytest.raises(ConfigError, match='takes a class of records, .*got "spectrum"'):
        hessian.load("spectrum", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("operator", ["hessian", "ggn", "residual"])
@pytest.mark.parametrize("size", cells([1e37, 1e-38, 1e-43], [1e-43]))
def test_products_and_curvatures_do_not_depend_on_the_length_of_the_vector(
    hessian: Any, operator: str, size: float
) -> None:
    v = hessian.random_vector() * size
    u = v.double() / v.double().norm()
    with hessian.measuring(operator=operator):
        extreme, plain = hessian.matvec(v), hessian.matvec(u.float())
    far = extreme.vector.double() / v.double().norm() - plain.vector.double()
    assert far.norm() <= 3 * (extreme.error + plain.error) * plain.norm
    a, b = (hessian.curvatures([], {"v": x}, operator=operator) for x in (v, u.float()))
    assert abs(a.values - b.values) <= 3 * (a.errors + b.errors)


def test_a_product_beyond_the_numbers_of_fp32_names_the_vector(hessian: Any) -> None:
    v = torch.zeros_like(hessian.random_vector())
    hessian.use(batches(), lambda model, batch: 1e4 * loss_of(model, batch))
    with pytest.raises(NumericsError, match=r"of a vector of length .*divide the vector"):
        hessian.matvec(v.add_(hessian.random_vector(), alpha=1e38))


class Empty(nn.Module):
    """A net with parameters that have no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.none = mlp(), nn.Linear(4, 4)
        self.none.weight, self.none.bias = (nn.Parameter(torch.zeros(0, k)) for k in (4, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out + self.none.weight.sum() + self.none.bias.sum()


@pytest.mark.full
def test_blocks_of_parameters_without_elements_are_none() -> None:
    job = ds_hessian.attach(Empty(), config=QUIET | {"num_matvecs": 1}).use(batches(1), loss_of)
    assert not any("none" in name for name in job.block_coupling("parameters").names)
    assert not any("none" in name for name in job.block_spectra("layers").names)
    assert not any("none" in name for name in job.kronecker(["kfac"]).layers)
    with pytest.raises(ConfigError, match=r"none.weight, none.bias have no elements"):
        job.spectrum(parameters="none")


def test_the_outputs_of_the_model_itself_have_the_empty_name(hessian: Any) -> None:
    named = hessian.spectrum(operator="ggn", outputs="")
    assert named.provenance.outputs.startswith("the model itself")
    found = hessian.spectrum(operator="ggn")
    assert np.array_equal(named.alphas, found.alphas) and np.array_equal(named.betas, found.betas)


class Cell(nn.Module):
    """One step towards a fixed point."""

    def __init__(self) -> None:
        super().__init__()
        self.of_z, self.of_x = nn.Linear(3, 3), nn.Linear(10, 3)
        with torch.no_grad():
            self.of_z.weight.mul_(0.4)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.of_z(z) + self.of_x(x))


def fixed_point(step: Any, start: Tensor) -> Tensor:
    for _ in range(40):
        start = step(start)
    return start


class Solved(torch.autograd.Function):
    """The fixed point of a cell, and its gradient by the implicit function theorem."""

    @staticmethod
    def forward(ctx: Any, cell: Cell, x: Tensor, *parameters: Tensor) -> Tensor:
        z = fixed_point(lambda z: cell(z, x), x.new_zeros(len(x), 3))
        ctx.cell = cell
        ctx.save_for_backward(z, x, *parameters)
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        z, x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            at = z.detach().requires_grad_()
            to = ctx.cell(at, x)

        def step(y: Tensor) -> Tensor:
            return torch.autograd.grad(to, at, y, retain_graph=True)[0] + g

        return None, None, *torch.autograd.grad(to, parameters, fixed_point(step, g))


class Equilibrium(nn.Module):
    """A deep equilibrium model, whose gradient is solved for in a hook or a function."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.cell, self.out = how, Cell(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(getattr(self, self.how)(x))
        return found

    def unrolled(self, x: Tensor) -> Tensor:
        return fixed_point(lambda z: self.cell(z, x), x.new_zeros(len(x), 3))

    def function(self, x: Tensor) -> Any:
        return Solved.apply(self.cell, x, *self.cell.parameters())

    def hook(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = self.unrolled(x)
        at = z.detach().requires_grad_()
        z, to = self.cell(z, x), self.cell(at, x)

        def solve(g: Tensor) -> Tensor:
            def step(y: Tensor) -> Tensor:
                return torch.autograd.grad(to, at, y, retain_graph=True)[0] + g

            return fixed_point(step, g)

        z.register_hook(solve)
        return z


def test_a_hook_that_solves_for_another_gradient_is_refused_and_a_function_is_right() -> None:
    torch.manual_seed(0)
    data, net = batches(2), Equilibrium("hook")
    with pytest.raises(UnsupportedError, match="a hook that solves for another gradient"):
        ds_hessian.attach(net, config=QUIET).use(data, loss_of).spectrum()
    net.how = "function"
    job = ds_hessian.attach(net, config=QUIET).use(data, loss_of)
    v = job.random_vector()
    found = job.matvec(v)
    net.how = "unrolled"
    truth = Exact(net, data)(v)
    assert found.error is not None
    assert (found.vector - truth).norm() < 3 * found.error * truth.norm()


@pytest.mark.parametrize(
    ("loss_fn", "given"),
    [(nn.CrossEntropyLoss(), "the criterion CrossEntropyLoss"), ("mse", "a str")],
    ids=["criterion", "text"],
)
def test_a_loss_that_is_no_function_of_model_and_batch_is_refused(
    hessian: Any, loss_fn: Any, given: str
) -> None:
    with pytest.raises(ConfigError, match=rf"called as loss_fn\(model, batch\), got {given}"):
        hessian.use(batches(), loss_fn)


def test_an_engine_for_inference_is_refused(ranks: Callable[[int], RankPool]) -> None:
    (message,) = ranks(1).run(jobs.engine_for_inference)
    assert "an engine of deepspeed.init_inference; attach the model before" in message


@pytest.mark.parametrize(
    "operator", cells(["hessian", "ggn", "residual", "fisher"], ["hessian", "ggn"])
)
def test_products_after_the_end_of_their_measurement_are_refused(
    hessian: Any, operator: str
) -> None:
    with hessian.measuring(operator=operator) as ended:
        ended.matvec(hessian.random_vector(seed=1))
    with pytest.raises(ConfigError, match="the measurement of this operator has ended"):
        ended.matvec(hessian.random_vector(seed=2))


CHANGES: dict[str, Callable[[Any], object]] = {
    "frozen": lambda net: net[0].requires_grad_(False),
    "half": lambda net: net[0].half(),
    "given memory": lambda net: setattr(net[0].weight, "data", net[0].weight.data.clone()),
    "replaced": lambda net: setattr(net[0], "weight", nn.Parameter(net[0].weight.detach())),
}
"""What is done to the weights of a model inside of a measurement."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_product_after_parameters_changed_inside_of_its_measurement_is_refused(
    change: str,
) -> None:
    """It was that of a function that does not read what is displaced, or has no gradient there."""
    net = mlp()
    before = copy.deepcopy(net.state_dict())
    job = ds_hessian.attach(net, config=QUIET).use(batches(2), loss_of)
    v = job.random_vector(seed=1)
    with job.measuring() as operator:
        expected = operator.matvec(v).vector
        CHANGES[change](net)
        with pytest.raises(ConfigError, match=r"0.weight.* inside of a measurement"):
            operator.matvec(v)
    assert torch.allclose(job.matvec(v).vector, expected, rtol=1e-3, atol=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


class _Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T


REBUILT: dict[str, Callable[[Any], object]] = {
    "parametrized": lambda net: register_parametrization(net[1], "weight", _Symmetric()),
    "normalised": lambda net: weight_norm(net[1]),
    "pruned": lambda net: prune.l1_unstructured(net[1], "weight", 0.5),
    "wrapped": lambda net: setattr(net, "1", nn.Sequential(net[1], nn.Linear(4, 4))),
}
"""What is made of a layer inside of a measurement."""


@pytest.mark.parametrize("after", [True, False], ids=["before a product", "at the end"])
@pytest.mark.parametrize("rebuild", REBUILT)
def test_what_is_made_of_a_layer_inside_of_a_measurement_is_undone(
    rebuild: str, after: bool
) -> None:
    """The model kept what a measurement has in the place of its parameters."""
    net = nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    kept, named, hooks = str(net), list(net.named_parameters()), hooks_in(net[1])
    before = copy.deepcopy(net.state_dict())
    job = ds_hessian.attach(net, config=QUIET).use(batches(2), loss_of)
    v = job.random_vector(seed=1)
    with pytest.raises(ConfigError, match=r"1.* inside of a measurement"):
        with job.measuring() as operator:
            operator.matvec(v)
            REBUILT[rebuild](net)
            if after:
                operator.matvec(v)
    assert str(net) == kept and not any(hooks)
    for (name, p), (other, q) in zip(net.named_parameters(), named, strict=True):
        assert name == other and p is q
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("after", [True, False], ids=["after it", "before it"])
def test_a_loss_that_leaves_gradients_off_leaves_them_on_for_the_next_one(
    hessian: Any, after: bool
) -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        if not after:
            torch.set_grad_enabled(False)
        loss = loss_of(model, batch)
        torch.set_grad_enabled(False)
        return loss

    v, found = hessian.random_vector(), hessian.use(batches(), loss_fn).matvec
    if after:
        left = found(v).vector
        assert torch.equal(left, hessian.use(batches(), loss_of).matvec(v).vector)
        return
    with pytest.raises(HessianError, match=r"one scalar loss that requires gradients.*=False"):
        found(v)


@pytest.mark.parametrize("name", ["no_grad", "inference_mode", "autocast"])
def test_contexts_inside_of_a_block_are_taken_as_those_around_a_call(
    hessian: Any, name: str
) -> None:
    v, expected = hessian.random_vector(), hessian.matvec(hessian.random_vector()).vector
    context = {"autocast": lambda: torch.autocast("cpu")}.get(name, getattr(torch, name))
    if name == "no_grad":
        with hessian.measuring() as operator, context():
            assert torch.equal(operator.matvec(v).vector, expected)
        return
    with hessian.measuring() as operator:
        with context(), pytest.raises(HessianError, match=f"inside of torch.{name}"):
            operator.matvec(v)
        assert torch.equal(operator.matvec(v).vector, expected)


def test_train_flags_are_set_for_every_product() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(10), *mlp(), nn.Dropout(0.5))
    net(torch.randn(64, 10))
    job = ds_hessian.attach(net, config=QUIET).use(batches(2), loss_of)
    v, found = job.random_vector(), list[Tensor]()
    for change in (lambda: None, net.train, net.eval):
        with job.measuring() as operator:
            change()
            found.append(operator.matvec(v).vector)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert all(m.training for m in net.modules())


@pytest.mark.parametrize("bag", [False, True])
def test_gradients_scaled_by_frequencies_are_taken_as_those_of_the_loss(bag: bool) -> None:
    found = []
    for scaled in (False, True):
        torch.manual_seed(0)
        table = (nn.EmbeddingBag if bag else nn.Embedding)(4, 3, scale_grad_by_freq=scaled)
        net = nn.Sequential(table, nn.Linear(3, 2))
        data = [torch.tensor([[0, 0, 1], [2, 0, 3]]), torch.tensor([[1, 1, 1], [2, 2, 0]])]
        hessian = ds_hessian.attach(net).use(data, lambda model, x: model(x).sin().square().mean())
        product = hessian.matvec(hessian.random_vector(seed=0))
        found.append(product.vector)
    assert torch.equal(*found)


def test_losses_of_one_factory_start_from_their_own_directions() -> None:
    """The second one started from a direction of other parameters, and had 2.25 for 25."""
    net = nn.ModuleList([nn.Linear(4, 1, bias=False) for _ in range(2)])
    for p in net.parameters():
        nn.init.zeros_(p)
    x, y = torch.diag(torch.tensor([10.0, 3.0, 1.0, 0.5])), torch.ones(4, 1)

    def head(number: int) -> Any:
        def loss(model: Any, entry: Any) -> Tensor:
            wanted = entry[1].index_fill(0, torch.tensor([0]), float(1 - number))
            return 0.5 * (model[number](entry[0]) - wanted).square().mean()

        return loss

    job = ds_hessian.attach(net, config={"progress": False})
    for number in range(2):
        found = job.use([(x, y)], head(number)).sharpness(preconditioned=False)
        assert found.eigenvalue_max.value == pytest.approx(25, rel=1e-2)
