"""Spectra in the Trainer: of the loss that it trains, and without a trace in the training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import ds_hessian
from ds_hessian.show.monitor import HISTOGRAM, PICTURE, STEP
from tests.backends.test_monitor import comet_content, wandb_rows
from tests.integrations import jobs, plain_jobs
from tests.nets import DenseHessian
from tests.operators.gauss_newton import ExactGaussNewton
from tests.ranks import RankPool
from tests.tiers import needs

pytestmark = needs("transformers", "accelerate")
Ranks = Callable[[int], RankPool]
RANKS, WINDOW = 2, 2  # micro-batches of an accumulation window


def counted(labels: Tensor) -> Tensor:
    """Which positions of the shifted labels a causal language model's loss counts."""
    return labels[:, 1:] != -100


def gather(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All ranks' micro-batches, with what the Trainer divides their windows' losses by."""
    micro_batches = [each for rank in found for each in rank["micro_batches"]]
    assert len(micro_batches) == RANKS * jobs.SECTION["num_micro_batches"]
    for first in range(0, len(found[0]["micro_batches"]), WINDOW):
        window = [m for r in found for m in r["micro_batches"][first : first + WINDOW]]
        labels = [m["inputs"]["labels"] for m in window]
        tokens = [
            sum(int(f(each).sum()) for each in labels)
            for f in (counted, lambda labels: labels != -100)
        ]
        # transformers counts the first label too where it does not know the model's loss
        assert {int(m["num_items"]) for m in window} <= set(tokens)
        assert len({int(m["num_items"]) for m in window}) == 1
    return micro_batches


def share(micro_batch: dict[str, Any]) -> float:
    """Factor of a micro-batch's summed loss in the mean over micro-batches: windows average."""
    return RANKS * WINDOW / int(micro_batch["num_items"])


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.full)])
def test_the_trainers_hessian_is_that_of_its_loss_and_training_is_bitwise_the_same(
    ranks: Ranks, kind: str
) -> None:
    (changed, found), (changed_there, there) = ranks(2).run(jobs.both, jobs.train, kind)
    assert changed == changed_there == []
    assert found["failures"] == {} and len(found["log"]) == 2
    assert list(found["spectra"]) == [2, 4]
    assert found["written"] == ["step_000002", "step_000004"]
    for step, spectrum in found["spectra"].items():
        entry = found["logged"][step]
        assert entry["hessian/eigenvalue_max"] == spectrum.eigenvalue_max.value
        assert entry["hessian/eigenvalue_max_error"] == spectrum.eigenvalue_max.error

    def loss(model: nn.Module, micro_batch: dict[str, Any]) -> Tensor:
        inputs = micro_batch["inputs"]
        return model(**inputs).loss * counted(inputs["labels"]).sum() * share(micro_batch)

    exact = DenseHessian(  # attention by plain products: the fused kernel has no second derivative
        jobs.make_model(kind, attn_implementation="eager"),
        found["weights"],
        gather([found, there]),
        loss,
    )
    last = found["spectra"][4]  # after the last step: the final weights are those measured
    assert last.loss == pytest.approx(exact.loss.item(), rel=1e-5)
    assert last.gradient_norm == pytest.approx(exact.gradient.norm().item(), rel=1e-4)
    v = exact.flat(found["probe"])
    product = exact.matvec(v)
    error = last.product_errors[0, 0]
    assert error < 0.01 * product.norm()
    assert abs(last.alphas[0, 0] - v @ product) <= 2 * error
    rest = (product - (v @ product) * v).norm()
    assert abs(last.betas[0, 0] - rest) <= 2 * error


@pytest.mark.full
def test_label_smoothing_is_part_of_the_loss_that_is_measured(ranks: Ranks) -> None:
    """It takes the labels from the model, which then returns no loss of its own."""
    found, there = ranks(2).run(jobs.train, "gpt2", True, label_smoothing_factor=0.3)
    assert found["failures"] == {}
    model = jobs.make_model("gpt2").eval()
    model.load_state_dict(found["weights"], strict=False)
    losses = []
    for micro_batch in gather([found, there]):
        labels = micro_batch["inputs"]["labels"]
        logs = model(micro_batch["inputs"]["input_ids"]).logits[:, :-1].log_softmax(-1)
        right = logs.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        smoothed = -(0.7 * right + 0.3 * logs.mean(-1))
        losses.append(smoothed[counted(labels)].sum().item() * share(micro_batch))
    assert found["spectra"][4].loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@pytest.mark.full
def test_a_resumed_trainer_measures_the_micro_batches_of_before(ranks: Ranks) -> None:
    """It skips the data of the steps before, so that others would be the first it reads."""
    for first, then in ranks(2).run(jobs.resumed):
        assert len(first) == len(then) == 1 and first == then


@pytest.mark.full
def test_without_deepspeed_too(tmp_path: Path) -> None:
    options: dict[str, Any] = {"saved": True, "settings": {"sharpness_interval": 0}}
    first = plain_jobs.train(tmp_path, True, steps=2, **options)["callback"]
    then = plain_jobs.train(tmp_path, True, steps=4, resumed=True, **options)["callback"]
    assert list(first.spectra) == [2] and list(then.spectra) == [4]
    before, after = (c.micro_batches[0]["inputs"]["input_ids"] for c in (first, then))
    assert torch.equal(before, after)


def test_a_loss_that_divides_by_its_window_is_the_same_after_a_short_one(tmp_path: Path) -> None:
    """Ten rows are five micro-batches: an epoch of windows of four and of one."""
    from transformers import Trainer

    class Dividing(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
            return model(**inputs).loss / self.current_gradient_accumulation_steps

    own = {"interval": 1, "sharpness_interval": 0, "num_matvecs": 1, "num_micro_batches": 2}
    options: dict[str, Any] = {"window": 4, "rows": 10, "settings": own, "trainer": Dividing}
    found = plain_jobs.train(tmp_path, True, steps=2, **options)
    model, callback = found["model"].eval(), found["callback"]
    losses = [model(**each["inputs"]).loss.item() for each in callback.micro_batches]
    assert callback.spectra[2].loss == pytest.approx(sum(losses) / 2, rel=1e-5)


@pytest.mark.full
def test_a_callback_measures_the_dataset_or_the_batches_that_it_is_given(ranks: Ranks) -> None:
    rows = jobs.text(32)
    for rank, (dataset, loader, same) in enumerate(ranks(2).run(jobs.chosen)):
        for i, inputs in enumerate(dataset):
            first = 2 * (2 * i + rank)
            expected = torch.stack([row["input_ids"] for row in rows[first : first + 2]])
            assert torch.equal(inputs["input_ids"], expected)
        assert len(dataset) == jobs.SECTION["num_micro_batches"] == len(loader)
        assert same  # reading a loader that shuffles draws nothing from training's generator


@pytest.mark.full
def test_a_loop_on_accelerate_gets_its_spectra_and_trains_bitwise_the_same(ranks: Ranks) -> None:
    for changed, found in ranks(2).run(jobs.both, jobs.accelerate):
        assert (changed, found["failures"]) == ([], {})
        steps = len(found["log"]) // 2  # micro-batches in a step
        assert steps >= 4 and list(found["spectra"]) == list(range(2, steps + 1, 2))


@pytest.mark.full
def test_a_trainer_without_deepspeed_is_measured_as_a_plain_module(tmp_path: Path) -> None:
    plain = plain_jobs.train(tmp_path / "plain", measured=False)
    found = plain_jobs.train(tmp_path / "measured", measured=True)
    assert all(torch.equal(p, found["weights"][name]) for name, p in plain["weights"].items())
    assert torch.equal(plain["random"], found["random"]) and plain["losses"] == found["losses"]
    callback = found["callback"]
    assert callback.failures == {} and list(callback.spectra) == [2, 4]
    # By the Trainer's own AdamW; after the last step its learning rate is 0.
    assert callback.sharpness[3].preconditioned is not None
    assert found["written"] == ["step_000002", "step_000003", "step_000004"]
    assert [entry["step"] for entry in found["logged"]] == [2, 4]

    def loss(model: nn.Module, micro_batch: dict[str, Any]) -> Tensor:
        inputs = micro_batch["inputs"]
        number = counted(inputs["labels"]).sum()
        return model(**inputs).loss * number * WINDOW / int(micro_batch["num_items"])

    exact = DenseHessian(found["model"], found["weights"], found["micro_batches"], loss)
    last = callback.spectra[4]
    assert last.provenance.layout == "torch, 1 rank"
    assert last.loss == pytest.approx(exact.loss.item(), rel=1e-5)
    assert last.gradient_norm == pytest.approx(exact.gradient.norm().item(), rel=1e-4)
    values = torch.linalg.eigvalsh(exact.matrix())
    assert values[0] - 1e-3 <= last.eigenvalue_max.value <= values[-1] + 1e-3


def exact_gauss_newton(found: dict[str, Any], every: list[dict[str, Any]], factor: int) -> Any:
    """G of the Trainer's loss by automatic differentiation, and a function that makes a vector."""
    model = jobs.make_model("gpt2", attn_implementation="eager")
    model.load_state_dict(found["weights"], strict=False)
    names = [name for name, _ in model.named_parameters()]

    def loss(net: nn.Module, given: list[Tensor]) -> Tensor:
        ids, labels, number = given
        return net(input_ids=ids, labels=labels).loss * counted(labels).sum() * number

    data = []
    for each in every:
        inputs, number = each["inputs"], torch.tensor(factor / int(each["num_items"])).double()
        data.append([inputs["input_ids"], inputs["labels"], number])
    exact = ExactGaussNewton(model, "lm_head", loss, data)
    return exact, lambda named: torch.cat([named[name].reshape(-1).double() for name in names])


@pytest.mark.full
def test_a_trainer_measures_gauss_newton_matrices_and_trains_bitwise_the_same(
    tmp_path: Path,
) -> None:
    settings = {"operator": "ggn", "sharpness_interval": 0, "curvature_interval": 3}
    plain = plain_jobs.train(tmp_path / "plain", measured=False)
    found = plain_jobs.train(tmp_path / "measured", measured=True, settings=settings)
    assert all(torch.equal(p, found["weights"][name]) for name, p in plain["weights"].items())
    assert torch.equal(plain["random"], found["random"]) and plain["losses"] == found["losses"]
    callback = found["callback"]
    assert callback.failures == {} and list(callback.spectra) == [2, 4]
    last = callback.spectra[4]
    assert last.provenance.operator == "ggn"
    assert last.provenance.outputs == "lm_head: cross entropy"
    exact, flat = exact_gauss_newton(found, found["micro_batches"], WINDOW)
    hessian = ds_hessian.attach(found["model"], None, {"progress": False})
    v = flat(hessian.gather(hessian.random_vector(0)))
    require_first_step(last, exact, v)


@pytest.mark.full
def test_gauss_newton_and_decomposition_in_a_trainer_under_zero_3(ranks: Ranks) -> None:
    (changed, found), (changed_there, there) = ranks(2).run(
        jobs.both, jobs.train, "gpt2", section={"operator": "ggn"}, decomposed=True
    )
    assert changed == changed_there == []
    assert found["failures"] == {} and list(found["spectra"]) == [2, 4]
    last, parts = found["spectra"][4], found["decomposition"]
    assert last.provenance.outputs == "lm_head: cross entropy"
    exact, flat = exact_gauss_newton(found, gather([found, there]), RANKS * WINDOW)
    v = flat(found["probe"])
    require_first_step(last, exact, v)
    require_first_step(parts.gauss_newton, exact, v)
    three = parts.hessian, parts.gauss_newton, parts.residual
    h, g, r = (spectrum.alphas[0, 0] for spectrum in three)
    assert abs(g + r - h) <= 3 * sum(spectrum.product_errors[0, 0] for spectrum in three)


def require_first_step(spectrum: Any, exact: Any, v: Tensor) -> None:
    """Lanczos' first step against an exact product."""
    product, error = exact(v), spectrum.product_errors[0, 0]
    assert error < 0.01 * product.norm()
    assert abs(spectrum.alphas[0, 0] - v @ product) <= 3 * error
    assert abs(spectrum.betas[0, 0] - (product - (v @ product) * v).norm()) <= 3 * error


def test_a_loss_that_is_set_on_the_trainer_itself_stays_with_what_it_notes(tmp_path: Path) -> None:
    """As packages set one, which keep figures of each micro-batch in the Trainer."""

    def prepare(trainer: Any) -> None:
        inner, trainer.noted, trainer.calls = trainer.compute_loss, {"losses": []}, 0

        def compute_loss(*args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = inner(*args, **kwargs) * 0.5
            trainer.noted["losses"].append(float(loss.detach()))
            trainer.calls += 1
            return loss

        trainer.compute_loss = compute_loss

    settings = {"sharpness_interval": 0, "num_matvecs": 2}
    options = {"steps": 2, "settings": settings, "prepare": prepare}
    plain = plain_jobs.train(tmp_path / "plain", False, **options)
    found = plain_jobs.train(tmp_path / "measured", True, **options)
    assert found["callback"].failures == {} and list(found["callback"].spectra) == [2]
    for each in (plain, found):
        assert each["trainer"].compute_loss.__name__ == "compute_loss"
        assert each["trainer"].calls == len(each["trainer"].noted["losses"]) == 4
    assert plain["trainer"].noted == found["trainer"].noted
    assert all(torch.equal(w, found["weights"][name]) for name, w in plain["weights"].items())


def test_what_a_trainer_logs_of_its_own_notes_stays_in_the_entries_of_training(
    tmp_path: Path,
) -> None:
    """As the Trainers of trl and sentence-transformers: they forget what they have logged."""

    from transformers import Trainer

    class Noting(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.noted = list[float]()

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            self.noted.append(float(loss.detach()))
            return loss

        def log(self, logs: dict[str, float], *args: Any) -> None:
            super().log(logs | {"noted": sum(self.noted), "count": len(self.noted)}, *args)
            self.noted.clear()

    options = {"steps": 2, "settings": {"sharpness_interval": 0, "num_matvecs": 2}}
    logs = []
    for measured in (False, True):
        found = plain_jobs.train(tmp_path / str(measured), measured, trainer=Noting, **options)
        assert found["callback"].failures == {}
        entries = found["trainer"].state.log_history
        logs.append([entry for entry in entries if "loss" in entry])
    assert list(found["callback"].spectra) == [2] and logs[0][0]["count"] == 4
    assert logs[0] == logs[1]


@pytest.mark.full
def test_micro_batches_of_a_size_that_does_not_fit_are_not_measured(tmp_path: Path) -> None:
    """With `auto_find_batch_size` the Trainer begins anew with smaller ones."""

    def prepare(trainer: Any) -> None:
        inner = trainer.model.forward

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if kwargs["input_ids"].shape[0] > 2:
                raise RuntimeError("CUDA out of memory.")
            return inner(*args, **kwargs)

        trainer.model.forward = forward
        trainer.args.auto_find_batch_size, trainer._train_batch_size = True, 4

    settings = {"sharpness_interval": 0, "num_matvecs": 2}
    found = plain_jobs.train(tmp_path, True, steps=2, settings=settings, prepare=prepare)
    callback = found["callback"]
    assert callback.failures == {} and list(callback.spectra) == [2]
    sizes = [len(each["inputs"]["input_ids"]) for each in callback.micro_batches]
    assert len(sizes) > 1 and set(sizes) == {2}


@pytest.mark.parametrize("given", [True, False])
def test_step_0_of_a_trainer_is_measured_on_given_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: bool
) -> None:
    options: dict[str, Any] = {"dataset": jobs.text(32)} if given else {}
    settings = {"interval": 0, "sharpness_interval": 0, "steps": [0, 1]}
    found = plain_jobs.train(tmp_path, True, steps=1, settings=settings, kind=dict, **options)
    callback = found["callback"]
    assert callback.failures == {} and list(callback.spectra) == ([0, 1] if given else [1])
    assert ("give HessianCallback its batches or a dataset" in caplog.text) is not given
    if given:
        before, after = (callback.spectra[step] for step in (0, 1))
        assert before.provenance.data_fingerprint == after.provenance.data_fingerprint
        assert before.loss != after.loss
        assert [entry["step"] for entry in found["logged"]] == [0, 1]


TOOLS = ("tensorboard", "wandb", "comet_ml")


@pytest.mark.full
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_of_the_trainer_gets_figures_histograms_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    module = pytest.importorskip(tool, reason=f"{tool} is not installed (extra: dev, or monitors)")
    for name, value in (
        ("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board")),
        *(("WANDB_MODE", "offline"), ("WANDB_DIR", str(tmp_path)), ("WANDB_SILENT", "true")),
        *(("COMET_START_ONLINE", "0"), ("COMET_OFFLINE_DIRECTORY", str(tmp_path))),
    ):
        monkeypatch.setenv(name, value)
    settings = {"sharpness_interval": 0, "plot": True}
    found = plain_jobs.train(tmp_path / "job", True, report_to=tool, settings=settings)
    assert found["callback"].failures == {} and [e["step"] for e in found["logged"]] == [2, 4]
    figures = {e["step"]: e["hessian/eigenvalue_max"] for e in found["logged"]}
    if tool == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        board = EventAccumulator(str(tmp_path / "board"), {"histograms": 0}).Reload()  # 0 for all
        scalars = board.Scalars("train/hessian/eigenvalue_max")
        assert {e.step: e.value for e in scalars} == pytest.approx(figures, rel=1e-6)  # fp32
        media = [board.Histograms(HISTOGRAM), board.Images(PICTURE)]
        assert [[e.step for e in events] for events in media] == [[2, 4], [2, 4]]
    elif tool == "wandb":
        module.finish()
        rows = wandb_rows(tmp_path / "wandb")
        name = "train/hessian/eigenvalue_max"
        assert {r["train/global_step"]: r[name] for r in rows if name in r} == figures
        assert [r[STEP] for r in rows if HISTOGRAM in r] == [2, 4]
        assert (
            len(list(tmp_path.glob(f"wandb/offline-run-*/files/media/images/{PICTURE}_*.png"))) == 2
        )
    else:
        module.get_running_experiment().end()
        logged, files = comet_content(tmp_path)
        assert logged["train/hessian/eigenvalue_max"] == pytest.approx(figures, rel=1e-12)
        assert files == {"histogram3d": [2, 4], "visualization": [2, 4]}


@pytest.mark.full
def test_a_trainer_without_settings_is_refused() -> None:
    from transformers import Trainer, TrainingArguments

    from ds_hessian.errors import ConfigError
    from ds_hessian.integrations import HessianCallback

    arguments = TrainingArguments(use_cpu=True, max_steps=1, report_to="none", disable_tqdm=True)
    trainer = Trainer(model=jobs.make_model("gpt2"), args=arguments, train_dataset=jobs.text(8))
    trainer.add_callback(HessianCallback(trainer))
    with pytest.raises(ConfigError, match="must be above 0 for HessianCallback"):
        trainer.train()


class OneFailure(Iterator[dict[str, Tensor]]):
    """Micro-batches that can be read once; one of them cannot, at first."""

    def __init__(self, fails: bool) -> None:
        self.rows = [{k: v[None] for k, v in row.items()} for row in jobs.text(5)]
        self.fails = fails

    def __next__(self) -> dict[str, Tensor]:
        if not self.rows:
            raise StopIteration
        row = self.rows.pop()
        if self.fails and len(self.rows) == 3:
            raise OSError("lost")
        return row


@pytest.mark.parametrize("fails", ["reading", "keeping"])
def test_batches_that_can_be_read_once_are_measured_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """The first measurement fails while it reads them, or once it has."""
    if fails == "keeping":
        keep = mock.Mock(side_effect=[OSError("full"), None])
        monkeypatch.setattr("ds_hessian.slices._write", keep)
    settings = {"sharpness_interval": 0}
    batches = OneFailure(fails == "reading")
    callback = plain_jobs.train(tmp_path, True, settings=settings, batches=batches)["callback"]
    said = {step: str(error) for step, error in callback.failures.items()}
    if fails == "keeping":
        assert list(said) == [2] and "OSError: full" in said[2]
        assert callback.spectra[4].provenance.num_micro_batches == 5
    else:
        assert "OSError: lost" in said[2] and "batches is empty" in said[4]
