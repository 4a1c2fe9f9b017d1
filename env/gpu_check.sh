#!/usr/bin/env bash
# For a person with a GPU: does the switch work there? A verdict per line, under 10 minutes with the default model.
# Usage, in an environment made by env/setup_cuda.sh: env/gpu_check.sh [PROFILE]
# PROFILE: a name in env/profiles or a .toml file of your own; default gpu-tiny, the tiny pair of this repository.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v nvidia-smi >/dev/null || { echo "env/gpu_check.sh: no NVIDIA GPU here (nvidia-smi not found)" >&2; exit 2; }
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
exec specdec self-check --profile "${1:-gpu-tiny}"
