"""Builds what tests need into a cache of their own; does nothing where it is.

`tests/run.sh` starts it beside the check of types, and `conftest.py` before what needs it.
"""

from __future__ import annotations

import fcntl
import os
import platform
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "tests"  # kept from run to run


def use_cache() -> None:
    """Have builds in the tests' own cache: one that is killed leaves the user's alone."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(CACHE / "torch_extensions")
    os.environ["DS_HESSIAN_CACHE_DIR"] = str(CACHE / "kernels")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def main() -> None:
    """Build the kernels, the emulated ones too, and DeepSpeed's shared-memory op, which it loads at
    every start.
    """
    use_cache()
    from deepspeed.accelerator import get_accelerator

    from ds_hessian.ops import extension_locks, native
    from tests.ops import emulator

    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock, tempfile.TemporaryDirectory() as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers start at once
        for abandoned in extension_locks.abandoned():
            abandoned.unlink()
        native.find("cpu")
        op = CACHE / "torch_extensions" / "deepspeed_shm_comm" / "deepspeed_shm_comm.so"
        if not op.exists():
            get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)
        if platform.machine() == "x86_64":
            native.load(emulator.plan("plain", Path(folder) / "csrc"))


if __name__ == "__main__":
    main()
