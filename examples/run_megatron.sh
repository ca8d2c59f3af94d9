#!/usr/bin/env bash
# Trains a small GPT on megatron-core, tensor-parallel over two CPU ranks, on the source files of Python's standard
# library, and leaves its Hessian spectra (figures and pictures) in hessian_out_megatron/. Arguments go to
# examples/megatron_gpt.py.
export EXTRAS=megatron
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export OMP_NUM_THREADS=1 PYTHONPATH=$root
torchrun --nproc_per_node 2 --master_port "${MASTER_PORT:-29500}" examples/megatron_gpt.py "$@"
