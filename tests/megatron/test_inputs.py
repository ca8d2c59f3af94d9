"""What a wrong use of `MegatronHessian` is told, on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.megatron import job
from tests.ranks import RankPool

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
    "forward_step must return (output, loss_func), got Tensor",
    "loss_func must return (loss, logs) or (sum, tokens, logs), got Tensor",
    "got no model chunks; pass what get_forward_backward_func() takes",
    "this job has 1 model chunk on a rank, got 2; pass ",
    'hessian: must be an object of settings, got "ds_config.json"',
    "with calculate_per_token_loss, loss_func must return (sum, tokens, logs), got no tokens",
]


@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_input_is_named(megatron_ranks: Callable[[int], RankPool], world_size: int) -> None:
    for messages in megatron_ranks(world_size).run(job.bad_inputs):
        assert len(messages) == len(SAID)
        for message, start in zip(messages, SAID, strict=True):
            assert message.startswith(f"ConfigError: {start}")


def test_spectrum_takes_other_batches(megatron_ranks: Callable[[int], RankPool]) -> None:
    for loss, same in megatron_ranks(2).run(job.other_batches):
        assert loss == same
