"""What a sweep measures, and in which order: the grid of arms, concurrencies and repeats.

A block is one repeat at one concurrency: every arm once, close together in time, so that ratios within a
block survive a machine that drifts. Everything here follows from the plan alone; nothing is drawn at run
time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from specdec.load.cell import Slo
from specdec.load.prompts import Prompt, PromptSet, read_prompts
from specdec.servers.profile import Profile, context_length, load_profile, locate

ARM_NONE = "none"  # the worker of the baseline


@dataclass(frozen=True)
class Arm:
    """One way to serve.

    "baseline", or a worker "static", "dynamic" (threshold N), "off" (threshold 0), or "adaptive" (SGLang's
    own switch; with threshold N tiers that switch there, without one its default tiers).
    """

    arm: str
    worker: str
    threshold: int | None = None

    @property
    def name(self) -> str:
        """Unique within a sweep: "baseline", "v1-static", "v1-dynamic4", "v2-off", "v2-adaptive"."""
        if self.worker == ARM_NONE:
            return self.arm
        return f"{self.worker}-{self.arm}{self.threshold or ''}"

    @property
    def has_switch(self) -> bool:
        """Whether its server has our switch, whose threshold is changed while it runs."""
        return self.worker != ARM_NONE and self.arm != "adaptive"

    @property
    def server(self) -> str:
        """The arms of one server share it: those of a worker's switch do, by live change."""
        return self.worker if self.has_switch else self.name


@dataclass(frozen=True)
class PlannedCell:
    """One measurement to make. `order`: position of the arm in its block, from 0."""

    arm: Arm
    concurrency: int
    repeat: int
    order: int

    @property
    def cell_id(self) -> str:
        """Stable name of the cell and its file, e.g. "v1-dynamic4-c016-r0"."""
        return f"{self.arm.name}-c{self.concurrency:03}-r{self.repeat}"


class SweepPlan(BaseModel):
    """All that decides what is measured; written to plan.json before anything starts.

    With `target_ci`, concurrencies whose arms do not all have a 95 % interval of output tok/s within
    +-target_ci (relative to the mean) after `repeats` get further repeats, at most `max_repeats`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    profile: Profile
    sglang: str
    workers: tuple[str, ...]
    concurrencies: tuple[int, ...]
    thresholds: tuple[int, ...]
    repeats: int
    target_ci: float | None = None
    max_repeats: int
    output_tokens: int
    prompt_set: str
    prompt_set_sha256: str
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    seed: int

    @property
    def slo(self) -> Slo:
        return Slo(self.slo_ttft_ms, self.slo_tpot_ms)

    def arms(self) -> list[Arm]:
        """The baseline, then per worker static and each threshold, and SGLang's own switch if the profile says so."""
        arms = [Arm("baseline", ARM_NONE)]
        for worker in self.workers:
            arms.append(Arm("static", worker))
            arms += [Arm("dynamic" if threshold else "off", worker, threshold) for threshold in self.thresholds]
            if self.profile.worker(worker, self.sglang).adaptive:
                arms += [Arm("adaptive", worker, threshold) for threshold in self.thresholds if threshold]
                arms.append(Arm("adaptive", worker))
        return arms

    def cells(self, repeat: int, concurrencies: Iterable[int] | None = None) -> list[PlannedCell]:
        """The cells of one repeat in the order of measuring, at `concurrencies` of the grid (default: all).

        Side by side: block by block. Servers that follow each other: server by server, forwards and backwards
        in turn, so that each repeat begins with the server that is still up.
        """
        wanted = list(self.concurrencies if concurrencies is None else concurrencies)
        if repeat % 2:
            wanted.reverse()
        arms = self.arms()
        blocks = {
            concurrency: [arms[i] for i in balanced_order(len(arms), self._row(repeat, concurrency))]
            for concurrency in wanted
        }
        if self.profile.side_by_side:
            return [
                PlannedCell(arm, concurrency, repeat, order)
                for concurrency, block in blocks.items()
                for order, arm in enumerate(block)
            ]
        cells: list[PlannedCell] = []
        servers = list(dict.fromkeys(arm.server for arm in arms))
        for server in servers if repeat % 2 == 0 else reversed(servers):
            for concurrency, block in blocks.items():
                order = sum(cell.concurrency == concurrency for cell in cells)
                own = [arm for arm in block if arm.server == server]
                cells += [PlannedCell(arm, concurrency, repeat, order + i) for i, arm in enumerate(own)]
        return cells

    def _row(self, repeat: int, concurrency: int) -> int:
        """Which row of the balanced square a block takes: see `block_row`."""
        index = self.concurrencies.index(concurrency)
        return self.seed + block_row(repeat, index, len(self.concurrencies), len(self.arms()))

    def num_prompts(self, concurrency: int) -> int:
        """Requests in a cell of this concurrency."""
        return self.profile.grid.num_prompts(concurrency)

    def prompts(self, prompt_set: PromptSet, cell: PlannedCell) -> list[Prompt]:
        """The cell's prompts: the same for all arms of its block."""
        return prompt_set.pick(self.num_prompts(cell.concurrency), f"{self.seed}-{cell.repeat}-{cell.concurrency}")


def balanced_order(count: int, row: int) -> list[int]:
    """Row `row` (mod `count`) of a Latin square of 0..count-1 in which neighbours change from row to row.

    Over `count` consecutive rows every number is once at every place; for an even `count` each also follows
    each other one once (Williams 1949), so that what an arm leaves behind (heat, caches) does not hit one arm
    alone.
    """
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]
    return [(row + step) % count for step in zigzag]


def block_row(repeat: int, index: int, concurrencies: int, arms: int) -> int:
    """Row of the square for a block, so that first places differ by at most one between arms.

    That holds over all blocks of a run, over the blocks of each repeat, and over the repeats of each
    concurrency: blocks are numbered through, and shifted by one each time the numbering would repeat itself
    at a concurrency.
    """
    period = arms // math.gcd(arms, concurrencies)
    return repeat * concurrencies + index + repeat // period


def make_plan(
    profile: str | Path | Profile = "cpu-tiny",
    *,
    sglang: str = "0.5.12",
    workers: Sequence[str] | None = None,
    concurrencies: Sequence[int] | None = None,
    thresholds: Sequence[int] | None = None,
    repeats: int | None = None,
    target_ci: float | None = None,
    max_repeats: int | None = None,
    output_tokens: int | None = None,
    slo_ttft_ms: float | None = None,
    slo_tpot_ms: float | None = None,
    seed: int = 0,
) -> SweepPlan:
    """The plan of a sweep; what is not given comes from the profile's grid. Nothing is started.

    Raises ValueError, one line, for what cannot be measured.
    """
    chosen = profile if isinstance(profile, Profile) else load_profile(profile)
    known_workers = tuple(chosen.release(sglang).workers)
    names = tuple(known_workers if workers is None else workers)
    for name in names:
        chosen.worker(name, sglang)
    grid = chosen.grid
    repeats = _integer("repeats", grid.repeats if repeats is None else repeats, 1)
    limit = _integer("max_repeats", repeats if max_repeats is None else max_repeats, repeats)
    if target_ci is None and limit != repeats:
        raise ValueError("max_repeats needs a target_ci to decide when to stop before it")
    precision = _positive("target_ci", target_ci)
    if precision is not None and precision >= 1:
        raise ValueError(f"target_ci is a share of the mean, below 1, for example 0.03; got {target_ci!r}")
    if precision is not None and limit == repeats:
        raise ValueError(f"target_ci needs max_repeats above repeats ({repeats}): up to how many to go on")
    tokens = grid.output_tokens if output_tokens is None else output_tokens
    _refuse_beyond_context(tokens, (*chosen.flags, *chosen.release(sglang).flags))
    prompt_set = read_prompts(locate(chosen.prompts))
    return SweepPlan(
        profile=chosen,
        sglang=sglang,
        workers=_distinct("workers", names),
        concurrencies=_integers("concurrencies", grid.concurrencies if concurrencies is None else concurrencies, 1),
        thresholds=_integers("thresholds", grid.thresholds if thresholds is None else thresholds, 0),
        repeats=repeats,
        target_ci=precision,
        max_repeats=limit,
        output_tokens=_integer("output_tokens", tokens, 2),
        prompt_set=prompt_set.name,
        prompt_set_sha256=prompt_set.sha256,
        slo_ttft_ms=_positive("slo_ttft_ms", slo_ttft_ms),
        slo_tpot_ms=_positive("slo_tpot_ms", slo_tpot_ms),
        seed=_integer("seed", seed, 0),
    )


def _refuse_beyond_context(output_tokens: Any, flags: Sequence[str]) -> None:
    context = context_length(flags)
    if context is not None and isinstance(output_tokens, int) and output_tokens >= context:
        raise ValueError(
            f"output_tokens must be below the profile's --context-length of {context}, got {output_tokens}"
        )


def _integer(name: str, value: Any, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of {least} or more, got {value!r}")
    return value


def _integers(name: str, values: Any, least: int) -> tuple[int, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list of integers, got {values!r}")
    values = tuple(values)
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be integers of {least} or more, got {value!r}")
    return tuple(sorted(_distinct(name, values)))


def _distinct(name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    if not values:
        raise ValueError(f"{name} must not be empty")
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{name} names {value!r} twice")
    return values


def _positive(name: str, value: float | None) -> float | None:
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a number above 0, got {value!r}")
    return float(value)


def differences(one: SweepPlan, other: SweepPlan) -> list[str]:
    """What differs between two plans, each as "name: value in one, value in other"; profiles part by part."""
    found = []
    for name, value in _flat(one).items():
        if value != (second := _flat(other)[name]):
            found.append(f"{name}: {value}, {second}")
    return found


def _flat(plan: SweepPlan) -> dict[str, Any]:
    fields = plan.model_dump(mode="json")
    profile = fields.pop("profile")
    return {"profile": profile.pop("name")} | fields | {f"profile.{name}": part for name, part in profile.items()}
