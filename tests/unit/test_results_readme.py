"""results/README.md says what the code writes."""

from __future__ import annotations

from specdec.runs.results import Cell
from specdec.runs.results_readme import PATH, page


def test_the_committed_page_is_not_stale() -> None:
    assert PATH.read_text(encoding="utf-8") == page(), "stale: run python -m specdec.runs.results_readme"


def test_every_column_has_a_row_with_its_meaning() -> None:
    lines = page().splitlines()
    for name, field in Cell.model_fields.items():
        (row,) = [line for line in lines if line.startswith(f"| `{name}` |")]
        assert field.description
        assert field.description.replace("|", "\\|") in row
