"""What a wrong use of `MegatronHessian` is told, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.megatron import job
from tests.megatron.job import Job
from tests.ranks import RankPool
from tests.tiers import cells

SAID = [
    "no micro-batches yet: call hessian.use(batches) first",
    "no forward_step, seq_length, micro_batch_size yet: call hessian.use(batches, forward_step, ",
    "no seq_length, micro_batch_size yet: call ",
    "forward_step must be a function of (data_iterator, model), as get_forward_backward_func() ",
    "batches must be a list (or loader) of micro-batches, got one dict; pass [batch]",
    "batches must be a list (or loader) of micro-batches, got one int; pass [batch]",
    "every rank that reads data needs the same number of micro-batches, at least 1, got 0",
    "seq_length must be a positive integer, got 0",
    "micro_batch_size must be a positive integer, got 2.0",
    "forward_step must return (output, loss_func), got dict",
    "forward_step must return (output, loss_func), got a tensor of shape ",
    "loss_func must return (loss, logs) or (sum, tokens, logs), got a tensor of shape (), ",
    "forward_step reads more than one micro-batch a call: pass as one all that it reads, ",
    "got no model chunks; pass what get_forward_backward_func() takes",
    "this job has 1 model chunk on a rank, got 2; pass ",
    'hessian: must be an object of settings, got "ds_config.json"',
    "with calculate_per_token_loss, loss_func must return (sum, tokens, logs), got no tokens",
]


@pytest.mark.parametrize("world_size", cells([1, 2], [2]))
def test_bad_input_is_named(megatron_ranks: Callable[[int], RankPool], world_size: int) -> None:
    for messages in megatron_ranks(world_size).run(job.bad_inputs):
        assert len(messages) == len(SAID)
        for message, start in zip(messages, SAID, strict=True):
            assert message.startswith(f"ConfigError: {start}")


PIPELINE = {"pp": 2}
INTERLEAVED = {**PIPELINE, "vpp": 2, "layers": 4}


@pytest.mark.full
@pytest.mark.parametrize("layout", [PIPELINE, INTERLEAVED])
def test_what_leaves_other_stages_waiting_is_named_on_all(
    megatron_ranks: Callable[[int], RankPool], layout: dict[str, Any]
) -> None:
    """Megatron sends what it was given, and counts tokens between two steps."""
    sends = "a pipeline stage sends a tensor of shape"
    tokens = "loss_func must return its number of tokens as an integer tensor of no dims, got"
    scalar = "loss_func must return one scalar loss that requires gradients, got"
    expected = [
        f"{sends} (16, 2, 16), torch.float32, by seq_length, micro_batch_size and the model's",
        "forward_step returned (8, 2, 16), torch.float32: pass the sizes that the micro-batches",
        "forward_step returned NoneType",
        "forward_step returned (8, 2, 16), torch.float16",
        "a pipeline stage that trains parameters, but sends activations without a graph",
        f"{tokens} a tensor of shape (), torch.float32",
        f"{tokens} a tensor of shape (1,), torch.int32",
        f"{tokens} int",
        f"{scalar} a tensor of shape (2,), torch.float32",
        f"{scalar} a tensor of shape (), torch.float32, without a graph",
    ]
    for *said, next_one in megatron_ranks(2).run(job.bad_stages, Job(**layout)):
        assert next_one == "the same"
        for message, part in zip(said, expected, strict=True):
            assert part in message


@pytest.mark.full
def test_spectrum_takes_other_batches(megatron_ranks: Callable[[int], RankPool]) -> None:
    for loss, same in megatron_ranks(2).run(job.other_batches):
        assert loss == same
