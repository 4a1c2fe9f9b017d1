"""SGLang 0.5.23's own load-dependent speculation, as the arm "adaptive" that ours is measured against.

It chooses the number of draft steps by tiers of the batch size, 0 = none, and inside a tier by the accepted
drafts (speculative/adaptive_spec_params.py). It runs chains (topk 1) alone.
"""

import json
from pathlib import Path


def threshold_tiers(num_steps: int, threshold: int) -> dict[str, dict[str, list[int]]]:
    """Tiers that switch as a threshold does: num_steps up to this batch size, none above it.

    On a GPU SGLang rounds the batch size up to the next CUDA graph's before it looks for the tier.
    """
    return {"1": {"candidate_steps": [num_steps]}, str(threshold + 1): {"candidate_steps": [0]}}


def adaptive_flags(num_steps: int, threshold: int | None, folder: Path) -> list[str]:
    """The server's flags; threshold None: SGLang's default tiers (0, 1, 3, 5 or 7 steps).

    With a threshold the tiers are written to a file in folder, which the server reads at its start.
    """
    if threshold is None:
        return ["--speculative-adaptive"]
    path = folder / f"adaptive-{num_steps}-steps-threshold-{threshold}.json"
    path.write_text(json.dumps(threshold_tiers(num_steps, threshold)) + "\n", encoding="utf-8")
    return ["--speculative-adaptive", "--speculative-adaptive-config", str(path.resolve())]
