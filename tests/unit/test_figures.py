"""The figures by their data: axes, units, ticks, series, titles, foot. Never by pixels."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from synthetic import CONCURRENCIES, crossing_at, table

from specdec.analysis.stats import cell_statistics, ratio_statistics
from specdec.figures import ramp, sweep
from specdec.figures.display import show, show_each
from specdec.figures.style import Provenance, figure_data, save_figure, style
from specdec.runs.step_trace import around_switches, read_trace

OF_A_RUN = [
    sweep.throughput,
    sweep.envelope_distance_figure,
    sweep.gain_map,
    sweep.latency_throughput,
    sweep.accept_length,
]
ABOUT = Provenance("n = 1 ramp", "tiny target", "cpu-tiny", "0.5.12", "test machine, 2 cores")


@pytest.fixture(scope="module")
def results() -> pd.DataFrame:
    return table(crossing_at(6))


@pytest.fixture(scope="module")
def trace() -> pd.DataFrame:
    """Batch 1, 8, 1, 8, 1, threshold 4; ten steps each, 0.1 s a step; 2.5 tokens per speculative step."""
    batches = np.repeat([1, 8, 1, 8, 1], 10)
    speculative = batches <= 4
    return pd.DataFrame(
        {
            "step": np.arange(50),
            "t_s": 100.0 + 0.1 * np.arange(50),
            "batch_size": batches,
            "mode": np.where(speculative, "speculative", "plain"),
            "tokens": np.where(speculative, 2 + np.arange(50) % 2, batches),
            "duration_us": 90000,
        }
    )


def _series(ax: Axes) -> dict[str, tuple[list[float], list[float]]]:
    return {
        str(line.get_label()): (np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist())
        for line in ax.lines
        if not str(line.get_label()).startswith("_")
    }


@pytest.mark.parametrize("draw", OF_A_RUN)
def test_every_figure_stands_alone(draw: Callable[[pd.DataFrame], Figure], results: pd.DataFrame) -> None:
    figure = draw(results)
    assert figure.get_suptitle().strip()
    foot = " ".join(figure.get_supxlabel().split())
    for fact in ("n = 3 repeats", "tiny target", "cpu-tiny", "SGLang 0.5.12", "test machine, 2 cores"):
        assert fact in foot
    panels = [ax for ax in figure.axes if ax.get_label() != "<colorbar>"]
    assert any(ax.get_xlabel() for ax in panels)
    titles = [ax.get_title(loc="left") for ax in panels]
    assert titles[0].startswith("Worker v1")
    assert titles[1].startswith("Worker v2")


def test_throughput_shows_the_means_and_their_intervals(results: pd.DataFrame) -> None:
    ax = sweep.throughput(results).axes[0]
    series = _series(ax)
    assert list(series) == ["baseline", "static EAGLE-3", "dynamic, threshold 4", "dynamic, threshold 16"]
    means = cell_statistics(results)
    means = means[(means["arm_name"] == "static") & (means["worker"] == "v1")]
    assert series["static EAGLE-3"][0] == list(CONCURRENCIES)
    assert series["static EAGLE-3"][1] == pytest.approx(means["estimate"].tolist())
    tops = np.concatenate([segment[:, 1] for bars in ax.collections for segment in bars.get_segments()])  # type: ignore[attr-defined]
    assert means["high"].iloc[0] in tops
    assert ax.get_ylim()[1] >= tops.max()
    assert ax.get_ylabel() == "output tokens per second"
    assert ax.get_ylim()[0] == 0


def test_concurrency_is_log2_with_the_measured_values_as_ticks(results: pd.DataFrame) -> None:
    for figure in (sweep.throughput(results), sweep.accept_length(results)):
        axis = figure.axes[0].xaxis
        assert figure.axes[0].get_xscale() == "log"
        assert axis.get_ticklocs().tolist() == list(CONCURRENCIES)
        assert [text.get_text() for text in axis.get_ticklabels()] == [str(c) for c in CONCURRENCIES]
        assert axis.get_ticklocs(minor=True).tolist() == []


@pytest.fixture(scope="module")
def seven_arms() -> pd.DataFrame:
    """A chain with SGLang's own switch beside ours, and a tree, which that refuses."""
    return table(crossing_at(6), thresholds=(4, 8), workers=("v2", "v2-tree"), adaptive=(4, 8, None))


def test_sglangs_own_switch_stands_beside_ours(seven_arms: pd.DataFrame) -> None:
    chain, tree = sweep.throughput(seven_arms).axes
    ours = ["baseline", "static EAGLE-3", "dynamic, threshold 4", "dynamic, threshold 8"]
    own = ["SGLang adaptive, default tiers", "SGLang adaptive, tiers at 4", "SGLang adaptive, tiers at 8"]
    assert list(_series(chain)) == [*ours, *own]
    assert list(_series(tree)) == ours
    assert tree.get_title(loc="left").startswith("Worker v2-tree")
    texts = [text.get_text() for text in sweep.gain_map(seven_arms).axes[1].texts]
    assert texts.count("not in this run") == 3
    assert "not\nmeasured" not in texts
    distances = _series(sweep.envelope_distance_figure(seven_arms).axes[2])
    assert set(distances) == {*ours[2:], *own}


@pytest.mark.parametrize("draw", [sweep.throughput, sweep.envelope_distance_figure, sweep.latency_throughput])
def test_legends_of_many_arms_are_not_cut(draw: Callable[[pd.DataFrame], Figure], seven_arms: pd.DataFrame) -> None:
    figure = draw(seven_arms)
    (legend,) = figure.legends
    assert legend.get_window_extent().x1 <= figure.bbox.x1
    assert len(legend.get_texts()) >= 7


def test_what_three_workers_say_does_not_overlap() -> None:
    three = table(crossing_at(6), workers=("v1", "v2", "v2-tree"))
    three = three.assign(worker_class="EAGLEWorkerV2", topk=4, num_draft_tokens=16)
    figure = sweep.gain_map(three)
    figure.draw_without_rendering()
    panels = figure.axes[:3]
    for texts in (
        [ax._left_title for ax in panels],  # type: ignore[attr-defined]
        [ax.xaxis.label for ax in panels],
        [text for text in panels[0].texts if " to " in text.get_text()][:6],
    ):
        boxes = [text.get_window_extent() for text in texts]
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


@pytest.mark.parametrize("draw", [sweep.throughput, sweep.envelope_distance_figure, sweep.latency_throughput])
def test_a_faster_worker_is_not_cut_by_the_scale_of_the_one_beside_it(
    draw: Callable[[pd.DataFrame], Figure], results: pd.DataFrame
) -> None:
    fast = results.copy()
    fast.loc[fast["worker"] == "v2", "output_tok_s"] *= 5
    ax = draw(fast).axes[1]
    for x, y in _series(ax).values():
        assert np.nanmax(x) <= ax.get_xlim()[1]
        assert np.nanmax(y) <= ax.get_ylim()[1]


@pytest.mark.parametrize("draw", OF_A_RUN)
def test_the_foot_says_of_intervals_what_is_drawn(draw: Callable[[pd.DataFrame], Figure]) -> None:
    two = " ".join(draw(table(crossing_at(6), repeats=2)).get_supxlabel().split())
    assert "n = 2 repeats, so no interval" in two
    assert "95 %" not in two
    some = table(crossing_at(6))
    some = some[(some["repeat"] < 2) | (some["concurrency"] > 1)]
    foot = " ".join(draw(some).get_supxlabel().split())
    assert "n = 2 to 3 repeats;" in foot
    assert draw is sweep.latency_throughput or "95 % interval where n is 3 or more" in foot


def test_one_repeat_has_dots_and_no_bars() -> None:
    results = table(crossing_at(6), repeats=1)
    figure = sweep.throughput(results)
    assert not figure.axes[0].collections
    assert figure.axes[0].get_ylim()[1] > results["output_tok_s"].max()
    distances = sweep.envelope_distance_figure(results).axes[2]
    shown = [value for _, values in _series(distances).values() for value in values]
    assert distances.get_ylim()[0] < min(shown) <= max(shown) < distances.get_ylim()[1]
    assert "n = 1 repeat, so no interval;" in figure.get_supxlabel()


def test_a_failed_cell_is_a_gap_not_a_zero(results: pd.DataFrame) -> None:
    broken = results.copy()
    gone = (broken["arm"] == "static") & (broken["concurrency"] == 8) & (broken["worker"] == "v1")
    broken.loc[gone, ["error", "output_tok_s"]] = ["ServerDied", np.nan]
    values = _series(sweep.throughput(broken).axes[0])["static EAGLE-3"][1]
    assert np.isnan(values[3])
    assert np.isfinite(np.delete(values, 3)).all()
    texts = [text.get_text() for text in sweep.gain_map(broken).axes[0].texts]
    assert texts.count("not\nmeasured") == 1


def test_envelope_figure_holds_the_better_arm_and_the_distance(results: pd.DataFrame) -> None:
    figure = sweep.envelope_distance_figure(results)
    top, bottom = figure.axes[0], figure.axes[2]
    series = _series(top)
    better = np.maximum(series["baseline"][1], series["static EAGLE-3"][1])
    assert series["envelope"][1] == pytest.approx(better.tolist())
    distances = _series(bottom)
    assert set(distances) == {"dynamic, threshold 4", "dynamic, threshold 16"}
    assert distances["dynamic, threshold 16"][1][4] == pytest.approx(crossing_at(6)(16), abs=0.1)


def test_gain_map_is_centred_on_1_and_annotated(results: pd.DataFrame) -> None:
    figure = sweep.gain_map(results)
    image = figure.axes[0].images[0]
    assert image.norm.vmin == pytest.approx(-float(image.norm.vmax or 0))  # log2 of the ratio: 0 is 1.0
    grey = image.cmap(image.norm(0.0))
    assert max(grey[:3]) - min(grey[:3]) < 0.05
    ratios = ratio_statistics(results).set_index(["worker", "arm_name", "concurrency"])["estimate"]
    shown = np.asarray(image.get_array())
    assert shown[0, 0] == pytest.approx(np.log2(ratios["v1", "static", 1]))
    assert shown[2, 5] == pytest.approx(np.log2(ratios["v1", "dynamic 16", 32]))
    assert f"{ratios['v1', 'static', 1]:.2f}" in [text.get_text() for text in figure.axes[0].texts]
    labels = [text.get_text().replace("\n", " ") for text in figure.axes[0].get_yticklabels()]
    assert labels == ["static EAGLE-3", "dynamic, threshold 4", "dynamic, threshold 16"]


def test_latency_figure_pairs_throughput_with_time_per_token(results: pd.DataFrame) -> None:
    ax = sweep.latency_throughput(results).axes[0]
    tok_s, ms = _series(ax)["baseline"]
    expected = [1000 * c / rate for c, rate in zip(CONCURRENCIES, tok_s, strict=True)]
    assert expected == pytest.approx(ms, rel=0.05)
    assert "ms per output token" in ax.get_ylabel()
    assert [text.get_text() for text in ax.texts].count("32") == 2


def test_accept_length_leaves_out_cells_without_speculative_steps(results: pd.DataFrame) -> None:
    series = _series(sweep.accept_length(results).axes[0])
    values = np.array(series["dynamic, threshold 4"][1])
    assert np.isfinite(values[:3]).all()
    assert np.isnan(values[3:]).all()
    hardly = results.copy()
    at_the_end = (hardly["arm"] == "dynamic") & (hardly["concurrency"] == 32)
    hardly.loc[at_the_end, ["accept_length", "speculative_steps"]] = [3.8, 9]
    assert np.isnan(_series(sweep.accept_length(hardly).axes[0])["dynamic, threshold 4"][1][5])


def test_arms_differ_in_colour_marker_and_line() -> None:
    names = ["baseline", "static", "off", "dynamic 4", "dynamic 8", "dynamic 16", "dynamic 32"]
    names += ["adaptive", "adaptive 4", "adaptive 8", "adaptive 16"]
    styles = [style(name, names) for name in names]
    assert len({look.colour for look in styles}) == len(names)
    assert len({look.marker for look in styles}) == len(names)
    light = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (to_rgb(look.colour) for look in styles)]
    assert max(light) < 0.75  # readable on white paper


def test_an_arm_looks_the_same_in_every_figure(results: pd.DataFrame) -> None:
    looks = {
        line.get_label(): (line.get_color(), line.get_marker()) for line in sweep.throughput(results).axes[0].lines
    }
    for draw in (sweep.envelope_distance_figure, sweep.latency_throughput, sweep.accept_length):
        for line in draw(results).axes[0].lines:
            if line.get_label() in looks and not str(line.get_label()).startswith("_"):
                assert looks[line.get_label()] == (line.get_color(), line.get_marker())


def test_modes_differ_in_a_grey_print() -> None:
    speculative, plain = (
        0.2126 * r + 0.7152 * g + 0.0722 * b
        for r, g, b in (to_rgb(ramp.MODE_COLOUR[m]) for m in ("speculative", "plain"))
    )
    assert speculative - plain > 0.1


def test_timeline_shades_modes_and_counts_switches(trace: pd.DataFrame) -> None:
    figure = ramp.mode_timeline(trace, 4, "v1", ABOUT)
    top, bottom = figure.axes
    assert _series(top)["batch size"][1] == trace["batch_size"].tolist()
    assert _series(top)["threshold 4"][1] == [4, 4]
    colours = [patch.get_facecolor()[:3] for patch in top.patches]
    speculative, plain = (to_rgb(ramp.MODE_COLOUR[mode]) for mode in ("speculative", "plain"))
    assert colours == [speculative, plain, speculative, plain, speculative]
    assert [round(patch.get_x(), 6) for patch in top.patches] == [0.0, 1.0, 2.0, 3.0, 4.0]  # type: ignore[attr-defined]
    rates = _series(bottom)["output tok/s"][1]
    assert rates == [trace["tokens"][i : i + 10].sum() for i in (0, 10, 20, 30)]
    assert "50 decode steps, 4 switches" in figure.get_supxlabel()
    assert "SGLang 0.5.12" in figure.get_supxlabel()


def test_steps_around_switches(trace: pd.DataFrame) -> None:
    around = around_switches(trace, steps=5)
    before, after = (around[around["side"] == side] for side in ("before off", "after on"))
    assert sorted(set(before["step"])) == [-5, -4, -3, -2, -1]
    assert sorted(set(after["step"])) == [0, 1, 2, 3, 4]
    assert before["switch"].nunique() == after["switch"].nunique() == 2
    assert before["accept_length"].tolist() == [3, 2, 3, 2, 3] * 2
    assert after["accept_length"].tolist() == [2, 3, 2, 3, 2] * 2


def test_steps_of_requests_that_had_finished_do_not_count(trace: pd.DataFrame) -> None:
    """With overlap a finished request is in one more step: its accept length is not 0, it has none."""
    late = trace.copy()
    late.loc[5, "tokens"] = 0
    assert around_switches(late)["accept_length"].min() == 2
    assert len(around_switches(late)) == len(around_switches(trace)) - 1
    late["requests"] = late["batch_size"]
    late.loc[7, ["batch_size", "tokens", "requests"]] = [2, 3, 1]  # one of the two had finished
    assert around_switches(late)["accept_length"].max() == 3
    assert 1.5 not in set(around_switches(late)["accept_length"])
    late.loc[7, "requests"] = 2
    assert 1.5 in set(around_switches(late)["accept_length"])


def test_around_switches_of_a_server_that_never_switched(trace: pd.DataFrame) -> None:
    assert around_switches(trace[:10]).empty
    assert around_switches(trace[10:20]).empty


def test_recovery_figure_shows_both_sides(trace: pd.DataFrame) -> None:
    figure = ramp.accept_length_around_switches(around_switches(trace, 5), "v1", ABOUT)
    left, right = figure.axes
    assert left.get_title(loc="left").startswith("Before switching off: 2.60 ± 0.3")
    assert left.get_title(loc="left").endswith("(2 switches)")
    assert right.get_title(loc="left").startswith("After coming back: 2.40 ± 0.3")
    assert _series(right)["mean before switching off"][1] == pytest.approx([2.6, 2.6])


def test_a_run_without_workers_is_refused(results: pd.DataFrame) -> None:
    with pytest.raises(ValueError, match="no speculating worker"):
        sweep.throughput(results[results["worker"] == "none"])


def test_saved_twice_a_figure_is_the_same_file(results: pd.DataFrame, tmp_path: Path) -> None:
    first = save_figure(sweep.throughput(results), tmp_path / "a", "throughput")
    second = save_figure(sweep.throughput(results), tmp_path / "b", "throughput")
    assert [path.name for path in first] == ["throughput.png", "throughput.svg"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_a_picture_in_a_notebook_says_its_numbers(results: pd.DataFrame, tmp_path: Path) -> None:
    bundle = show(sweep.throughput(results), tmp_path, "throughput")._repr_mimebundle_()
    assert (tmp_path / "figures" / "throughput.svg").exists()
    assert set(bundle) == {"image/png", "text/plain"}
    mean = cell_statistics(results)["estimate"].iloc[0]
    assert f"baseline: (1, {mean:.4g})" in bundle["text/plain"]
    assert bundle["text/plain"] == figure_data(sweep.throughput(results))


def test_no_figures_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    show_each({})
    assert "no ramp" in capsys.readouterr().out


def test_a_trace_being_written_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = '{"step": 1, "t_s": 0.5, "batch_size": 2, "mode": "plain", "tokens": 2, "duration_us": 10}\n'
    path.write_text(line + line + line[:20])
    assert len(read_trace(path)) == 2
    assert len(read_trace(path, begin=len(line))) == 1
    path.write_text("not a step\n")
    with pytest.raises(ValueError, match="no step trace"):
        read_trace(path)
