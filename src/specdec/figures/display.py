"""What a notebook's cell shows: figures as pictures with their numbers as text beside them."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from specdec.figures.style import figure_data, save_figure


@dataclass(frozen=True)
class Picture:
    """A figure in a notebook. Its text is the data, so that nbval compares numbers and not pixels."""

    figure: Figure

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        png = io.BytesIO()
        self.figure.savefig(png, dpi=100, metadata={"Software": None})
        return {
            "image/png": base64.b64encode(png.getvalue()).decode(),
            "text/plain": figure_data(self.figure),
        }


def show(figure: Figure, out: Path | None = None, name: str | None = None) -> Picture:
    """A figure for the last line of a cell; with `out` and `name` also kept as OUT/figures/NAME.png and
    .svg.
    """
    if out is not None and name is not None:
        save_figure(figure, out / "figures", name)
    return Picture(figure)


def show_each(figures: Mapping[str, Figure], out: Path | None = None, name: str | None = None) -> None:
    """Show one figure per worker, kept as OUT/figures/NAME-WORKER."""
    from IPython.display import display

    for worker, figure in figures.items():
        display(show(figure, out, f"{name}-{worker}" if name else None))
    if not figures:
        print("nothing to show: no ramp here (notebook 03 measures it), or none that crossed its threshold")
