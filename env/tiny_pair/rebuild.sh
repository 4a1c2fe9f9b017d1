#!/usr/bin/env bash
# Rebuild tokenizer, target, draft and held-out prompts from nothing, on one thread. PYTHON: a CPython 3.11.7 with
# torch, safetensors and tokenizers. OUT: where the new pair goes (default: rebuilt/ beside this script).
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3}
out=${OUT:-rebuilt}
mkdir -p "$out"
export OMP_NUM_THREADS=1
"$python" train_target.py --out "$out/target" --prompts "$out/prompts_heldout.jsonl"
"$python" train_draft.py --target "$out/target" --prompts "$out/prompts_heldout.jsonl" --out "$out/draft"
"$python" evaluate.py --target "$out/target" --prompts "$out/prompts_heldout.jsonl" --draft "$out/draft"
