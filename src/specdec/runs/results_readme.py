"""results/README.md: what lies in a run folder, and the schema of its rows, made from the code that writes them.

    python -m specdec.runs.results_readme

writes it anew; a test fails while it is stale.
"""

from __future__ import annotations

import pandas as pd

from specdec.runs.results import describe_columns
from specdec.servers.profile import ROOT

PATH = ROOT / "results" / "README.md"
_LAYOUT = """\
# What a run leaves behind

A run folder (`results/run` unless `OUT=` says otherwise) holds what one profile gave on one machine. Written by
`make sweep`, `specdec sweep` and the notebooks; read by notebook 04, `specdec status` and `specdec compare`.

`results/reference/` holds a run of each release with the tiny model; of a run it keeps the tables, `ramp/`,
`step_cost/` and three figures as PNG. Both were made at commit 7d2f4ba, on a machine that did nothing else:
`make sweep REPEATS=6` and `make sweep SGLANG=0.5.23 THRESHOLDS=8,24 REPEATS=6`; the tiers of the adaptive arm at 8 were
{"1": 3 steps, "9": 0 steps}, those at 24 {"1": 3 steps, "25": 0 steps}.

| path | what it is |
| --- | --- |
| `plan.json` | what was asked for: profile, grid, prompts with their hash, seed; written before anything starts |
| `cells/<cell_id>.json` | one row per measured cell: the truth, each file written whole or not at all |
| `results.parquet`, `results.csv` | the same rows as tables, written anew from the cells at the end of every run |
| `status.json`, `lock` | what the run is doing, for `specdec status`; which process holds the folder |
| `logs/` | one log per server start; its first line is the command |
| `ramp/<name>.json`, `.jsonl`, `-requests.csv` | a load on one server: what ran, its decode steps, its requests |
| `step_cost/<worker>.json` | median cost of decode steps by batch size; `none.json` is the baseline's |
| `figures/` | every figure as PNG and SVG |
| `notebooks/` | the executed notebooks, named by their parameters |
| `report.html` | notebook 04 as one page |

A cell's name is worker, arm with threshold, concurrency and repeat: `v1-dynamic4-c016-r0`, `v2-adaptive4-c001-r1`
(SGLang's own switch with tiers that switch at 4), `v2-adaptive-c001-r1` (its default tiers), `baseline-c032-r0`.
A file that is torn or of another schema is set aside (`*.set-aside`) and the cell is measured anew.

## One row per cell

Units are in the names. Missing is null (NaN in a table), never 0. A cell that failed is a row with `error`; every
other row keeps these invariants: output tokens are exactly those asked for, mean batch <= peak batch <=
concurrency, percentiles do not fall, and a baseline has neither threshold nor accept length.

"""
_FOOT = """
`cells/*.json` and both tables have these columns. The table is made from `specdec.runs.results.Cell` by
`python -m specdec.runs.results_readme`.
"""


def page() -> str:
    """The whole text."""
    return _LAYOUT + _table(describe_columns()) + _FOOT


def _table(columns: pd.DataFrame) -> str:
    lines = ["| column | type | may be missing | meaning |", "| --- | --- | --- | --- |"]
    for name, kind, missing, meaning in columns.itertuples(index=False):
        text = str(meaning).replace("|", "\\|")
        lines.append(f"| `{name}` | {kind} | {'yes' if missing else ''} | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
    print(f"written: {PATH.relative_to(ROOT)}")
