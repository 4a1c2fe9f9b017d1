"""When to speculate. Pure Python: decides from the batch size alone, so that all tensor-parallel ranks agree."""

from specdec.policy.settings import SwitchSettings
from specdec.policy.threshold import Mode, ThresholdPolicy

__all__ = ["Mode", "SwitchSettings", "ThresholdPolicy"]
