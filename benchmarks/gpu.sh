#!/usr/bin/env bash
# Everything that needs a GPU, in one command that fits 30 minutes on one device:
#
#     benchmarks/gpu.sh [OUT]
#
# OUT (default: gpu_out) receives a file for each part, and summary.md, ready for docs. A part that
# fails or runs past its limit is named there and does not stop the others; the exit status is the
# number of such parts. DEVICE=cpu runs the same commands on a CPU, small, to see that they work.
set -u
cd "$(dirname "$0")/.."
OUT=${1:-gpu_out}
DEVICE=${DEVICE:-cuda}
PYTHON=${PYTHON:-python}
mkdir -p "$OUT"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
failed=0

if [ "$DEVICE" = cpu ]; then
  export DS_ACCELERATOR=cpu
  marked=(-m "not gpu and not full" -k "cpu and (dots or restoring)")
  kernels=(--elements 200000 --basis-elements 100000 --rows 8 --repeats 1 --no-twins)
  model=(--width 32 --layers 1 --context 16 --num_matvecs 3 --rounds 1)
  peers=(--only "no tool of this name")
  launcher=(deepspeed --num_accelerators 1)
else
  marked=(-m gpu)
  kernels=(--elements 268435456 --basis-elements 67108864 --rows 50 --repeats 9)
  model=(--width 896 --layers 13 --context 256)
  peers=()
  launcher=(deepspeed --num_gpus 1)
fi

# part NAME SECONDS COMMAND...: runs it, and adds its name, time and outcome to the summary.
part() {
  local name=$1 limit=$2 started=$SECONDS status
  shift 2
  echo "== $name" >&2
  timeout --kill-after=20 "$limit" "$@" >"$OUT/$name.txt" 2>"$OUT/$name.err"
  status=$?
  [ $status -eq 0 ] || failed=$((failed + 1))
  echo "| $name | $((SECONDS - started)) s | $([ $status -eq 0 ] && echo done || echo "failed ($status)") |" \
    >>"$OUT/parts.md"
}

printf '| part | time | outcome |\n|---|---|---|\n' >"$OUT/parts.md"

# First, so that nothing below is timed while it builds.
part build 240 "$PYTHON" -m ds_hessian.ops
part tests 420 "$PYTHON" -m pytest tests/ops "${marked[@]}" -q --durations=10
part kernels 240 "$PYTHON" benchmarks/kernels.py --device "$DEVICE" "${kernels[@]}"
part cost 240 "${launcher[@]}" benchmarks/cost.py "${model[@]}" # ZeRO-3, NCCL on one device
part peers 240 "$PYTHON" benchmarks/peers.py "${peers[@]}"      # with fp32 passes among the rows
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    part "$tool" 180 compute-sanitizer --tool "$tool" --error-exitcode 99 \
      "$PYTHON" -m pytest tests/ops "${marked[@]}" -q -x \
      -k "any_number_of_rows or mixed_dtypes or replicas or ranges_have"
  done
else
  echo "| memcheck, racecheck | | no compute-sanitizer here |" >>"$OUT/parts.md"
fi

{
  echo "# On $( (nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || uname -m) | head -1), $(date +%F)"
  echo
  cat "$OUT/parts.md"
  for name in build kernels cost peers; do
    printf '\n## %s\n\n' "$name"
    cat "$OUT/$name.txt"
  done
  printf '\n## tests\n\n'
  tail -n 15 "$OUT/tests.txt"
} >"$OUT/summary.md"
echo "$OUT/summary.md" >&2
exit "$failed"
