"""The report as plain data: `--json`. docs/report.md says what the fields mean.

`SCHEMA` rises when a field changes its meaning or goes away; new fields alone do not raise it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from verl_profiler_conf.tools.report.account import AskedWindow
from verl_profiler_conf.tools.report.against import Pair
from verl_profiler_conf.tools.report.captures import Capture, Reading
from verl_profiler_conf.tools.report.summary import groups, phase_times, trend
from verl_profiler_conf.tools.trace.compare import Change
from verl_profiler_conf.tools.trace.figures import Analysis, DeviceTime

SCHEMA = 1


def report_data(reading: Reading, asked: Sequence[AskedWindow], pairs: Sequence[Pair] = ()) -> dict[str, Any]:
    """Everything that a report says. Times are microseconds, shares 0 to 1, token ranges half-open."""
    return {
        "schema": SCHEMA,
        "complete": not reading.problems and not any(each.missing for each in asked),
        "problems": list(reading.problems),
        "hint": reading.hint,
        "asked": [_asked(each) for each in asked],
        "captures": [_capture(capture) for capture in reading.captures],
        "ranks": [{"capture": group.title, **asdict(group.comparison)} for group in groups(reading.captures)],
        "against": [_pair(pair) for pair in pairs],
    }


def _asked(each: AskedWindow) -> dict[str, Any]:
    data = asdict(each)
    data["window"] = [each.window.start, each.window.end]
    return data


def _capture(capture: Capture) -> dict[str, Any]:
    manifest, analysis, counts = capture.manifest, capture.analysis, capture.counts
    data: dict[str, Any] = {
        "path": str(capture.path),
        "title": capture.title,
        "rank": capture.rank,
        "problems": list(capture.problems),
        "remarks": list(capture.remarks),
        "manifest": None,
        "counts": None,
        "figures": None,
    }
    if manifest is not None:
        data["manifest"] = {**asdict(manifest), "window": [manifest.window.start, manifest.window.end]}
    if counts is not None:
        data["counts"] = {"events": counts.events, "operators": counts.operators, "kernels": counts.kernels}
    if analysis is not None:
        data["figures"] = _figures(analysis)
    return data


def _figures(analysis: Analysis) -> dict[str, Any]:
    data = analysis.as_data()
    for name in ("path", "strip", "strip_iteration", "notes"):
        del data[name]
    data["device"] = _device(analysis.device)
    data["outside"] = _device(analysis.outside)
    for iteration, entry in zip(analysis.iterations, data["iterations"], strict=True):
        entry["device"] = _device(iteration.device)
    found = trend(analysis)
    data["phases"] = [asdict(each) for each in phase_times(analysis)]
    data["trend"] = None if found is None else asdict(found)
    return data


def _device(device: DeviceTime | None) -> dict[str, Any] | None:
    if device is None:
        return None
    shares = {"busy_share": device.busy_share, "hidden_share": device.hidden_share, "launch_bound": device.launch_bound}
    return {**asdict(device), **shares}


def _pair(pair: Pair) -> dict[str, Any]:
    return {
        "before": str(pair.before.path),
        "after": str(pair.after.path),
        "per_iteration": pair.comparison.per_iteration,
        "figures": [_change(change) for change in pair.comparison.figures],
        "kernels": [_change(change) for change in pair.comparison.kernels],
        "operators": [_change(change) for change in pair.comparison.operators],
    }


def _change(change: Change) -> dict[str, Any]:
    return {**asdict(change), "difference": change.difference, "ratio": change.ratio}
