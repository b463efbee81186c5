#!/usr/bin/env bash
# Starts one SGLang server of DeepSeek-V4-Flash, in one of the two configurations that `difftest recall serve` compares.
#
#   launch.sh fp8     the index keys as SGLang ships them: fp8, 132 bytes an entry
#   launch.sh bf16    the index keys in bf16, 256 bytes an entry (difftest's kernels, loaded as an SGLang plugin)
#
# Run each on its own host or GPUs, then compare them:
#
#   difftest recall serve --base-url http://HOST_A:30000 --against http://HOST_B:30000
#
# Settings, all by environment variable:
#   MODEL      checkpoint, a folder or a name             (deepseek-ai/DeepSeek-V4-Flash)
#   TP         GPUs of this server                        (4; the weights alone are 160 GB)
#   PORT       where it listens                           (30000)
#   CONTEXT    longest prompt plus answer                 (65536)
#   PICKS=1    return the indexer's picks (--picks of the client). SGLang 0.5.23 captures them only where attention is not
#              sharded, so this also turns on data-parallel attention over the TP GPUs.
#   DRY_RUN=1  print the command instead of running it
# Further arguments go to the server.
set -euo pipefail

usage() {
    echo "launch.sh: the configuration is ${1:-missing}: give fp8 or bf16" >&2
    exit 2
}

configuration=${1:-}
[ -n "$configuration" ] || usage
shift

arguments=(
    --model-path "${MODEL:-deepseek-ai/DeepSeek-V4-Flash}"
    --tp-size "${TP:-4}"
    --host 0.0.0.0
    --port "${PORT:-30000}"
    --context-length "${CONTEXT:-65536}"
    --trust-remote-code
    --tool-call-parser deepseekv4
    --reasoning-parser deepseek-v4
)

case $configuration in
    fp8)
        export SGLANG_DSV4_BF16_INDEX_K=0
        ;;
    bf16)
        # Keys take 1,344 B a token over the 21 csa layers instead of 693 B, and the gathered keys of a long prefill live
        # outside the pool: leave a fifth of the memory free.
        export SGLANG_DSV4_BF16_INDEX_K=1
        arguments+=(--mem-fraction-static 0.80)
        ;;
    *)
        usage "'$configuration'"
        ;;
esac

if [ "${PICKS:-0}" = 1 ]; then
    arguments+=(--enable-return-indexer-topk --attn-dp-size "${TP:-4}")
fi

command=(python -m sglang.launch_server "${arguments[@]}" "$@")
if [ "${DRY_RUN:-0}" = 1 ]; then
    printf 'SGLANG_DSV4_BF16_INDEX_K=%s' "$SGLANG_DSV4_BF16_INDEX_K"
    printf ' %q' "${command[@]}"
    printf '\n'
    exit 0
fi
exec "${command[@]}"
