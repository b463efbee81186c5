#!/usr/bin/env bash
# Runs the live paths on a machine with a GPU and no package registry, from the repository root, and writes to $OUT:
# recorded.tar (traces), logs.tar.xz (one log a step), jit.tar.xz (built operators, to be unpacked before a later run).
# Needs a bundle of SGLang's packages in .gpu/sglang-gpu.tar.xz (and the probe beside it for step `probe`); takes built operators from .cache/jit.tar.xz if there.
# Every step runs, whatever the one before it did. Usage: tests/gpu/smoke.sh STEP...
set -u
: "${OUT:=runs/gpu}"
work=${WORK:-/tmp/difftest-gpu}
mkdir -p "$OUT" "$work/site" "$work/logs" "$work/jit"
tar -C "$work/site" -xJf .gpu/sglang-gpu.tar.xz
python3 -m compileall -q -j 0 "$work/site" >"$work/logs/compileall.log" 2>&1
[ -f .cache/jit.tar.xz ] && tar -C "$work/jit" -xJf .cache/jit.tar.xz
python3 tests/gpu/link_checkout.py "$work/site"

export PYTHONPATH="$work/site" PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
export DIFFTEST_KERNELS_CACHE="$work/jit/kernels" SGLANG_JIT_CACHE_DIR="$work/jit/sglang" TVM_FFI_CACHE_DIR="$work/jit/tvm-ffi" DG_JIT_CACHE_DIR="$work/jit/deep-gemm" TRITON_CACHE_DIR="$work/jit/triton"

step() { # step NAME SECONDS LINES COMMAND...: runs it, keeps its log, prints its last LINES
  local name=$1 limit=$2 lines=$3 started=$SECONDS
  shift 3
  timeout "$limit" "$@" >"$work/logs/$name.log" 2>&1
  local code=$?
  echo "=== $name: exit $code, $((SECONDS - started)) s"
  tail -n "$lines" "$work/logs/$name.log" | cut -c1-260
  return $code
}

for name in "$@"; do
  case $name in
    build) step build 200 3 python3 -c 'from difftest.paths._live_build import build_operators; print(build_operators() or "built")' ;;
    probe) step probe 120 14 python3 .gpu/probe_sglang_ops.py ;;
    live) step live 150 60 python3 -m pytest -q -s --tb=short --maxfail=20 -p no:cacheprovider -m gpu tests/difftest/paths/test_sglang_fp8.py ;;
    layer) step layer 150 60 python3 -m pytest -q -s --tb=short --maxfail=20 -p no:cacheprovider -m gpu tests/difftest/paths/test_sglang_fp8_layer.py ;;
    record) step record 60 20 python3 tests/gpu/record.py "$work/recorded" && tar -C "$work/recorded" -cf "$OUT/recorded.tar" . ;;
    kernels) step kernels 150 25 python3 -m pytest -q --tb=short --maxfail=30 -n 6 -p no:cacheprovider -m gpu tests/kernels ;;
    sanitize) step sanitize 75 60 tests/gpu/sanitize.sh python3 ;;
    diagnose) step diagnose 200 90 tests/gpu/diagnose.sh "$work/diagnose" ;;
    robust) step robust 60 70 python3 -m difftest robust --path bf16-k --path bf16-k:store=cuda --path sglang-fp8 ;;
    memory) step memory 90 40 python3 -m difftest run --device cuda --case prefill-22597 --case decode-1048576 --path bf16-k --path bf16-k-naive --path sglang-fp8 --keep none --out "$work/memory" ;;
    wraps) step wraps 60 25 python3 -m pytest -q --tb=short --maxfail=10 -p no:cacheprovider -m gpu tests/kernels/test_hopper.py -k "wrap or bits or (contiguous and random)" || export DIFFTEST_KERNELS_HOPPER=0 ;;
    hopper) step hopper 60 25 python3 -m pytest -q --tb=short --maxfail=10 -p no:cacheprovider -m gpu tests/kernels/test_hopper.py tests/difftest/test_memory.py || export DIFFTEST_KERNELS_HOPPER=0 ;;
    bench) step bench 280 60 python3 -m difftest bench --json "$OUT/bench.json" ;;
    suite) step suite 200 40 python3 -m pytest -q -n 4 --dist loadfile --durations=15 -p no:cacheprovider -m gpu tests ;;
    profile) step profile 110 30 python3 -m pytest -q -n 8 -p no:cacheprovider --durations=10 --pyargs difftest.suite --difftest-profile gpu --difftest-device cuda --difftest-out "$OUT/profile" ;;
    table) step table 110 140 timeout -s INT 100 python3 -m difftest run --device cuda --keep none --out "$OUT/table" $(printf -- '--case %s ' rec-prefill-2117 dyadic-4217 needle-22597 decode-1048576) $(printf -- '--path %s ' oracle deepseek sglang-fp8 sglang-fp8-layer sglang-fp8-model sglang-fp8@recorded bf16-k bf16-k:store=cuda bf16-k-naive sglang-bf16k-layer) ;;
    stack) step stack 80 40 timeout -s INT 70 python3 -m difftest run --device cuda --keep none --case stack-2117 --path oracle --path sglang-fp8 --path bf16-k --path sglang-fp8-layer --out "$OUT/stack" ;;
    run) step run 150 60 python3 -m difftest run --profile smoke --device cuda --path sglang-fp8 --path oracle --out "$work/run" ;;
    *) echo "unknown step $name" ;;
  esac
done
[ "${KEEP_JIT:-1}" = 1 ] && tar -C "$work/jit" -c . | xz -T0 -2 >"$OUT/jit.tar.xz"
tar -C "$work" -c logs | xz -T0 -2 >"$OUT/logs.tar.xz"
ls -l "$OUT"
