#!/usr/bin/env bash
# Runs the SGLang plugin on a machine with a GPU and no package registry, from the repository root; writes to $OUT.
# Needs in .psrv: site.tar.xz (SGLang's packages and what its engine imports), and wheels besides.
# Takes built operators from jit.tar.xz in .psrv or .cache if there. Usage: tests/gpu/plugin.sh STEP...  (layer cost on off compare capture)
set -u
: "${OUT:=runs/gpu}"
work=${WORK:-/tmp/difftest-plugin}
mkdir -p "$OUT" "$work/site" "$work/logs" "$work/jit" "$work/serve"
[ -d "$work/site/sglang" ] || tar -C "$work/site" -xJf .psrv/site.tar.xz &
for built in .cache/jit.tar.xz .psrv/jit.tar.xz; do [ -f "$built" ] && tar -C "$work/jit" -xJf "$built"; done
wait
for wheel in .psrv/*.whl; do python3 -m zipfile -e "$wheel" "$work/site"; done
python3 tests/gpu/link_checkout.py "$work/site"
cp tests/gpu/*.py "$work/site"
point=$work/site/mhc_without_tilelang-0.dist-info
mkdir -p "$point"
printf 'Metadata-Version: 2.1\nName: mhc_without_tilelang\nVersion: 0\n' >"$point/METADATA"
printf '[sglang.srt.plugins]\nmhc-without-tilelang = mhc_without_tilelang:load\n' >"$point/entry_points.txt"

python3 -m compileall -q -j 0 "$work/site/sglang/srt" "$work/site/sglang/kernels" "$work/site/openai" >"$work/logs/compileall.log" 2>&1

export PYTHONPATH="$work/site" PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
export SGLANG_JIT_CACHE_DIR="$work/jit/sglang" TVM_FFI_CACHE_DIR="$work/jit/tvm-ffi" DG_JIT_CACHE_DIR="$work/jit/deep-gemm"
export TRITON_CACHE_DIR="$work/jit/triton" DIFFTEST_KERNELS_CACHE="$work/jit/kernels"
export SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1 SGLANG_OPT_USE_TILELANG_MHC_PRE=0 SGLANG_OPT_USE_TILELANG_MHC_POST=0
export SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python SGLANG_OPT_FUSE_MHC_POST_PRE=0 SGLANG_OPT_FP8_WO_A_GEMM=0 SGLANG_DSV4_FP4_EXPERTS=0 HF_HUB_OFFLINE=1 TORCHDYNAMO_DISABLE=1

# The registry imports every model module; the tiny model needs one.
models=$(cd "$work/site/sglang/srt/models" && ls *.py | sed 's/\.py$//' | grep -v -x -e __init__ -e registry -e deepseek_v4 | paste -sd,)
export SGLANG_DISABLED_MODEL_ARCHS=$models

step() { # step NAME SECONDS LINES COMMAND...: runs it, keeps its log, prints its last LINES
  local name=$1 limit=$2 lines=$3 started=$SECONDS
  shift 3
  timeout -k 5 "$limit" "$@" >"$work/logs/$name.log" 2>&1
  echo "=== $name: exit $?, $((SECONDS - started)) s"
  tail -n "$lines" "$work/logs/$name.log" | cut -c1-240
}

one() {
  case $1 in
    check) SGLANG_DSV4_BF16_INDEX_K=1 step check 60 45 python3 -P -m difftest.kernels.sglang_plugin --check ;;
    layer) step layer "${LAYER_S:-150}" 60 python3 -m pytest -q -s --tb=short --maxfail=12 -p no:cacheprovider -m gpu tests/difftest/paths/test_sglang_bf16k_layer.py ;;
    cost) step cost "${COST_S:-100}" 20 python3 "$work/site/plugin_cost.py" ;;
    off) SGLANG_DSV4_BF16_INDEX_K=0 step off "${SERVE_S:-150}" 25 python3 "$work/site/serve.py" "$work/serve" off ;;
    on) SGLANG_DSV4_BF16_INDEX_K=1 DIFFTEST_CAPTURE="$work/capture" step on "${SERVE_S:-150}" 25 python3 "$work/site/serve.py" "$work/serve" on ;;
    capture) step capture 60 30 python3 -m difftest run --case "capture:$work/capture/rank-0" --device cuda --path oracle --path bf16-k --path sglang-fp8 --keep none --out "$work/captured" ;;
    compare) step compare 30 20 python3 "$work/site/compare_servers.py" "$work/serve" off on ;;
    *) echo "unknown step $1" ;;
  esac
}

for group in "$@"; do # steps joined by + run side by side
  for name in ${group//+/ }; do one "$name" & done
  wait
done
tar -C "$work/jit" -c . | xz -T0 -1 >"$OUT/jit.tar.xz"
tar -C "$work" -c logs $(cd "$work" && ls -d serve/*.json captured 2>/dev/null) | xz -T0 -1 >"$OUT/logs.tar.xz"
ls -l "$OUT"
