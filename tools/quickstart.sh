#!/usr/bin/env bash
# From a machine with Python 3.11+ to a model that trains with 1/8 of the memory that its training state needs.
#
#   bash tools/quickstart.sh [--store DIR] [options of `tierstore train`]
#
# Without --store (or --nvme, which is the same) the state goes to a temporary directory in this repository and is
# removed at the end. With it, the state is kept, and the same command goes on where the last one ended.
set -euo pipefail
root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/tools/environment.sh"

# 25.5 million parameters need 16 bytes each, 389 MiB: 8.1 times the memory given here. If an option is given twice,
# the later one counts, so the user's options come after these.
options=(--dtype fp32 --resume auto --gpu-memory 28MiB --cpu-memory 20MiB --batch 4 --sequence 256 --steps 45
  --lr 6e-4 --warmup 10)
model=(--preset 25m) keep=''

store_at() {  # option, directory
  case $2 in '' | -*) die "$1 needs a directory" ;; esac
  options+=(--nvme "$2") keep=yes
}

while [ $# -gt 0 ]; do
  case $1 in
    -h | --help)
      sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --store=* | --nvme=*) store_at "${1%%=*}" "${1#*=}" ;;
    --store | --nvme)
      store_at "$1" "${2:-}"
      shift
      ;;
    --options | --options=*)
      die "options of this script would override those of the file; give it to tierstore train --options"
      ;;
    *)
      case $1 in --preset | --preset=* | --config | --config=* | --checkpoint | --checkpoint=*) model=() ;; esac
      options+=("$1")
      ;;
  esac
  shift
done

make_environment transformers

if [ -z "$keep" ]; then
  store=$(mktemp -d "$root/.quickstart.XXXXXX") || die "cannot make a directory in $root; give one with --store"
  trap 'rm -rf "$store"' EXIT
  options+=(--nvme "$store")
fi

device=cpu
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then device=cuda; fi

run=("$python" -m tierstore.cli train --device "$device" ${model[@]+"${model[@]}"} "${options[@]}")
if [ -n "$keep" ]; then exec "${run[@]}"; fi  # so that a signal for this script reaches the run

status=0
"${run[@]}" || status=$?
case $status in
  0 | 130 | 143) say "the state was temporary and is removed; --store DIR keeps it, and goes on from it" ;;
esac
exit "$status"
