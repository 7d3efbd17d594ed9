"""Compares analyses: the ranks of a capture, or two captures or runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl_profiler_conf.tools.trace.figures import Analysis, Iteration, Spread
from verl_profiler_conf.tools.trace.iterations import Phase


@dataclass(frozen=True, slots=True)
class RankFigures:
    """One rank beside the others, over the iterations that all of them ran.

    Attributes:
        rank: of the trace; else its place in the list.
        path: the trace.
        wall_us: median time of an iteration on the host.
        busy_share: of its device, 0 to 1; None without device work.
        compute_us: median time that an iteration computes on the device.
        communication_us: median time that an iteration communicates on the device.
        waits_us: how long this rank waits in collectives for the last rank, in the median. It is its communication time
            beyond that of the rank that communicates least in the same iteration.
        last_share: share of the iterations in which this rank comes last and the others wait for it. That is the rank
            that communicates least; without communication, the one whose time on the host is the longest.
    """

    rank: int
    path: str
    wall_us: float
    busy_share: float | None
    compute_us: float
    communication_us: float
    waits_us: float
    last_share: float


@dataclass(frozen=True, slots=True)
class RankComparison:
    """The ranks of a capture beside each other.

    Attributes:
        iterations: how many all of them ran; 0: nothing can be compared.
        ranks: in order.
        slowest: the rank that the others wait for most; None where none comes last in more than half of the iterations.
    """

    iterations: int
    ranks: tuple[RankFigures, ...]
    slowest: int | None


def compare_ranks(analyses: Sequence[Analysis]) -> RankComparison:
    """Ranks beside each other. They have to be of one capture, as `align.check_one_capture` checks."""
    tables = [{(i.number, i.lo, i.hi): i for i in analysis.iterations} for analysis in analyses]
    shared = [key for key in tables[0] if all(key in table for table in tables[1:])] if tables else []
    if not shared:
        return RankComparison(0, (), None)
    rows = [[table[key] for key in shared] for table in tables]
    communication = [[_of(i, lambda d: d.communication_us) for i in row] for row in rows]
    by_wall = not any(map(any, communication))
    measure = [[-i.wall_us for i in row] for row in rows] if by_wall else communication
    least = [min(column) for column in zip(*measure, strict=True)]
    figures = []
    for place, (analysis, row) in enumerate(zip(analyses, rows, strict=True)):
        waits = [0.0 if by_wall else own - low for own, low in zip(communication[place], least, strict=True)]
        last = [own == low for own, low in zip(measure[place], least, strict=True)]
        figures.append(
            RankFigures(
                rank=place if analysis.rank is None else analysis.rank,
                path=analysis.path,
                wall_us=statistics.median(i.wall_us for i in row),
                busy_share=analysis.device.busy_share if analysis.device else None,
                compute_us=statistics.median(_of(i, lambda d: d.compute_us) for i in row),
                communication_us=statistics.median(communication[place]),
                waits_us=statistics.median(waits),
                last_share=sum(last) / len(last),
            )
        )
    figures.sort(key=lambda figure: figure.rank)
    slowest = max(figures, key=lambda figure: figure.last_share)
    stands_out = len(figures) > 1 and slowest.last_share > 0.5
    return RankComparison(len(shared), tuple(figures), slowest.rank if stands_out else None)


def _of(iteration: Iteration, measure: Callable[..., float]) -> float:
    return measure(iteration.device) if iteration.device is not None else 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """A figure before and after. None where one side does not have it.

    Attributes:
        name: of the figure, kernel or operator.
        before: in `unit`.
        after: in `unit`.
        unit: `us`, `us/iteration`, `calls/iteration`, `share`, ...
    """

    name: str
    before: float | None
    after: float | None
    unit: str

    @property
    def difference(self) -> float:
        """After less before; what is not there counts as nothing."""
        return (self.after or 0.0) - (self.before or 0.0)

    @property
    def ratio(self) -> float | None:
        """After over before; None where there is nothing to divide by."""
        return self.after / self.before if self.before and self.after is not None else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two analyses side by side; kernels and operators with what changed most first."""

    per_iteration: bool
    figures: tuple[Change, ...]
    kernels: tuple[Change, ...]
    operators: tuple[Change, ...]


def compare(before: Analysis, after: Analysis, top: int = 20) -> Comparison:
    """Two captures or two runs side by side.

    Where both have iterations, times of kernels and operators are those of one iteration in the mean, so that windows
    of different lengths compare; else they are of the whole trace. A name beyond those that an analysis lists counts
    as not there.
    """
    per_iteration = bool(before.iterations and after.iterations)
    one, two = (len(a.iterations) if per_iteration else 1 for a in (before, after))
    unit = "us/iteration" if per_iteration else "us"
    kernels = _changes(
        {k.name: k.total_us / one for k in before.kernels}, {k.name: k.total_us / two for k in after.kernels}, unit
    )
    operators = _changes(
        {o.name: o.self_us / one for o in before.operators if not o.is_annotation},
        {o.name: o.self_us / two for o in after.operators if not o.is_annotation},
        unit,
    )
    return Comparison(per_iteration, tuple(_figures(before, after, one, two)), kernels[:top], operators[:top])


def _figures(before: Analysis, after: Analysis, one: int, two: int) -> list[Change]:
    found = []
    phases: tuple[tuple[str, tuple[Phase, ...]], ...] = (("prefill ", ("prefill", "mixed")), ("decode ", ("decode",)))
    for label, chosen in (("", ()), *phases):
        medians = []
        for analysis in (before, after):
            spread = Spread.of(i.wall_us for i in (analysis.phase(*chosen) if chosen else analysis.iterations))
            medians.append(spread.median if spread else None)
        found.append(Change(f"{label}iteration, median", medians[0], medians[1], "us"))
    measures: tuple[tuple[str, Callable[..., float | None], str, bool], ...] = (
        ("device busy", lambda d: d.busy_share, "share", False),
        ("computing", lambda d: d.compute_us, "us", True),
        ("communicating", lambda d: d.communication_us, "us", True),
        ("communicating, not hidden", lambda d: d.exposed_us, "us", True),
        ("copying", lambda d: d.copy_us, "us", True),
        ("idle", lambda d: d.idle_us, "us", True),
        ("idle, waiting for a launch", lambda d: d.launch_wait_us, "us", True),
        ("kernels", lambda d: d.kernels, "kernels", True),
    )
    for label, measure, unit, is_sum in measures:
        values = []
        for analysis, count in ((before, one), (after, two)):
            value = measure(analysis.device) if analysis.device is not None else None
            values.append(value / count if value is not None and is_sum else value)
        suffix = "/iteration" if is_sum and before.iterations and after.iterations else ""
        found.append(Change(label, values[0], values[1], unit + suffix))
    return [change for change in found if change.before is not None or change.after is not None]


def _changes(before: dict[str, float], after: dict[str, float], unit: str) -> tuple[Change, ...]:
    names = list(dict.fromkeys([*before, *after]))
    changes = [Change(name, before.get(name), after.get(name), unit) for name in names]
    return tuple(sorted(changes, key=lambda change: -abs(change.difference)))
