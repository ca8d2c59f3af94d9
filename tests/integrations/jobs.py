"""What each rank does in the tests of the Trainer and of Accelerate."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

VOCABULARY, LENGTH = 13, 8
SECTION = {
    "interval": 2,
    "num_matvecs": 3,
    "num_micro_batches": 4,  # two accumulation windows
    "plot": False,
    "progress": False,
}


def config(**section: Any) -> dict[str, Any]:
    """ZeRO-3, with a "hessian" section where one is given."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    return settings | ({"hessian": section} if section else {})


def make_model(kind: str, **options: Any) -> nn.Module:
    """A small language model from its config class, with its own random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    # No padding token: its embedding would have no gradient, but tokens here are all ordinary.
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    if kind == "gpt2":
        sizes = {"n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2}
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **ends, **options))
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=LENGTH,
            **ends,
            **options,
        )
    )


def text(count: int) -> list[dict[str, Tensor]]:
    """Sequences of very different numbers of tokens that count."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for number in range(count):
        start = int(torch.randint(VOCABULARY, (), generator=generator))
        tokens = (start + 3 * torch.arange(LENGTH)) % VOCABULARY
        labels = tokens.clone()
        labels[2 + (5 * number) % (LENGTH - 1) :] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


def whole_weights(engine: Any) -> dict[str, Tensor]:
    """Parameters by name, unsharded."""
    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return {name: p.detach().clone() for name, p in named.items()}


def train(kind: str, measured: bool, **options: Any) -> dict[str, Any]:
    """Four steps of the Trainer; what must be the same measured or not, and what was measured.

    Args:
        kind: Of the model.
        measured: Whether there is a callback.
        options: Of the Trainer; `section`, settings of measurements, and `decomposed`, whether H is
            decomposed at the end.
    """
    from transformers import Trainer, TrainingArguments

    from ds_hessian.integrations import HessianCallback

    own, decomposed = options.pop("section", {}), options.pop("decomposed", False) and measured
    with tempfile.TemporaryDirectory() as folder:
        section = {**SECTION, **own, "output_path": f"{folder}/out"} if measured else {}
        arguments = TrainingArguments(
            output_dir=folder,
            deepspeed=config(**section),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=4,
            learning_rate=1e-2,
            optim="adamw_torch",
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_steps=2,  # as often as spectra: a spectrum must not swallow the Trainer's entry
            disable_tqdm=True,
            **options,
        )
        trainer = Trainer(model=make_model(kind), args=arguments, train_dataset=text(32))
        callback = HessianCallback(trainer)
        if measured:
            trainer.add_callback(callback)
        trainer.train()
        written = sorted(path.name for path in Path(folder).glob("out/step_*"))
        dist.barrier()  # before the folder of rank 0 goes
    engine = trainer.model_wrapped
    log = trainer.state.log_history[:-1]  # the last entry is the summary, with the time it took
    found = {
        "weights": whole_weights(engine),
        "log": [entry for entry in log if "loss" in entry],
        "random": torch.get_rng_state(),
        "spectra": callback.spectra,
        "failures": {step: str(error) for step, error in callback.failures.items()},
        "logged": {e["step"]: e for e in log if "hessian/loss" in e},
        "micro_batches": callback.micro_batches,
        "written": written,
        "probe": engine.hessian.gather(engine.hessian.random_vector(0)) if measured else None,
        "decomposition": engine.hessian.decomposition(num_matvecs=2) if decomposed else None,
    }
    _forget(engine)
    return found


def resumed() -> tuple[list[str], list[str]]:
    """A Trainer stops after two steps, and another goes on from its checkpoint for two more.

    Returns the fingerprints of the micro-batches that each has measured.
    """
    from transformers import Trainer, TrainingArguments

    from ds_hessian.integrations import HessianCallback

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    found = []
    for steps in (2, 4):
        arguments = TrainingArguments(
            output_dir=folder[0],
            deepspeed=config(**SECTION, output_path=f"{folder[0]}/out"),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=steps,
            optim="adamw_torch",
            use_cpu=True,
            report_to="none",
            save_strategy="steps",
            save_steps=2,
            disable_tqdm=True,
        )
        trainer = Trainer(model=make_model("gpt2"), args=arguments, train_dataset=text(32))
        callback = HessianCallback(trainer)
        trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=steps > 2)
        assert not callback.failures, callback.failures
        found.append([s.provenance.data_fingerprint for s in callback.spectra.values()])
        _forget(trainer.model_wrapped)
    return found[0], found[1]


def chosen() -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], bool]:
    """Inputs that a callback measures of a dataset, and of batches; and whether training's random
    states stay."""
    from transformers import Trainer, TrainingArguments

    from ds_hessian.integrations import HessianCallback

    measured, kept = [], []
    loader = torch.utils.data.DataLoader(text(8), batch_size=2, shuffle=True)
    for given in ({"dataset": text(32)}, {"batches": loader}):
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                deepspeed=config(**{**SECTION, "output_path": f"{folder}/out"}),
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                max_steps=2,
                optim="adamw_torch",
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            )
            trainer = Trainer(model=make_model("gpt2"), args=arguments, train_dataset=text(32))
            callback = HessianCallback(trainer, **given)
            trainer.add_callback(callback)
            trainer.train()
            assert list(callback.spectra) == [2], callback.failures
            dist.barrier()
        measured.append([m["inputs"] for m in callback.micro_batches])
        kept.append(torch.get_rng_state())
        _forget(trainer.model_wrapped)
    return measured[0], measured[1], torch.equal(*kept)


def accelerate(measured: bool) -> dict[str, Any]:
    """A loop on Accelerate, as its documentation has it."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    import ds_hessian

    with tempfile.TemporaryDirectory() as folder:
        section = {**SECTION, "output_path": f"{folder}/out"} if measured else {}
        plugin = DeepSpeedPlugin(hf_ds_config=config(**section))
        accelerator = Accelerator(deepspeed_plugin=plugin)
        model = make_model("gpt2")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = torch.utils.data.DataLoader(text(32), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if measured:
            ds_hessian.attach(model)
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        dist.barrier()
    found = {
        "weights": whole_weights(model),
        "log": losses,
        "random": torch.get_rng_state(),
        "spectra": model.hessian_schedule.spectra if measured else {},
        "failures": model.hessian_schedule.failures if measured else {},
    }
    _forget(model)
    return found


def _forget(engine: Any) -> None:
    """Accelerate keeps its state for the process, which is a pool's here."""
    from accelerate.state import AcceleratorState

    engine.destroy()
    AcceleratorState._reset_state(reset_partial_state=True)


def both(job: Any, *args: Any, **options: Any) -> tuple[list[str], dict[str, Any]]:
    """Run a job without spectra and with them: what differs, and what the second found."""
    plain = job(*args, measured=False, **options)
    measured = job(*args, measured=True, **options)
    weights = plain["weights"], measured["weights"]
    names = [name for name in weights[0] if not torch.equal(*(w[name] for w in weights))]
    names += ["log"] * (plain["log"] != measured["log"])
    names += ["random"] * (not torch.equal(plain["random"], measured["random"]))
    return names, measured
