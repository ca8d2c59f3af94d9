"""A Trainer without DeepSpeed, measured or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.integrations import jobs


def train(folder: Path, measured: bool, steps: int = 4, **options: Any) -> dict[str, Any]:
    """Some steps; what must be the same measured or not, and what was measured.

    Args:
        folder: Where results go.
        measured: Whether the callback is added.
        steps: How many.
        options: Of the callback; `settings` over those of its configuration, which is given as a
            `kind`; `report_to`, a tool that the Trainer reports to; `prepare`, called with the
            Trainer before its callback is made; `saved`, whether it saves a checkpoint at the end,
            and `resumed`, whether it goes on from one; `window`, micro-batches of a step; `rows`,
            the size of the dataset; and `trainer`, the class of the Trainer.
    """
    from transformers import Trainer, TrainingArguments

    from ds_hessian import HessianConfig
    from ds_hessian.integrations import HessianCallback

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=options.pop("window", 2),
        max_steps=steps,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=options.pop("report_to", "none"),
        save_strategy="steps" if options.pop("saved", False) else "no",
        save_steps=steps,
        logging_steps=2,
        disable_tqdm=True,
    )
    own = {"sharpness_interval": 3, "output_path": str(folder / "out")}
    kind = options.pop("kind", HessianConfig)
    settings = kind(**{**jobs.SECTION, **own, **options.pop("settings", {})})
    model = jobs.make_model("gpt2", attn_implementation="eager")
    kind_of, resumed = options.pop("trainer", Trainer), options.pop("resumed", False)
    rows = jobs.text(options.pop("rows", 32))
    trainer = kind_of(model=model, args=arguments, train_dataset=rows)
    options.pop("prepare", lambda trainer: None)(trainer)
    callback = HessianCallback(trainer, settings, **options)
    if measured:
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resumed)
    log = trainer.state.log_history[:-1]
    return {
        "model": model,
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "losses": [entry["loss"] for entry in log if "loss" in entry],
        "logged": [entry for entry in log if "hessian/eigenvalue_max" in entry],
        "random": torch.get_rng_state(),
        "micro_batches": callback.micro_batches,
        "callback": callback,
        "trainer": trainer,
        "written": sorted(path.name for path in folder.glob("out/step_*")),
    }
