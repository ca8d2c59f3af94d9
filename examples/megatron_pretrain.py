"""Megatron-LM's own pretrain_gpt.py with Hessian spectra; nothing in its tree is edited.

`MEGATRON_LM` names the tree (core_v0.16 or 0.17). Arguments are those of pretrain_gpt.py, and
`--hessian-interval 500` and its like; `examples/megatron.slurm` starts it on a cluster.
"""

import os
import runpy
import sys

tree = os.environ["MEGATRON_LM"]
sys.path.insert(0, tree)

import megatron.training  # noqa: E402

from ds_hessian.megatron import with_hessian  # noqa: E402

megatron.training.pretrain = with_hessian(megatron.training.pretrain)
runpy.run_path(os.path.join(tree, "pretrain_gpt.py"), run_name="__main__")
