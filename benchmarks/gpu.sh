#!/usr/bin/env bash
# Everything that needs a GPU, in one command that ends within 30 minutes on one device:
#
#     benchmarks/gpu.sh [OUT]
#
# OUT (default: gpu_out) receives a file for each part, and summary.md, ready for docs. A part that
# fails or runs past its limit is named there, with the end of what it said, and does not stop the
# others; the exit status is the number of such parts. DEVICE=cpu runs the same commands on a CPU,
# small, to see that they work. PARTS (a regular expression: "build|kernels") chooses parts, and LIMIT
# the seconds of all together, where a device is lent for less. It needs nvcc; compute-sanitizer and
# the peers where they are.
set -u
cd "$(dirname "$0")/.."
OUT=${1:-gpu_out}
DEVICE=${DEVICE:-cuda}
PYTHON=${PYTHON:-$(command -v python || command -v python3)}
mkdir -p "$OUT"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export DS_ACCELERATOR=$DEVICE        # whatever the environment says
export DS_HESSIAN_OPS=native         # twins in place of kernels that were not built: an error
export DS_HESSIAN_CACHE_DIR=$PWD/.cache/tests/kernels # that of the tests: one build for all
export PYTHONUNBUFFERED=1            # what a part has printed when its time is over
# Of a CUDA toolkit that is not on the PATH.
command -v nvcc >/dev/null || export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
sanitizer=$(command -v compute-sanitizer "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer" | head -1)
left=${LIMIT:-1680} # seconds for all parts; what has to be killed takes 20 more
failed=0

if [ "$DEVICE" = cpu ]; then
  marked=(-k "test_streaming and cpu and (dots or restoring)")
  watched=("${marked[@]}")
  kernels=(--elements 200000 --basis-elements 100000 --rows 8 --repeats 1 --no-twins)
  model=(--width 32 --layers 1 --context 16 --steps 3 --rounds 1)
else
  marked=(-m gpu --all)
  watched=(-m gpu -k "any_number_of_rows or not_finite or mixed_dtypes or replicas or combinations or layout_does or cgs2")
  kernels=(--elements 268435456 --basis-elements 33554432 --rows 50 --repeats 9)
  model=()
fi

# part NAME SECONDS COMMAND...: runs it, and adds its name, time and outcome to the summary. Where
# `must` is set, a line of what it prints has to match it: pytest is content with tests that skip
# themselves.
part() {
  local name=$1 limit=$2 started=$SECONDS status=0 outcome=done
  shift 2
  [[ $name =~ ${PARTS:-.} ]] || return
  limit=$((limit < left ? limit : left))
  echo "== $name" >&2
  : >"$OUT/$name.txt"
  : >"$OUT/$name.err"
  if [ "$limit" -lt 1 ]; then
    status=124 outcome="not run: no time is left"
  else
    timeout --kill-after=20 "$limit" "$@" >"$OUT/$name.txt" 2>"$OUT/$name.err"
    status=$?
    case $status in
    0) grep -qE "${must:-}" "$OUT/$name.txt" || status=5 outcome="printed no \"$must\"" ;;
    124 | 137) outcome="stopped after $limit s" ;;
    *) outcome="failed ($status)" ;;
    esac
  fi
  left=$((left - (SECONDS - started)))
  echo "| $name | $((SECONDS - started)) s | $outcome |" >>"$OUT/parts.md"
  [ $status -eq 0 ] && return
  failed=$((failed + 1))
  printf '\n### %s: %s\n\n```\n%s\n```\n' "$name" "$outcome" \
    "$(tail -qn 12 "$OUT/$name.txt" "$OUT/$name.err")" >>"$OUT/failures.md"
}

printf '| part | time | outcome |\n|---|---|---|\n' >"$OUT/parts.md"
: >"$OUT/failures.md"

# First, so that nothing below is timed while it builds, and fails at once without a GPU.
part build 300 "$PYTHON" -c '
import sys
from ds_hessian import ops
report = ops.report()
print(report)
sys.exit(report[sys.argv[1]].name != "native")' "$DEVICE"

passed='[1-9][0-9]* passed'
suite=("$PYTHON" -m pytest -p no:cacheprovider --durations=10)
# A module that cannot be imported here keeps no other one from being tested.
must=$passed part tests 420 "${suite[@]}" tests --continue-on-collection-errors "${marked[@]}"

part kernels 240 "$PYTHON" benchmarks/kernels.py --device "$DEVICE" "${kernels[@]}"

# A product's cost and Lanczos' overhead, of a GPT of 125 million parameters: under ZeRO-3 with NCCL
# on one device, with fp32 passes, and those of the peers. A part each: one that fails leaves the
# others their rows.
cost() { part "$1" 120 "$PYTHON" benchmarks/gpu.py --device "$DEVICE" "${model[@]}" "${@:2}"; }
cost zero3_fp32 "ds_hessian, ZeRO-3"
cost zero3_bf16 "ds_hessian, ZeRO-3" --dtype bf16
cost zero3_fp32_passes "ds_hessian, ZeRO-3" --dtype bf16 --precision fp32
for peer in hessian_eigenthings curvlinops; do
  "$PYTHON" -c "import $peer" 2>/dev/null || {
    echo "| $peer | | not installed |" >>"$OUT/parts.md"
    continue
  }
  if [ $peer = curvlinops ]; then
    cost curvlinops curvlinops
  else
    cost eigenthings_autograd "hessian-eigenthings, autograd"
    cost eigenthings_differences "hessian-eigenthings, differences"
  fi
done

# Last, because they take the most: on what is left.
if [ "$DEVICE" = cpu ]; then
  must=$passed part watched 120 "${suite[@]}" tests/ops "${watched[@]}"
elif [ -n "$sanitizer" ]; then
  # torch hands out parts of large blocks, in which no access is out of bounds.
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  for tool in memcheck racecheck synccheck; do
    must=$passed part "$tool" 200 "$sanitizer" --tool "$tool" --kernel-name kns=ds_hessian \
      --error-exitcode 99 --report-api-errors no --launch-timeout 0 \
      "${suite[@]}" tests/ops "${watched[@]}"
  done
  # It must see torch's kernels initialise memory; what it says of them is not of this project.
  must=$passed part initcheck 200 bash -c 'log=$1 sanitizer=$2 && shift 2 &&
    "$sanitizer" --tool initcheck --log-file "$log" --show-backtrace device --launch-timeout 0 "$@" &&
    { ! grep -m 5 -B 2 ds_hessian:: "$log"; }' - "$OUT/initcheck.log" "$sanitizer" \
    "${suite[@]}" tests/ops "${watched[@]}"
else
  echo "| memcheck, racecheck, synccheck, initcheck | | no compute-sanitizer here |" >>"$OUT/parts.md"
fi

part_of() { grep -q "^| $1 | [0-9]" "$OUT/parts.md"; } # whether a part has run

{
  echo "# On $( (nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || uname -m) | head -1), $(date +%F)"
  echo
  cat "$OUT/parts.md"
  part_of build && printf '\n## build\n\n```\n%s\n```\n' "$(cat "$OUT/build.txt")"
  part_of kernels && printf '\n## kernels\n\n%s\n' "$(cat "$OUT/kernels.txt")"
  printf '\n## cost\n\n%s\n' "$("$PYTHON" benchmarks/gpu.py head | grep '^|')"
  for name in zero3_fp32 zero3_bf16 zero3_fp32_passes eigenthings_autograd eigenthings_differences curvlinops; do
    part_of $name && grep '^| ' "$OUT/$name.txt"
  done
  for name in tests memcheck racecheck synccheck initcheck; do
    part_of $name && printf '\n## %s\n\n```\n%s\n```\n' $name "$(tail -n 15 "$OUT/$name.txt")"
  done
  [ -s "$OUT/failures.md" ] && printf '\n## failures\n' && cat "$OUT/failures.md"
} >"$OUT/summary.md"
echo "$OUT/summary.md" >&2
exit "$failed"
