#!/usr/bin/env bash
# Environment, lint, types, import floors, tests. Arguments go to pytest. Fails when any of them fails.
set -euo pipefail
root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
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
# Beside the checks and only once: otherwise both workers and their children would begin by compiling the same kernels.
"$python" -c 'from tierstore.kernels import warm_up; warm_up(("fp32", "bf16", "fp16"))' &
compiling=$!
check "lint (ruff)" "$python" -m ruff check .
check "types (mypy)" "$python" -m mypy
check "import floors (import-linter)" "$venv/bin/lint-imports"
if [ ${#failed[@]} -gt 0 ]; then say "failed so far: ${failed[*]}"; fi

wait "$compiling" || true  # what does not compile fails in the tests
status=0
# Where memory is plenty, tests write to it, 3 GB at most: the whole run takes an eighth less time. The package itself
# checks what O_DIRECT asks for, and tests that need a real disk use one (`disk_path`). With TMPDIR=/tmp all tests do.
room=$(df --output=avail -BG /dev/shm 2>/dev/null | tail -1 | tr -dc 0-9) || true
if [ -z "${TMPDIR:-}" ] && [ "${room:-0}" -ge 8 ]; then
  TMPDIR=$(mktemp -d /dev/shm/tierstore-tests.XXXXXX)
  trap 'rm -rf "$TMPDIR"' EXIT
  if dd if=/dev/zero of="$TMPDIR/probe" bs=4096 count=1 oflag=direct 2>/dev/null; then export TMPDIR; fi
fi
# Two workers fill two cores: torch with a team of threads in each would only make them wait for each other.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m pytest -n 2 --dist loadfile "$@" || status=$?  # -n 0 for a debugger
if [ "$status" -eq 0 ] && [ ${#failed[@]} -gt 0 ]; then status=1; fi
exit "$status"
