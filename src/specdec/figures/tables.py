"""Tables for notebooks and the report, made from the rows of a run."""

from __future__ import annotations

import pandas as pd

from specdec.analysis.recommend import measured_gains
from specdec.analysis.stats import arm_sort_key, cell_statistics
from specdec.figures.style import label

_SETTINGS = {
    "run_id": "run",
    "profile": "profile",
    "model": "target model",
    "draft_model": "draft model",
    "sglang": "SGLang",
    "machine": "machine",
    "git_commit": "commit",
    "prompt_set": "prompts",
    "output_tokens_per_request": "output tokens per request",
}


def provenance(results: pd.DataFrame) -> pd.DataFrame:
    """What was measured, where and with what; several values mean that the run holds several."""
    rows = {text: _values(results[column]) for column, text in _SETTINGS.items() if column in results}
    failed = int(results["error"].notna().sum())
    rows["cells"] = f"{len(results)}, of which {failed} failed"
    return pd.DataFrame({"": rows})


def workers(results: pd.DataFrame) -> pd.DataFrame:
    """Per worker the class and file that the servers reported, and the shape of the draft."""
    columns = ["worker", "worker_class", "worker_file", "overlap", "topk", "num_steps", "num_draft_tokens"]
    rows = results.loc[results["worker_class"].notna(), columns]
    return rows.drop_duplicates().sort_values("worker").set_index("worker")


def by_concurrency(results: pd.DataFrame, metric: str = "output_tok_s", digits: int = 1) -> pd.DataFrame:
    """Mean of `metric` per arm (rows) and concurrency (columns), with the half-width of its 95 % interval."""
    statistics = cell_statistics(results, metric)
    statistics["text"] = [
        f"{mean:.{digits}f}" + ("" if pd.isna(high) else f" ± {high - mean:.{digits}f}")
        for mean, high in zip(statistics["estimate"], statistics["high"], strict=True)
    ]
    table = statistics.pivot(index=["worker", "arm_name"], columns="concurrency", values="text")
    order = sorted(table.index, key=lambda key: (key[0] != "none", key[0], arm_sort_key(key[1])))
    table = table.reindex(order).fillna("-")
    table.index = pd.Index([_arm(worker, name) for worker, name in order], name=f"{metric} at concurrency")
    table.columns.name = None
    return table


def gains(results: pd.DataFrame) -> pd.DataFrame:
    """What each arm gained over the baseline on the whole grid, each concurrency counting alike (paired)."""
    table = measured_gains(results)
    table = table.iloc[sorted(range(len(table)), key=lambda i: arm_sort_key(table["arm_name"].iloc[i]))]
    table = table.sort_values("worker", kind="stable")
    return pd.DataFrame(
        {
            "arm": [_arm(w, n) for w, n in zip(table["worker"], table["arm_name"], strict=True)],
            "gain over the baseline": [f"{gain:.3f}" for gain in table["gain"]],
            "95 % interval": [
                "-" if pd.isna(low) else f"{low:.3f} to {high:.3f}"
                for low, high in zip(table["low"], table["high"], strict=True)
            ],
            "blocks": table["n"].to_numpy(),
            "worst": [
                f"{worst:.3f} at concurrency {concurrency}"
                for worst, concurrency in zip(table["worst"], table["worst_concurrency"], strict=True)
            ],
        }
    ).set_index("arm")


def failures(results: pd.DataFrame) -> pd.DataFrame:
    """The cells that failed, and why."""
    return results.loc[results["error"].notna(), ["cell_id", "error"]].set_index("cell_id")


def _arm(worker: str, name: str) -> str:
    return label(name) if worker == "none" else f"{worker} {label(name)}"


def _values(column: pd.Series[str]) -> str:
    return ", ".join(sorted({str(value) for value in column.dropna()})) or "unknown"
