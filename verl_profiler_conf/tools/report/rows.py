"""One row an iteration, for spreadsheets and pandas: `--csv`."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from verl_profiler_conf.tools.report.captures import Capture

_PLACE = ("trace", "engine", "step", "replica", "label", "rank", "window_start", "window_end", "part")
_ITERATION = (
    *("number", "lo", "hi", "requests", "prefills", "decodes", "phase"),
    *("begin_us", "wall_us", "period_us"),
)
_DEVICE = (
    *("kernels", "copies", "work_us", "busy_us", "idle_us", "compute_us", "communication_us", "exposed_us"),
    *("copy_us", "launch_wait_us", "queued_us"),
)

COLUMNS = (*_PLACE, *_ITERATION, *_DEVICE)
"""Times are microseconds. `lo` to `hi`, exclusive, are the response tokens of the tracked request. Empty: not known."""


def csv_text(captures: Sequence[Capture]) -> str:
    """All iterations of all captures, one line each, after a line with the names of the columns."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for capture in captures:
        writer.writerows(_rows(capture))
    return text.getvalue()


def _rows(capture: Capture) -> Iterator[list[object]]:
    manifest = capture.manifest
    place: list[object] = [capture.path.name, *[None] * (len(_PLACE) - 1)]
    place[_PLACE.index("rank")] = capture.rank
    if manifest is not None:
        window = manifest.window
        where = (manifest.engine, manifest.step, manifest.replica, manifest.label, capture.rank)
        place = [capture.path.name, *where, window.start, window.end, manifest.part]
    for iteration in capture.analysis.iterations if capture.analysis is not None else ():
        device = iteration.device
        yield [
            *place,
            *(_cell(getattr(iteration, name)) for name in _ITERATION),
            *(None if device is None else _cell(getattr(device, name)) for name in _DEVICE),
        ]


def _cell(value: object) -> object:
    return round(value, 3) if isinstance(value, float) else value
