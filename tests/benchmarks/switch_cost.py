"""What the switch and its report cost a decode step on the host: python tests/benchmarks/switch_cost.py

Prints microseconds; nothing is asserted, machines are noisy. Case 13: none of it asks the device.
"""

import tempfile
import timeit
from collections.abc import Callable

from specdec.policy import SwitchSettings, ThresholdPolicy
from specdec.sglang_plugin.report import Report, WorkerFacts
from specdec.sglang_plugin.switch import Switch

FACTS = WorkerFacts("0.5.12", "EAGLEWorker", "sglang/srt/speculative/eagle_worker.py", False, "benchmark")


def microseconds(call: Callable[[], object], number: int = 20_000) -> float:
    """The best of five rounds, per call."""
    return min(timeit.repeat(call, number=number, repeat=5)) / number * 1e6


def main() -> None:
    settings = SwitchSettings(threshold=8, resume_threshold=4, dwell_steps=3)
    policy, switch = ThresholdPolicy(settings), Switch(settings, is_rank_0=False, warm_up=False)

    def report_step(report: Report) -> None:
        report.commit(report.end_step(report.start_step(), 6, in_graph=False), requests=6, tokens=14)

    silent = Report(FACTS, switch, None)
    with tempfile.NamedTemporaryFile("w", buffering=1) as file:
        traced = Report(FACTS, switch, None, trace=file)
        rows = {
            "decision of the policy": microseconds(lambda: policy.decide(6)),
            "decision with its counters": microseconds(lambda: switch.decide(6)),
            "counting a step": microseconds(lambda: report_step(silent)),
            "counting a step and tracing it": microseconds(lambda: report_step(traced)),
        }
    for name, spent_us in rows.items():
        print(f"{name:32} {spent_us:7.2f} us")


if __name__ == "__main__":
    main()
