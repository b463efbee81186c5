#!/usr/bin/env bash
# Blame, shrink and replay of runs on a CUDA device; called by smoke.sh with the environment set. Usage: diagnose.sh DIR
set -u
dir=$1
mkdir -p "$dir"
fails=mutant:of=bf16-k,name=l1-head-lost

show() { # show CODE COMMAND...: runs it, prints what it said, how long it took, and whether it ended with this exit code
  local want=$1 started=$SECONDS
  shift
  echo "\$ difftest $*"
  timeout 90 python3 -m difftest "$@"
  local code=$?
  echo "exit code $code ($([ "$code" = "$want" ] && echo as it should || echo "SHOULD BE $want")), $((SECONDS - started)) s"
}

show 1 blame gaussian-2117 --path "$fails" --device cuda --layer 2 &
show 1 blame gaussian-2117 --path sglang-fp8 --device cuda --layer 2 --policy strict >"$dir/fp8" 2>&1 &
show 0 blame gaussian-2117 --path bf16-k --device cuda --layer 2 >"$dir/clean" 2>&1 &
show 1 shrink gaussian-2117 --path "$fails" --device cuda --out "$dir/bundle" >"$dir/shrink" 2>&1 &
wait
cat "$dir/fp8" "$dir/clean" "$dir/shrink"
show 1 replay "$dir/bundle" --device cuda
show 0 replay "$dir/bundle" --path bf16-k --device cuda
show 0 replay "$dir/bundle" --path bf16-k --device cpu
echo "\$ python repro.py"
python3 "$dir/bundle/repro.py"
echo "exit code $?"
