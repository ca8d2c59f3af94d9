#!/usr/bin/env bash
# Sets everything up and runs every check: formatting, lint, types, tests. Arguments go to pytest.
export EXTRAS=dev
. "$(dirname "${BASH_SOURCE[0]}")/../examples/setup.sh"
ruff format --check .
ruff check .
mypy ds_hessian
clang-format --dry-run --Werror $(git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu') </dev/null
python -m pytest "$@"
