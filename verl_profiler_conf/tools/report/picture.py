"""The plots as one picture: `--png`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_profiler_conf.capture.files import write_atomically
from verl_profiler_conf.tools.report.captures import Capture
from verl_profiler_conf.tools.report.plots import STACK, Plots, plots_of
from verl_profiler_conf.tools.trace.errors import ExtraMissingError, TraceError

MOST_CAPTURES = 4
"""Captures in one picture, below each other."""

COLOURS = {
    "compute": "#2f74c0",
    "communication": "#d9822b",
    "copy": "#3f9c78",
    "wait": "#d1606b",
    "idle": "#c3c9d2",
    "prefill": "#8a5cc2",
    "mixed": "#b26aa6",
    "decode": "#2f74c0",
    "unknown": "#2f74c0",
    "host": "#2f74c0",
    "busy": "#d9822b",
}

_LEGEND: dict[str, Any] = {
    "frameon": False,
    "fontsize": "small",
    "ncols": 3,
    "loc": "upper center",
    "bbox_to_anchor": (0.5, -0.14),
}
"""The legend stands below the plot, where it hides nothing."""


def write_picture(out: Path, captures: Sequence[Capture]) -> None:
    """Write the plots of the captures as a PNG.

    Raises:
        ExtraMissingError: matplotlib is not installed.
        TraceError: no capture has figures to draw.
        OSError: the picture cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ExtraMissingError("matplotlib", "--png") from None
    shown = [(capture, plots_of(capture.analysis)) for capture in captures if capture.analysis is not None]
    shown = shown[:MOST_CAPTURES]
    if not shown:
        raise TraceError("--png: no trace that could be drawn")
    # a figure without a backend, so that the backend of the job's own plots stays as it is
    whole = Figure(figsize=(15, 9 * len(shown)), dpi=110, layout="constrained")
    for part, (capture, plots) in zip(whole.subfigures(len(shown), 1, squeeze=False)[:, 0], shown, strict=True):
        part.suptitle(_safe(capture.title), x=0.01, ha="left", fontweight="bold")
        _draw(part, plots)
    data = io.BytesIO()
    whole.savefig(data, format="png")
    write_atomically(out, data.getvalue(), replace=True)


def _draw(part: Any, plots: Plots) -> None:
    upper, lower = ["time", "stack" if plots.stack else "time"], ["kernels", "strip" if plots.strip else "kernels"]
    axes = part.subplot_mosaic([upper, lower] if plots.x else [lower])
    for axis in axes.values():
        axis.spines[["top", "right"]].set_visible(False)
    if plots.x:
        _time(axes["time"], plots)
    _kernels(axes["kernels"], plots)
    if plots.stack:
        _stack(axes["stack"], plots)
    if plots.strip:
        _strip(axes["strip"], plots)


def _time(axis: Any, plots: Plots) -> None:
    for phase, values in plots.wall.items():
        known = [float("nan") if value is None else value for value in values]
        axis.plot(
            plots.x,
            known,
            ".-",
            color=COLOURS[phase],
            linewidth=1,
            label="iteration" if phase == "unknown" else f"{phase}, host",
        )
    if plots.busy:
        axis.plot(plots.x, plots.busy, ".-", color=COLOURS["busy"], linewidth=1, label="device busy")
    axis.set(title="time of an iteration", xlabel=plots.x_title, ylabel="ms")
    axis.set_ylim(bottom=0)
    axis.locator_params(axis="x", integer=True)
    axis.grid(alpha=0.3)
    axis.legend(**_LEGEND)


def _stack(axis: Any, plots: Plots) -> None:
    positions = range(len(plots.x))
    below = [0.0] * len(plots.x)
    for name, label in STACK:
        values = plots.stack[label]
        axis.bar(positions, values, 0.9, bottom=below, color=COLOURS[name], label=label)
        below = [low + value for low, value in zip(below, values, strict=True)]
    step = max(1, len(plots.x) // 8)
    axis.set_xticks(list(positions)[::step], [str(x) for x in plots.x[::step]])
    axis.set(title="device time of each iteration", xlabel=plots.x_title, ylabel="ms")
    axis.legend(**_LEGEND)


def _kernels(axis: Any, plots: Plots) -> None:
    rows = plots.kernels[::-1]
    places = list(range(len(rows)))
    bars = axis.barh(places, [100 * share for _, share, _ in rows], color=[COLOURS[kind] for _, _, kind in rows])
    axis.bar_label(bars, fmt="%.1f %%", padding=3)
    axis.set_yticks(places, [_safe(name[:42]) for name, _, _ in rows])
    axis.set(title=plots.kernels_title, xlabel="%")
    axis.margins(x=0.15)


def _strip(axis: Any, plots: Plots) -> None:
    strip = plots.strip
    if strip is None:
        return
    for kind in dict.fromkeys(piece[2] for piece in strip.pieces):
        for lane in range(len(strip.lanes)):
            spans = [(begin, dur) for at, _, of, begin, dur in strip.pieces if at == lane and of == kind]
            axis.broken_barh(spans, (lane - 0.35, 0.7), color=COLOURS[kind])
        axis.barh([0], [0], color=COLOURS[kind], label=kind)
    axis.set_yticks(range(len(strip.lanes)), [_safe(lane) for lane in strip.lanes])
    axis.invert_yaxis()
    axis.set(title=strip.title, xlabel="microseconds")
    axis.legend(**_LEGEND)


def _safe(text: str) -> str:
    """The text for matplotlib, which reads what is between two dollar signs as a formula."""
    return text.replace("$", r"\$")
