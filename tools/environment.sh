# Makes the virtual environment that tools/quickstart.sh and tools/run_tests.sh run in. Sourced, not run.
# Reads $root (this repository), TIERSTORE_VENV (where the environment is; default .venv) and TIERSTORE_PYTHON
# (the Python to make it from). Sets $venv and $python. Anything installed elsewhere is kept out of the way.

unset PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONDONTWRITEBYTECODE VIRTUAL_ENV
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_USER=0
venv=${TIERSTORE_VENV:-$root/.venv}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac  # it is also used from other directories
python=$venv/bin/python

say() { printf '%s\n' "$*"; }
die() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 1; }

# A command may exist but not run (a pyenv shim of a version that is not chosen), or lack venv (Debian).
python_works() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(not sys.version_info >= (3, 11))' >/dev/null 2>&1
}

find_python() {
  local name
  for name in ${TIERSTORE_PYTHON:-python3.13 python3.12 python3.11 python3 python}; do
    if python_works "$name"; then
      command -v "$name"
      return
    fi
  done
  die "no Python 3.11 or newer with its venv module was found${TIERSTORE_PYTHON:+ as $TIERSTORE_PYTHON};" \
    "install one (on Debian and Ubuntu: apt install python3 python3-venv), or name it in TIERSTORE_PYTHON"
}

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }

# Identifies a finished installation: it changes with the project file, the extras and the place.
stamp_text() { printf '%s %s ' "$1" "$root"; cksum <"$root/pyproject.toml"; }

is_current() {  # extras
  "$python" -c 'import sys' >/dev/null 2>&1 && [ -f "$venv/.tierstore-$1" ] &&
    [ "$(cat "$venv/.tierstore-$1")" = "$(stamp_text "$1")" ]
}

# Imports every heavy package, tierstore from this repository, and lets torch and the compiler compute something.
check_installation() {
  (cd / && "$python" - "$root") <<'PYTHON'
import pathlib, sys
import numba, torch, transformers, tierstore
assert torch.ones(2, 3) @ torch.ones(3, 1) is not None
assert numba.njit(lambda x: x + 1)(1) == 2
root, found = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(tierstore.__file__).resolve()
assert root in found.parents, f"tierstore is imported from {found}, not from {root}"
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, transformers {transformers.__version__}, "
      f"numba {numba.__version__}")
PYTHON
}

# A broken environment in this repository is ours to remove; one that the user named may hold other things.
discard() {
  [ -f "$venv/pyvenv.cfg" ] || return 0
  if [ -n "${TIERSTORE_VENV:-}" ]; then die "the virtual environment $venv does not work; remove it and try again"; fi
  rm -rf "$venv"
}

install() {  # extras
  local base is_new=''
  base=$(find_python)
  if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv" 2>/dev/null)" ]; then
    die "$venv is there and is no virtual environment; remove it, or name another place in TIERSTORE_VENV"
  fi
  if ! python_works "$python"; then  # none yet, or one whose Python is gone or too old
    discard
    say "making a virtual environment in $venv"
    "$base" -m venv "$venv" || die "$base cannot make a virtual environment in $venv"
    is_new=yes
  fi
  rm -f "$venv"/.tierstore-*
  say "installing (this can take some minutes) ..."
  # Python compiles what is imported, a quarter of all modules; for all of them pip takes most of a minute.
  local pip=("$python" -m pip install -qq --no-compile)
  if [ -n "$is_new" ]; then  # pip of 2023, which comes with Python 3.11, takes twice the time for the rest
    "${pip[@]}" --retries 1 --timeout 5 --upgrade pip || true
  fi
  if ! has_gpu; then
    "${pip[@]}" torch==2.13.0 || die "pip could not install torch==2.13.0; see its message above"
  fi
  "${pip[@]}" -e "$root[$1]" || die "pip could not install tierstore; see its message above"
}

make_environment() {  # extras
  is_current "$1" || install "$1"
  if ! check_installation; then
    local trouble="what is installed in $venv does not work, see the message above"
    if [ -n "${TIERSTORE_VENV:-}" ]; then die "$trouble; if that stays so, remove it: it is then made anew"; fi
    say "$trouble; making it anew"
    rm -rf "$venv.before"
    mv "$venv" "$venv.before"
    if ! (install "$1" && check_installation); then  # no network, perhaps, and what was there may work again
      rm -rf "$venv"
      mv "$venv.before" "$venv"
      die "$venv is as it was, because it could not be made anew"
    fi
    rm -rf "$venv.before"
  fi
  is_current "$1" || stamp_text "$1" >"$venv/.tierstore-$1"
}
