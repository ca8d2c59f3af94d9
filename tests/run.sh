#!/usr/bin/env bash
# Sets everything up and runs every check: formatting, lint, types and the quick tier of the tests; --all runs all of
# them. Arguments go to pytest.
export EXTRAS=dev
. "$(dirname "${BASH_SOURCE[0]}")/../examples/setup.sh"
ruff format --check .
ruff check .
python -m tests.build & # takes as long as the types
mypy
git ls-files "csrc/*" | xargs -r clang-format --dry-run --Werror
wait
python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"
