"""Stand-in for SGLang's compiled kernels: the operators EAGLE needs, in PyTorch; every other one raises when
called.

``torch.ops.sgl_kernel.convert_weight_packed`` is absent on purpose: SGLang then takes every layer's native
path.
"""

from importlib.metadata import version

from specdec.cpu.missing import Missing, missing, stand_in
from specdec.cpu.operators import *  # noqa: F403

if version("sglang") == "0.5.23":
    from specdec.cpu.kernels_0_5_23 import *  # noqa: F403

__version__ = "0.0.0+cpu"
stand_in(__name__)


def __getattr__(name: str) -> Missing:
    return missing(__name__, name)
