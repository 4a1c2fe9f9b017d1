"""SGLang 0.5.23's own load-dependent speculation, as the arm "adaptive" that ours is measured against.

It chooses the number of draft steps by tiers of the batch size, 0 = none, and inside a tier by the accepted
drafts (speculative/adaptive_spec_params.py). It runs chains (topk 1) alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AdaptiveTiers:
    """Tiers that switch as a threshold does, and the folder for the file that the server reads at its start."""

    threshold: int  # largest batch size that still speculates
    folder: Path


def threshold_tiers(num_steps: int, threshold: int) -> dict[str, dict[str, list[int]]]:
    """num_steps draft steps up to this batch size, none above it.

    On a GPU SGLang rounds the batch size up to the next CUDA graph's before it looks for the tier.
    """
    return {"1": {"candidate_steps": [num_steps]}, str(threshold + 1): {"candidate_steps": [0]}}


def adaptive_flags(num_steps: int, tiers: AdaptiveTiers | None) -> list[str]:
    """The server's flags, the tiers' file written; None: SGLang's default tiers (0, 1, 3, 5 or 7 steps)."""
    if tiers is None:
        return ["--speculative-adaptive"]
    path = tiers.folder / f"adaptive-{num_steps}-steps-threshold-{tiers.threshold}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(threshold_tiers(num_steps, tiers.threshold)) + "\n", encoding="utf-8")
    return ["--speculative-adaptive", "--speculative-adaptive-config", str(path)]
