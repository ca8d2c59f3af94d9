"""Megatron-DeepSpeed's own pretrain_gpt.py on CPU; `MODE` is bare (as it is) or hook (the recipe
that wraps `pretrain`, examples/megatron_pretrain.py).

Run by torchrun with Megatron-DeepSpeed's arguments; prints a hash of the final state as its last
line. Its tree (4efb479d) runs on DeepSpeed's CPU accelerator as it is; every patch but the last
stands for an import of something that is not used here.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

TREE = os.environ["MEGATRON_DEEPSPEED"]
sys.path.insert(0, TREE)
sys.modules.setdefault("six", types.ModuleType("six"))  # of BERT's tokenizer
sys.modules["megatron.model.vision.knn_monitor"] = MagicMock()  # needs torchvision
sys.modules.setdefault("deepspeed.compression.compress", MagicMock())  # gone from DeepSpeed 0.19.8

import torch  # noqa: E402

torch.set_num_threads(1)

import megatron.training as training  # noqa: E402

models: list[Any] = []
setup = training.setup_model_and_optimizer


def remembering_setup(*args: Any, **kwargs: Any) -> Any:
    result = setup(*args, **kwargs)
    models.extend(result[0])
    return result


training.setup_model_and_optimizer = remembering_setup
build_iterators = training.build_train_valid_test_data_iterators


def build_iterators_with_random_states_kept(*args: Any, **kwargs: Any) -> Any:
    """On tensor-parallel ranks but the first there is no loader, which draws a seed: on CPU from
    the generator of dropout, whose masks would differ between replicas from then on.
    """
    state = torch.get_rng_state()
    result = build_iterators(*args, **kwargs)
    torch.set_rng_state(state)
    return result


training.build_train_valid_test_data_iterators = build_iterators_with_random_states_kept


def write_data(prefix: str) -> None:
    """A corpus of random tokens, in its own format."""
    import numpy as np
    from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder

    builder, generator = (
        MMapIndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32),
        torch.Generator().manual_seed(0),
    )
    for _ in range(40):
        builder.add_item(torch.randint(0, 100, (60,), generator=generator))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def main() -> None:
    """Train, then hash what this rank steps: weights, masters and moments."""
    from ds_hessian.backends.zero import ZeroBackend

    if os.environ["MODE"] == "bare":
        runpy.run_path(f"{TREE}/pretrain_gpt.py", run_name="__main__")
    else:
        recipe = Path(__file__).parents[2] / "examples" / "megatron_pretrain.py"
        runpy.run_path(str(recipe), run_name="__main__")
    backend, inner = ZeroBackend(models[0]), models[0].optimizer.optimizer
    tensors = [backend.shards.weight(piece) for piece in backend.pieces]
    tensors += [m for m in map(backend.shards.master, backend.pieces) if m is not None]
    tensors += [t for s in inner.state.values() for t in s.values() if torch.is_tensor(t)]
    state = b"".join(t.detach().float().contiguous().numpy().tobytes() for t in tensors)
    rank = torch.distributed.get_rank()
    print(f"\nFINAL {rank} {hashlib.sha256(state).hexdigest()}", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "write-data":
        write_data(sys.argv[2])
    else:
        main()
