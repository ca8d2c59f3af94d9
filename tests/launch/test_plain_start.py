"""A script under plain python is told how to start."""

from __future__ import annotations

import pytest
import torch

import ds_hessian
from ds_hessian.errors import ConfigError


@pytest.mark.full
def test_an_engine_without_a_launcher_is_told_which_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("deepspeed")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    model = torch.nn.Linear(2, 1)
    config = {"train_micro_batch_size_per_gpu": 1, "hessian": {}}
    with pytest.raises(ConfigError, match="started without a launcher.* `deepspeed SCRIPT`"):
        ds_hessian.initialize(model=model, model_parameters=model.parameters(), config=config)
