"""The figures of one capture that every form of the report shows: in the terminal, as JSON, on the page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_profiler_conf.tools.report.captures import Capture
from verl_profiler_conf.tools.trace.figures import Analysis, Iteration, Spread

if TYPE_CHECKING:
    from verl_profiler_conf.tools.trace.compare import RankComparison

FEWEST_FOR_TREND = 20
"""With fewer decode iterations, the first and the last quarter mean nothing."""


@dataclass(frozen=True)
class PhaseTime:
    """Iterations of one kind. Times in microseconds; `device_us` is the median device time, None without a device."""

    phase: str
    wall: Spread
    period: Spread | None
    busy: Spread | None


@dataclass(frozen=True)
class Trend:
    """The median times of the first and of the last decode iterations of a window, in microseconds."""

    first_token: int
    last_token: int
    first_us: float
    last_us: float


PHASES = (("prefill", "prefill"), ("mixed", "prefill and decode"), ("decode", "decode"), (None, "unknown"))


def phase_times(analysis: Analysis) -> list[PhaseTime]:
    """All iterations, then those of each phase, where there is more than one phase or it is known."""
    found = [_phase("all", analysis.iterations)]
    for phase, label in PHASES:
        of_phase = [i for i in analysis.iterations if i.phase == phase]
        if of_phase and (phase is not None or len(of_phase) < len(analysis.iterations)):
            found.append(_phase(label, of_phase))
    return [each for each in found if each is not None]


def _phase(label: str, iterations: Sequence[Iteration]) -> PhaseTime | None:
    wall = Spread.of(i.wall_us for i in iterations)
    if wall is None:
        return None
    period = Spread.of(i.period_us for i in iterations if i.period_us is not None)
    return PhaseTime(label, wall, period, Spread.of(i.device.busy_us for i in iterations if i.device is not None))


def trend(analysis: Analysis) -> Trend | None:
    """The first quarter of the decode iterations against the last; None where there are too few."""
    decode = [i for i in analysis.phase("decode") if i.lo is not None]
    quarter = len(decode) // 4
    if len(decode) < FEWEST_FOR_TREND:
        return None
    first, last = decode[:quarter], decode[-quarter:]
    return Trend(
        decode[0].lo or 0,
        decode[-1].lo or 0,
        statistics.median(i.wall_us for i in first),
        statistics.median(i.wall_us for i in last),
    )


def sentences(analysis: Analysis) -> list[str]:
    """What the figures say of the device, of communication, and of the window's begin and end."""
    lines = []
    device = analysis.device
    if device is None:
        lines.append("No device work in it: all times are those of the host.")
    else:
        bound = "Launch-bound: the device waits for the host" if device.launch_bound else "Not launch-bound"
        gaps = "1 gap" if device.gaps == 1 else f"{device.gaps:,} gaps"
        idle = (
            f", idle {ms(device.idle_us)} ms in {gaps} (the longest {ms(device.longest_gap_us)} ms);"
            f" {percent(_share(device.launch_wait_us, device.idle_us))} of the idle time waits for a launch. {bound}"
        )
        whole = ms(device.busy_us + device.idle_us)
        lines.append(f"Device: busy {percent(device.busy_share)} of {whole} ms{idle if device.idle_us else ''}.")
        hidden = device.hidden_share
        if hidden is not None:
            lines.append(
                f"Communication: {ms(device.communication_us)} ms,"
                f" {percent(_share(device.communication_us, device.busy_us))} of the busy time;"
                f" {percent(hidden)} of it is hidden under computation."
            )
    found = trend(analysis)
    if found is not None:
        change = found.last_us / found.first_us - 1 if found.first_us else 0.0
        lines.append(
            f"Decode from token {found.first_token} to {found.last_token}: {ms(found.first_us)} ms an iteration in the"
            f" first quarter, {ms(found.last_us)} ms in the last ({change:+.1%})."
        )
    return lines


@dataclass(frozen=True)
class Group:
    """The ranks of one capture beside each other."""

    title: str
    comparison: RankComparison


def groups(captures: Sequence[Capture]) -> list[Group]:
    """The captures that several ranks made together, compared."""
    by_capture: dict[tuple[object, ...], list[Analysis]] = {}
    titles: dict[tuple[object, ...], str] = {}
    for capture in captures:
        manifest, analysis = capture.manifest, capture.analysis
        if analysis is None:
            continue
        if manifest is None:
            key: tuple[object, ...] = (None, analysis.world_size, analysis.source)
            if analysis.rank is None:
                continue
        else:
            place = (manifest.run_id, manifest.engine, manifest.replica, manifest.step, manifest.label)
            key = (*place, manifest.window, manifest.part)
        by_capture.setdefault(key, []).append(analysis)
        titles.setdefault(key, capture.title.rpartition(", rank")[0] or "these traces")
    found = []
    for key, analyses in by_capture.items():
        if len({analysis.rank for analysis in analyses}) > 1 or (len(analyses) > 1 and key[0] is not None):
            from verl_profiler_conf.tools.trace.compare import compare_ranks

            comparison = compare_ranks(analyses)
            if comparison.iterations:
                found.append(Group(titles[key], comparison))
    return found


def ms(microseconds: float | None) -> str:
    """Milliseconds with as many digits as make sense; empty for None."""
    if microseconds is None:
        return ""
    value = microseconds / 1e3
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 0.1 or not value else 4
    return f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    """A share of 0 to 1 as percent; empty for None."""
    return "" if share is None else f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
