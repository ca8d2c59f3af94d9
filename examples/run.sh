#!/usr/bin/env bash
# Trains a small GPT on the source files of Python's standard library under ZeRO-3 on two CPU ranks, and leaves its
# Hessian spectra (figures, pictures, and the page hessian_out.html) in hessian_out/. Arguments go to examples/train_gpt.py.
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export OMP_NUM_THREADS=1
deepspeed --num_accelerators 2 --master_port "${MASTER_PORT:-29500}" examples/train_gpt.py \
    --deepspeed --deepspeed_config examples/ds_config.json "$@"
