"""Stand-in for torchvision, whose published wheels do not load beside a CPU build of torch from another index."""

from specdec.cpu.missing import Missing, missing, stand_in

__version__ = "0.0.0"
stand_in(__name__)


def __getattr__(name: str) -> Missing:
    return missing(__name__, name)
