"""CPU support for SGLang 0.5.23: sampling in the verify step.

This release has CPU operators of its own for speculation; ``sgl_kernel``'s stand-in has them
(kernels_0_5_23.py). Its verify step is greedy on every CPU, whatever the temperature, and says nothing. With
the tree sampling rule and the renormalisations in place, requests at a temperature above 0 follow the
target's distribution.
"""

import sys

from specdec.cpu import operators

REFUSED = "--speculative-use-rejection-sampling"


def install() -> None:
    """Put the CPU pieces into SGLang 0.5.23's modules. Called once in each of a server's processes."""
    if REFUSED in sys.argv:
        from specdec.sglang_plugin.hooks import refuse

        refuse(f"{REFUSED} has no CPU stand-in in specdec: without it tokens are sampled right; drop it")
    from sglang.srt.speculative import eagle_utils

    eagle_utils._verify_uses_greedy = _verify_uses_greedy
    eagle_utils.tree_speculative_sampling_target_only = operators.tree_speculative_sampling_target_only
    eagle_utils.top_k_renorm_prob = operators.top_k_renorm_prob
    eagle_utils.top_p_renorm_prob = operators.top_p_renorm_prob


def _verify_uses_greedy(
    *, is_all_greedy: bool, is_cpu: bool, is_hip: bool, is_xpu: bool, use_rejection_sampling: bool
) -> bool:
    """Takes the place of SGLang's function of that name, for which being a CPU is reason enough."""
    if use_rejection_sampling:
        raise NotImplementedError(f"{REFUSED} has no CPU stand-in in specdec; drop it")
    return is_all_greedy
