"""A checkpoint has the spectrum of the model that was saved, of whatever kind it is."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ds_hessian
from ds_hessian.checkpoints import Loading, Sequences, checkpoint_of, series_of
from ds_hessian.checkpoints.weights import load_into, weights_of
from ds_hessian.checkpoints.zero_files import zero_weights
from ds_hessian.errors import ConfigError, ResultError
from ds_hessian.records import HessianSpectrum
from tests.checkpoints import jobs
from tests.cli.test_cli import call, installed, refused_in_one_line
from tests.nets import DenseHessian, merged
from tests.ranks import RankPool
from tests.tiers import cells, needs

pytestmark = needs("datasets")
Ranks = Callable[[int], RankPool]
ARGUMENTS = ("--model", "tests.checkpoints.jobs:net", "-s", "progress=false", "-s", "plot=false")


def trained() -> jobs.Net:
    torch.manual_seed(1)
    return jobs.Net()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with state dicts of two steps, and their data."""
    net = trained()
    torch.save({"model": net.state_dict(), "epoch": 3}, tmp_path / "net_20.pt")
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.5)
    torch.save(net.state_dict(), tmp_path / "net_100.pth")
    jobs.write_lines(tmp_path / "rows.jsonl", jobs.rows())
    return tmp_path


def exact_of(net: nn.Module) -> Tensor:
    """Eigenvalues of the Hessian on the rows, in fp64, ascending."""
    rows = jobs.rows()
    whole = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    weights = {name: p.detach() for name, p in net.named_parameters()}
    batch = {name: value.double() for name, value in whole.items()}
    dense = DenseHessian(jobs.Net(), weights, [batch], lambda m, b: m(**b))
    return torch.linalg.eigvalsh(dense.matrix())


@pytest.mark.full
def test_a_series_of_state_dicts_makes_a_run_folder_of_exact_spectra(files: Path) -> None:
    output = files / "run"
    done = call(
        *("measure", files / "net_100.pth", files / "net_20.pt", "--data", files / "rows.jsonl"),
        *(*ARGUMENTS, "-s", "num_matvecs=20", "-o", output, "--micro-batch-size", "2"),
    )
    assert (done.returncode, done.stdout.count("Hessian spectrum")) == (0, 2), done.stderr
    assert "memory per rank" in done.stderr and "gradients" in done.stderr  # what it will cost
    assert sorted(path.name for path in output.iterdir()) == ["step_000020", "step_000100"]
    for step, scale in ((20, 1.0), (100, 1.5)):
        net = trained()
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(scale)
        values = exact_of(net)
        spectrum = HessianSpectrum.load(output / f"step_{step:06d}")
        assert spectrum.provenance.step == step
        for found, value in (
            (spectrum.eigenvalue_max, values[-1]),
            (spectrum.eigenvalue_min, values[0]),
        ):
            assert abs(found.value - float(value)) <= found.error < 0.01 * float(values[-1])


@pytest.mark.full
def test_a_killed_series_continues_where_it_was(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = (files / "net_20.pt", files / "net_100.pth")
    command = ("measure", *paths, "--data", files / "rows.jsonl", *ARGUMENTS, "--resume")
    command = (*command, "-s", "num_matvecs=5")
    forward, calls, last = jobs.Net.forward, [0], [0]

    def preempted(net: jobs.Net, x: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == last[0]:
            raise KeyboardInterrupt
        return forward(net, x, y)

    monkeypatch.setattr(jobs.Net, "forward", preempted)
    whole = call(*command, "-o", files / "whole")
    assert whole.returncode == 0, whole.stderr
    last[0], calls[0] = 3 * calls[0] // 4, 0  # in the second of the two
    killed = call(*command, "-o", files / "run")
    assert killed.returncode == 130
    monkeypatch.setattr(jobs.Net, "forward", forward)
    done = call(*command, "-o", files / "run")
    assert done.returncode == 0 and "net_20.pt (1 of 2): done before" in done.stderr
    for step in (20, 100):
        a, b = (HessianSpectrum.load(files / f / f"step_{step:06d}") for f in ("whole", "run"))
        assert np.array_equal(a.alphas, b.alphas) and np.array_equal(a.betas, b.betas)


def test_a_plan_measures_nothing(files: Path) -> None:
    done = call(
        *("measure", files / "net_20.pt", "--data", files / "rows.jsonl", *ARGUMENTS),
        *("--plan", "--analysis", "eigenpairs", "-s", "k=2", "-o", files / "run"),
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "memory per rank" in done.stderr and not (files / "run").exists()


def test_other_analyses_are_offered_as_they_are_registered(files: Path) -> None:
    done = call(
        *("measure", files / "net_20.pt", "--data", files / "rows.jsonl", *ARGUMENTS),
        *("--analysis", "eigenpairs", "-s", "k=1", "-o", files / "run"),
    )
    assert done.returncode == 0, done.stderr
    assert "eigenvalue 1" in done.stdout
    values = exact_of(trained())
    record = json.loads((files / "run/step_000020/eigenpairs.json").read_text())
    assert record
    module = trained()
    data = files / "rows.jsonl"
    found = ds_hessian.measure(module, data, analysis="eigenpairs", k=1, config=jobs.QUIET_CONFIG)
    assert float(found.values[0]) == pytest.approx(float(values[-1]), abs=float(found.errors[0]))
    with pytest.raises(ConfigError, match="no measurement 'solve'; there are spectrum, eigenpairs"):
        ds_hessian.measure(module, data, analysis="solve", config=jobs.QUIET_CONFIG)


def test_a_folder_of_transformers_has_the_spectrum_of_its_model(tmp_path: Path) -> None:
    """Padding has no weight: the mean is over all tokens, of the texts one by one."""
    model = jobs.save_gpt2(tmp_path / "checkpoint-40")
    texts = jobs.sentences()
    data = jobs.write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    wanted = Sequences(micro_batch_size=3)
    found = ds_hessian.measure(
        tmp_path / "checkpoint-40",
        data,
        sequences=wanted,
        config=jobs.QUIET_CONFIG,
        num_matvecs=8,
        output_path=tmp_path / "run",
    )
    assert isinstance(found, HessianSpectrum) and found.provenance.step == 40
    assert HessianSpectrum.load(tmp_path / "run/step_000040") == found
    ids = [[jobs.WORDS.index(word) + 1 for word in text.split()] for text in texts]
    batches = [{"input_ids": torch.tensor([row]), "labels": torch.tensor([row])} for row in ids]

    def loss(module: nn.Module, batch: dict[str, Tensor]) -> Any:
        count = batch["labels"].numel() - 1
        return module(**batch).loss * count, count

    attached = ds_hessian.attach(model.eval(), None, jobs.QUIET_CONFIG).use(batches, loss)
    own = attached.spectrum(num_matvecs=8)
    assert found.loss == pytest.approx(own.loss, rel=1e-5)
    total = sum(len(row) - 1 for row in ids)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    exact = DenseHessian(
        model,
        weights,
        batches,
        lambda m, b: loss(m, b)[0] * len(batches) / total,
    )
    v = exact.flat(attached.gather(attached.random_vector(seed=0)))
    product = exact.matvec(v)
    rest = float((product - (v @ product) * v).norm())
    for spectrum in (found, own):
        error = spectrum.product_errors[0, 0]
        assert error < 0.02 * float(product.norm())
        assert abs(spectrum.alphas[0, 0] - float(v @ product)) <= 2 * error
        assert abs(spectrum.betas[0, 0] - rest) <= 2 * error


@pytest.mark.full
def test_a_folder_of_transformers_is_refused_where_it_is_damaged(tmp_path: Path) -> None:
    folder, proof = tmp_path / "model", tmp_path / "proof"
    jobs.save_gpt2(folder)
    data = jobs.write_lines(tmp_path / "a.jsonl", [{"text": text} for text in jobs.sentences()])
    weights, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())

    def refused(message: str, *more: str) -> None:
        refused_in_one_line(call("measure", folder, "--data", data, *more), message)

    refused("takes 16 at most", "--length", "17")
    refused("no such folder of a tokenizer", "--tokenizer", str(tmp_path / "none"))
    refused("which makes its own model", *ARGUMENTS)
    for change, message in (
        ({"n_embd": 8}, r"mismatched keys transformer.* \(\d+,.*\) in place of \(\d+,.*\)"),
        ({"n_layer": 2}, "missing keys"),
        ({"architectures": ["GPT2ForSequenceClassification"]}, "no model that predicts the next"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized"),
        ({"model_type": "nothing", "architectures": []}, "cannot read"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        refused(message)
    (folder / "config.json").write_text(json.dumps(config))
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    refused("model.safetensors is truncated or damaged")
    weights.unlink()
    torch.save({"transformer.wte.weight": Evil(str(proof))}, folder / "pytorch_model.bin")
    refused("cannot read")
    assert not proof.exists()
    for path in folder.glob("tokenizer*"):
        path.unlink()
    (folder / "pytorch_model.bin").unlink()
    weights.write_bytes(whole)
    refused("there is no tokenizer beside the model")


@pytest.mark.full
def test_the_command_starts_its_ranks_itself(files: Path) -> None:
    command = ("measure", files / "net_20.pt", "--data", files / "rows.jsonl", *ARGUMENTS)
    command = (*command, "--micro-batch-size", "2", "-s", "num_matvecs=5")
    done = installed(*command, "--ranks", "2", "-o", files / "two")
    assert done.returncode == 0 and done.stdout.count("Hessian spectrum") == 1, done.stderr
    assert call(*command, "-o", files / "one").returncode == 0
    one, two = (HessianSpectrum.load(files / f / "step_000020") for f in ("one", "two"))
    assert two.provenance.world_size == 2
    assert two.alphas == pytest.approx(one.alphas, rel=1e-2, abs=1e-4)
    bad = installed(*command, "--ranks", "2", "-s", "num_matvecs=5", "--samples", "2")
    refused_in_one_line(bad, "of the 4 sequences of 2 ranks")


CELLS = [(3, "fp32"), (2, "bf16"), (1, "fp32"), (0, "fp32"), (3, "bf16")]


@pytest.mark.parametrize(("stage", "dtype"), cells(CELLS, [(3, "fp32")]))
def test_a_checkpoint_of_deepspeed_has_the_spectrum_of_its_engine(
    ranks: Ranks, tmp_path: Path, stage: int, dtype: str
) -> None:
    folder = tmp_path / "engine"
    (spectrum, masters), _ = ranks(2).run(jobs.save_engine, str(folder), stage, dtype)
    loading = Loading(factory=jobs.gpt, dtype="bf16" if dtype == "bf16" else "fp32")
    paths = [folder]
    if stage == 3 and dtype == "fp32":
        paths.append(universal(folder))
    for path in paths:
        hessian = ds_hessian.checkpoints.opened(checkpoint_of(path), loading, jobs.QUIET_CONFIG)
        assert hessian.step == 2
        backend = hessian.backend
        assert isinstance(backend, ds_hessian.backends.plain.ModuleBackend)
        there = backend.masters or list(backend.model.parameters())
        for (name, _), p in zip(backend.parameters, there, strict=True):
            assert torch.equal(p.detach().cpu(), masters[name].reshape(p.shape)), name
        found = hessian.spectrum(jobs.all_batches(), num_matvecs=6)
        assert found.loss == pytest.approx(spectrum.loss, rel=1e-5 if dtype == "fp32" else 1e-2)
        error = 2 * (found.product_errors[0, 0] + spectrum.product_errors[0, 0])
        assert abs(found.alphas[0, 0] - spectrum.alphas[0, 0]) <= error
        largest = found.eigenvalue_max, spectrum.eigenvalue_max
        assert abs(largest[0].value - largest[1].value) <= largest[0].error + largest[1].error


def universal(folder: Path) -> Path:
    """The same checkpoint, made universal by DeepSpeed's own converter."""
    from types import SimpleNamespace

    from deepspeed.checkpoint import ds_to_universal

    (tag,) = (path for path in folder.iterdir() if path.is_dir())
    made = folder.parent / "made" / tag.name
    ds_to_universal.main(
        SimpleNamespace(
            input_folder=str(tag),
            output_folder=str(made),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
    return made


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 3])
def test_more_ranks_find_the_same_spectrum(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    folder = tmp_path / "checkpoint-7"
    jobs.save_gpt2(folder)
    data = jobs.write_lines(tmp_path / "a.jsonl", [{"text": t} for t in jobs.sentences(8)])
    alone = ds_hessian.measure(folder, data, config=jobs.QUIET_CONFIG, num_matvecs=5)
    for found in ranks(2).run(jobs.measured, str(folder), str(data), stage):
        assert found.provenance.step == 7 and found.loss == pytest.approx(alone.loss, rel=1e-5)
        error = 2 * (found.product_errors[0, 0] + alone.product_errors[0, 0])
        assert abs(found.alphas[0, 0] - alone.alphas[0, 0]) <= error


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


class Named:
    """Is unpickled as the attribute of an object, as Python up to 3.11.3 writes enumerations."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)


def test_enumerations_that_older_pythons_have_written_are_read(tmp_path: Path) -> None:
    from deepspeed.runtime.zero.config import ZeroStageEnum

    weights, stage = trained().state_dict(), Named(ZeroStageEnum, "optimizer_states")
    torch.save({"module": weights, "stage": stage}, tmp_path / "mp_rank_00_model_states.pt")
    found = zero_weights(tmp_path)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_a_crafted_checkpoint_executes_nothing(files: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    proof = files / "proof"
    torch.save({"up.weight": Evil(str(proof))}, files / "evil.pt")
    (files / "raw.pt").write_bytes(pickle.dumps(Evil(str(proof))))
    tag = files / "engine" / "global_step1"
    tag.mkdir(parents=True)
    torch.save({"module": Evil(str(proof))}, tag / "mp_rank_00_model_states.pt")
    shard = {"optimizer_state_dict": {"zero_stage": 2, "loss_scaler": Evil(str(proof))}}
    more = files / "shards" / "global_step1"
    more.mkdir(parents=True)
    torch.save({"module": {}}, more / "mp_rank_00_model_states.pt")
    torch.save(shard, more / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    crafted = [files / "evil.pt", files / "raw.pt", tag, more]
    for owner in (LossScaler, ZeroStageEnum):
        crafted.append(files / owner.__name__ / "global_step1")
        crafted[-1].mkdir(parents=True)
        stage = Named(owner, "__init__")
        torch.save({"module": {}, "stage": stage}, crafted[-1] / "mp_rank_00_model_states.pt")
    for path in crafted:
        done = call("measure", path, "--data", files / "rows.jsonl", *ARGUMENTS)
        refused_in_one_line(done, "holds more than tensors|cannot read|asks for the attribute")
        assert not proof.exists()


def test_bad_input_is_refused_in_one_line(files: Path) -> None:
    net, data = files / "net_20.pt", files / "rows.jsonl"
    (files / "empty").mkdir()
    (files / "net.txt").write_text("")
    (files / "torn.pt").write_bytes(net.read_bytes()[:-30])
    (files / "void.pt").write_bytes(b"")
    (files / "text.pt").write_text("hello")
    for suffix in ("pt", "safetensors"):
        pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
        (files / f"pointer.{suffix}").write_text(pointer)
    (files / "torn.safetensors").write_bytes(b"12345678901")
    torch.save([1, 2], files / "list.pt")
    other = {**trained().state_dict(), "extra": torch.zeros(1)}
    del other["up.bias"]
    torch.save(other, files / "other.pt")
    (files / "lost").mkdir()
    (files / "lost/latest").write_text("../net_20.pt")
    bare = ARGUMENTS[2:]
    for path, more, message in (
        (files / "none", ARGUMENTS, "no such checkpoint"),
        (files / "empty", ARGUMENTS, "is no checkpoint: it has neither"),
        (files / "net.txt", ARGUMENTS, "a state dict ends in"),
        (files / "torn.pt", ARGUMENTS, "truncated or damaged: copy it again"),
        (files / "void.pt", ARGUMENTS, "void.pt is empty: copy it again"),
        (files / "text.pt", ARGUMENTS, "is no file of torch.save"),
        (files / "pointer.pt", ARGUMENTS, "git lfs pull"),
        (files / "pointer.safetensors", ARGUMENTS, "git lfs pull"),
        (files / "torn.safetensors", ARGUMENTS, "truncated or damaged"),
        (files / "list.pt", ARGUMENTS, "is no state dict"),
        (files / "other.pt", ARGUMENTS, "lacks up.bias and has also extra"),
        (files / "lost", ARGUMENTS, "which is no folder beside it"),
        (net, bare, "has weights alone: name a function"),
        (net, ("--model", "tests.checkpoints.jobs:absent"), "there is no tests.checkpoints"),
        (net, ("--model", "no_such_module_here:x"), "there is no no_such_module_here"),
        (net, ("--model", "net"), "expected module:name"),
        (net, ("--model", "tests.checkpoints.jobs:no_net"), "must return a module"),
        (net, (*ARGUMENTS, "--analysis", "solve"), "there is no measurement 'solve'"),
        (net, (*ARGUMENTS, "-s", "num_matvec=3"), "did you mean .num_matvecs"),
        (net, (*ARGUMENTS, "-s", "k"), "--set takes name=value"),
        (net, (*ARGUMENTS, "--stage", "3"), "ZeRO-3 shards over ranks"),
        (net, (*ARGUMENTS, "--config", str(files / "c.json")), "no such file"),
    ):
        refused_in_one_line(call("measure", path, "--data", data, *more), message)
    refused_in_one_line(call("measure", net, "--data", files / "x", *ARGUMENTS), "no such data")
    refused_in_one_line(call("measure", net, *ARGUMENTS), "--data")


def test_tied_weights_are_loaded_once_and_must_agree(tmp_path: Path) -> None:
    whole = jobs.gpt().state_dict()
    one = {name: value for name, value in whole.items() if name != "head.weight"}
    other = whole | {"head.weight": whole["embed.weight"] + 1}
    for name, weights in (("one", one), ("other", other), ("whole", whole)):
        torch.save(
            {f"module.{key}": value for key, value in weights.items()}, tmp_path / f"{name}.pt"
        )
    for name in ("one", "whole"):
        module = jobs.gpt()
        load_into(module, weights_of(checkpoint_of(tmp_path / f"{name}.pt")), tmp_path)
        assert all(torch.equal(value, whole[key]) for key, value in module.state_dict().items())
    with pytest.raises(ResultError, match="different weights under embed.weight and head.weight"):
        load_into(jobs.gpt(), weights_of(checkpoint_of(tmp_path / "other.pt")), tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64])
def test_weights_of_another_kind_of_numbers_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """Quantized ones are codes, not weights; half precision is another precision of the same."""
    module, weights = trained(), trained().state_dict()
    load_into(module, {name: value.half() for name, value in weights.items()}, tmp_path)
    with pytest.raises(ResultError, match="another kind of numbers"):
        load_into(module, {name: value.to(dtype) for name, value in weights.items()}, tmp_path)


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("inner", ["", "module."], ids=["plain", "with a part named module"])
def test_names_of_wrappers_are_taken_off(tmp_path: Path, prefix: str, inner: str) -> None:
    def made() -> nn.Module:
        return nn.ModuleDict({"module": trained()}) if inner else trained()

    weights = {f"{prefix}{name}": 2 * value for name, value in made().state_dict().items()}
    module = made()
    load_into(module, weights, tmp_path)
    for name, value in module.state_dict().items():
        assert torch.equal(value, weights[prefix + name]), name


@pytest.mark.full
def test_a_tokenizer_is_read_only_where_there_is_text(tmp_path: Path) -> None:
    jobs.save_gpt2(tmp_path / "gpt2-7")
    (tmp_path / "gpt2-7" / "tokenizer.json").write_text("{")
    texts = jobs.write_lines(tmp_path / "a.jsonl", [{"text": text} for text in jobs.sentences()])
    tokens = jobs.write_lines(tmp_path / "b.jsonl", [{"input_ids": [1, 2, 3]}])
    command = ("measure", tmp_path / "gpt2-7", *ARGUMENTS[2:], "-s", "num_matvecs=2")
    command = (*command, "-o", tmp_path / "run", "--data")
    refused_in_one_line(call(*command, texts), "cannot read the tokenizer in")
    assert call(*command, tokens).returncode == 0
    for row in ({"input_ids": [1, 999]}, {"input_ids": [1, 2], "labels": [1, -7]}):
        unknown = jobs.write_lines(tmp_path / "c.jsonl", [row] * 32)
        refused_in_one_line(call(*command, unknown), "has the token .*, the model knows 0 to")


def test_the_step_of_a_checkpoint_is_in_its_name_or_its_place(files: Path) -> None:
    assert [c.step for c in series_of([files / "net_100.pth", files / "net_20.pt"])] == [20, 100]
    (files / "net.pt").write_bytes(b"")
    found = series_of([files / "net_100.pth", files / "net.pt"])
    assert [(c.path.name, c.step) for c in found] == [("net_100.pth", 0), ("net.pt", 1)]
    with pytest.raises(ResultError, match="no such checkpoint"):
        series_of([files / "nothing"])


def test_merged_micro_batches_are_the_same_function(files: Path) -> None:
    """What `exact_of` rests on: rows of equal weight may be put together."""
    rows = [{k: torch.tensor([v]) for k, v in row.items()} for row in jobs.rows()]
    net = trained()
    parts = torch.stack([net(**row) for row in rows]).mean()
    (whole,) = merged([tuple(row.values()) for row in rows])
    assert torch.allclose(net(*whole), parts)
