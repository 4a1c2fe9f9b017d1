#!/usr/bin/env bash
# Builds .venv/sglang-RELEASE for a machine without a GPU, from env/locks/sglang-RELEASE-cpu.txt and nothing else.
# Usage: env/setup.sh 0.5.12 | 0.5.23
# Done already: takes a second. Interrupted, or its inputs changed: built anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() { echo "env/setup.sh: $*" >&2; exit 2; }

known() { (cd env/locks && ls sglang-*-cpu.txt | sed 's/^sglang-//; s/-cpu\.txt$//' | paste -sd ' '); }

# The first Python that the pins support and that can make a virtual environment; 3.11 is the tested one.
find_python() {
  local name
  for name in python3.11 python3.12 python3.13 python3; do
    if "$name" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  die "no Python 3.11, 3.12 or 3.13 with venv found (Debian and Ubuntu: apt install python3.11 python3.11-venv)"
}

# What the environment depends on; written into it last, so an interrupted set-up has none.
fingerprint() {
  { echo "$PWD"; "$1" -VV; cat "$lock" env/setup.sh pyproject.toml
    find env/cpu_standins -name '*.egg-info' -prune -o -name '*.py' -print -o -name '*.toml' -print | sort | xargs -r cat
  } | sha256sum | cut -d' ' -f1
}

# pip with its output in the log; a failure becomes one line that says what to do. --no-compile: most modules of these
# packages are never imported, the others are compiled at first use.
pip_install() {
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off --no-deps --no-compile "$@" \
    >>"$log" 2>&1 && return
  grep -qi 'no space left' "$log" && die "the disk is full: $(df -h --output=avail . | tail -1 | tr -d ' ') left in $PWD"
  grep -qiE 'NewConnectionError|ConnectTimeout|name resolution|ReadTimeout|ProxyError|Network is unreachable' "$log" \
    && die "the package index cannot be reached (log: $log)"
  die "pip failed: $(grep '^ERROR' "$log" | tail -1) (log: $log)"
}

trap 'die "interrupted; the next run starts anew"' INT TERM
[[ $# == 1 ]] || die "usage: env/setup.sh RELEASE, one of: $(known)"
release=$1
lock=env/locks/sglang-$release-cpu.txt
venv=.venv/sglang-$release
log=.venv/setup-$release.log
[[ $release =~ ^[0-9.]+$ && -f $lock ]] || die "no lock file for SGLang '$release'; known: $(known)"
[[ $(uname -s) == Linux ]] || die "SGLang's CPU engine needs Linux, this is $(uname -s)"

mkdir -p .venv || die "cannot write to $PWD"
exec 9>"$venv.lock"
flock -n 9 || { echo "another set-up of $venv runs; waiting for it"; flock 9; }

python=$(find_python) || exit 2
wanted=$(fingerprint "$python")
[[ -f $venv/stamp && $(<"$venv/stamp") == "$wanted" ]] && exit 0

free_mb=$(df -m --output=avail . | tail -1)
(( free_mb > 4000 )) || die "needs 4 GB of disk in $PWD, $free_mb MB are free"

echo "building $venv from $lock with $("$python" -V) (2 to 5 minutes; log: $log)"
rm -rf "$venv"
: >"$log"
"$python" -m venv "$venv" >>"$log" 2>&1 || die "cannot make a virtual environment: $(tail -1 "$log")"

echo "[$SECONDS s] $release: torch"
pip_install --only-binary :all: "$(grep '^torch==' "$lock")"
# A CUDA build does not import here without its CUDA packages: read its version file instead.
build=$("$venv/bin/python" -c 'import runpy, sysconfig
print(runpy.run_path(sysconfig.get_path("platlib") + "/torch/version.py")["cuda"])')
[[ $build == None ]] || die "pip chose a build of torch for CUDA $build. Point it at PyTorch's index of CPU builds (its address is \
on pytorch.org's install page: Pip, CPU): PIP_EXTRA_INDEX_URL=ADDRESS make env"

echo "[$SECONDS s] $release: $(grep -c == "$lock") packages"
pip_install --only-binary :all: -r "$lock"
echo "[$SECONDS s] $release: specdec and the CPU stand-ins"
exec 8>.venv/source.lock # this writes into the source tree, where another release's set-up may do the same
flock 8
pip_install --no-build-isolation -e env/cpu_standins -e .
flock -u 8

"$venv/bin/python" -c 'import torch, sglang, specdec' >>"$log" 2>&1 || die "the environment does not import: $(tail -1 "$log")"
echo "$wanted" >"$venv/stamp"
echo "[$SECONDS s] $venv is ready"
