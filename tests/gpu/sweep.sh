#!/usr/bin/env bash
# Runs the needle sweep with live SGLang on a machine with a GPU and no package registry, from the repository root.
# Needs .gpu/sglang-gpu.tar.xz and built operators in .cache/jit.tar.xz. Writes to $OUT: sweep-default.tar.xz and
# sweep-study.tar.xz (records, curves, conclusion, pictures), logs.tar.xz. Usage: tests/gpu/sweep.sh [SECONDS of the study]
set -u
: "${OUT:=runs/gpu}"
work=${WORK:-/tmp/difftest-sweep}
mkdir -p "$OUT" "$work/site" "$work/logs" "$work/jit"
tar -C "$work/site" -xJf .gpu/sglang-gpu.tar.xz
python3 -m compileall -q -j 0 "$work/site" >"$work/logs/compileall.log" 2>&1
tar -C "$work/jit" -xJf .cache/jit.tar.xz
python3 tests/gpu/link_checkout.py "$work/site"

export PYTHONPATH="$work/site" PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 COLUMNS=200 OMP_NUM_THREADS=4
export DIFFTEST_KERNELS_CACHE="$work/jit/kernels" SGLANG_JIT_CACHE_DIR="$work/jit/sglang"
export TVM_FFI_CACHE_DIR="$work/jit/tvm-ffi" DG_JIT_CACHE_DIR="$work/jit/deep-gemm" TRITON_CACHE_DIR="$work/jit/triton"

sweep() { # sweep NAME SECONDS ARGUMENTS...: sweeps into $work/NAME, shows what is there (also of an interrupted sweep), packs it
  local name=$1 limit=$2 started=$SECONDS
  shift 2
  timeout -s INT -k 5 "$limit" python3 -m difftest recall sweep --device cuda --out "$work/$name" "$@" >"$work/logs/$name.log" 2>&1
  echo "=== $name: exit $?, $((SECONDS - started)) s"
  python3 -m difftest recall show "$work/$name" --picture svg --picture png >"$work/logs/$name-shown.log" 2>&1
  tail -n 45 "$work/logs/$name-shown.log" | cut -c1-400
  grep "needles measured" "$work/logs/$name.log"
  tar -C "$work" -c "$name" | xz -T0 -2 >"$OUT/sweep-$name.tar.xz"
}

sweep default 60
sweep study "${1:-25}" --distractors all --ablation topk --ablation formats --ablation hadamard
tar -C "$work" -c logs | xz -T0 -2 >"$OUT/logs.tar.xz"
ls -l "$OUT"
