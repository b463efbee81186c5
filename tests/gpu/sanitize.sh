#!/usr/bin/env bash
# memcheck, racecheck and initcheck over small launches of the bf16 kernels; prints one summary line a tool.
# Fails if a tool finds an error or a result is wrong. Needs a GPU and compute-sanitizer. Usage: sanitize.sh [PYTHON]
set -u
cd "$(dirname "$0")/../.."
python=${1:-python3}
sanitizer=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
[ -x "$sanitizer" ] || { echo "compute-sanitizer is not here: install the CUDA toolkit, or set CUDA_HOME" >&2; exit 125; }
log=$(mktemp -d); trap 'rm -rf "$log"' EXIT
failed=0
"$python" -P tests/gpu/sanitize.py >"$log/plain" 2>&1 || { tail -n 5 "$log/plain"; exit 1; }
echo "plain      $(tail -n 1 "$log/plain")"
for tool in memcheck racecheck initcheck; do
  (timeout 70 "$sanitizer" --tool "$tool" --error-exitcode 9 "$python" -P tests/gpu/sanitize.py >"$log/$tool" 2>&1; echo $? >"$log/$tool.rc") &
done
wait
for tool in memcheck racecheck initcheck; do
  printf '%-10s %s; %s\n' "$tool" "$(grep -E 'SUMMARY' "$log/$tool" | tail -n 1 | sed 's/^=* *//')" "$(grep -E 'every result|differs|off by' "$log/$tool" | tail -n 1)"
  [ "$(cat "$log/$tool.rc")" = 0 ] || { failed=1; grep -vE '^\s*$' "$log/$tool" | head -n 40; }
done
exit $failed
