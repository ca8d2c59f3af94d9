"""Builds what tests need into their cache; does nothing where it is (`conftest.py` calls it)."""

from __future__ import annotations

import os
from pathlib import Path

from ds_hessian.ops import extension_locks, native


def main() -> None:
    """Build the kernels, and DeepSpeed's shared-memory op, which it loads at every start."""
    for lock in extension_locks.abandoned():
        lock.unlink()
    native.find("cpu")
    op = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "deepspeed_shm_comm" / "deepspeed_shm_comm.so"
    if not op.exists():
        from deepspeed.accelerator import get_accelerator

        get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)


if __name__ == "__main__":
    main()
