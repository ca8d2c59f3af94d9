# Sourced by examples/run.sh and tests/run.sh: a virtual environment in .venv with CPU torch, deepspeed and this
# package. Does nothing where that has been done. PYTHON names the interpreter (3.11), EXTRAS the extras to install.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
export DS_ACCELERATOR=cpu
stamp=.venv/.ds_hessian-${EXTRAS:-base}-$(cat setup.py pyproject.toml examples/setup.sh | cksum | cut -d ' ' -f 1)
if [ ! -e "$stamp" ]; then
    [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
    .venv/bin/python -m pip install --quiet torch==2.13.0 setuptools wheel ninja numpy pybind11 py-cpuinfo
    # deepspeed imports torch while it builds, so it must see this environment's torch.
    DS_BUILD_OPS=0 .venv/bin/python -m pip install --quiet --no-build-isolation deepspeed==0.19.8
    .venv/bin/python -m pip install --quiet --no-build-isolation --editable ".${EXTRAS:+[$EXTRAS]}"
    # Its own requirements are met; those of its extras (Transformer Engine, ...) need CUDA.
    .venv/bin/python -m pip install --quiet --no-deps megatron-core==0.16.1
    touch "$stamp"
fi
export PATH="$root/.venv/bin:$PATH"
