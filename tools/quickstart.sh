#!/usr/bin/env bash
# From a machine with Python 3.11+ to a model that trains with 1/8 of the memory that its training state needs.
#
#   bash tools/quickstart.sh [--store DIR] [options of `tierstore train`]
#
# Without --store the state goes to a temporary directory in this repository and is removed at the end. With it,
# the state is kept, and the same command goes on where the last one ended.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/tools/environment.sh"

store='' keep=''
if [ "${1:-}" = "-h" ] || [ "${1:-}" = "--help" ]; then
  sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 0
fi
if [ "${1:-}" = "--store" ]; then
  [ $# -ge 2 ] || die "--store needs a directory"
  store=$2 keep=yes
  shift 2
fi

make_environment transformers

if [ -z "$store" ]; then
  store=$(mktemp -d "$root/.quickstart.XXXXXX") || die "cannot make a directory in $root; give one with --store"
  trap 'rm -rf "$store"' EXIT
else
  mkdir -p "$store" || die "cannot make the directory $store"
fi

device=cpu
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then device=cuda; fi

# 25.5 million parameters need 16 bytes each, 389 MiB: 8.1 times the memory given here.
status=0
"$python" -m tierstore.cli train --preset 25m --dtype fp32 --device "$device" --nvme "$store" --resume auto \
  --gpu-memory 28MiB --cpu-memory 20MiB --batch 4 --sequence 256 --steps 45 --lr 6e-4 --warmup 10 "$@" || status=$?
if [ -z "$keep" ]; then
  say "the state was temporary and is removed; --store DIR keeps it, and goes on from it"
fi
exit "$status"
