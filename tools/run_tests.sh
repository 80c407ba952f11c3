#!/usr/bin/env bash
# Environment, lint, types, import floors, tests. Arguments go to pytest. Fails when any of them fails.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/tools/environment.sh"
cd "$root"

make_environment dev

failed=()
check() {  # name, command...
  local name=$1 output
  shift
  if output=$("$@" 2>&1); then
    say "$name: ok"
  else
    say "$name: FAILED"
    say "$output"
    failed+=("$name")
  fi
}
# Beside the checks and once: else both workers and their children begin by compiling the same kernels.
"$python" -c 'from tierstore.kernels import warm_up; warm_up(("fp32", "bf16", "fp16"))' &
compiling=$!
check "lint (ruff)" "$python" -m ruff check .
check "types (mypy)" "$python" -m mypy
check "import floors (import-linter)" "$venv/bin/lint-imports"
if [ ${#failed[@]} -gt 0 ]; then say "failed so far: ${failed[*]}"; fi

wait "$compiling" || true  # what does not compile fails in the tests
status=0
# Two workers fill two cores: torch with a team of threads in each would only make them wait for each other.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m pytest -n 2 --dist loadfile "$@" || status=$?  # -n 0 for a debugger
if [ "$status" -eq 0 ] && [ ${#failed[@]} -gt 0 ]; then status=1; fi
exit "$status"
