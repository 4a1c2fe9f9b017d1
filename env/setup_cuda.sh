#!/usr/bin/env bash
# Builds .venv/sglang-RELEASE-cuda for a machine with NVIDIA GPUs: SGLang with its own dependencies, specdec with what
# the notebooks need. NOT RUN: no such machine was at hand. Usage: env/setup_cuda.sh 0.5.12 | 0.5.23
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() { echo "env/setup_cuda.sh: $*" >&2; exit 2; }

[[ $# == 1 && -f env/locks/sglang-$1-cpu.txt ]] || die "usage: env/setup_cuda.sh RELEASE, 0.5.12 or 0.5.23"
nvidia-smi >/dev/null 2>&1 || die "no NVIDIA GPU found (nvidia-smi fails); for the CPU: env/setup.sh $1"
python3 -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 10))' || die "needs Python 3.10 or newer with venv"

venv=.venv/sglang-$1-cuda
[[ -x $venv/bin/python ]] || python3 -m venv "$venv"
"$venv/bin/python" -m pip install "sglang==$1" -e '.[measure,test]'
"$venv/bin/python" -c 'import torch; assert torch.cuda.is_available(), "torch sees no GPU"'
echo "$venv is ready. Next: source $venv/bin/activate; specdec run --profile glm5-nvfp4-8gpu"
