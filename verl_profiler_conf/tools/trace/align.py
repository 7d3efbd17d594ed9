"""The clocks of several ranks: whether their traces are of one capture, and by how much each clock has to be moved."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verl_profiler_conf.tools.trace.capture import RankFile
from verl_profiler_conf.tools.trace.errors import TraceError, printable
from verl_profiler_conf.tools.trace.iterations import IterationRange


@dataclass
class RankTrace:
    """What the first reading finds of one rank.

    Attributes:
        file: the trace, with its manifest.
        rank: None where it is not known.
        world_size: None where the trace does not say it.
        base_ns: what its clock counts from; 0 where the trace does not say it.
        first_us: when its first event began, on its own clock.
        last_us: when its last event ended.
        iterations: in order.
        processes: with events of their own; each with the name, labels and sort index that the trace gives it.
        members: raw JSON of what stands beside the events.
        is_merged: it is itself a merged trace.
    """

    file: RankFile
    rank: int | None = None
    world_size: int | None = None
    base_ns: int = 0
    first_us: float = float("inf")
    last_us: float = float("-inf")
    iterations: list[IterationRange] = field(default_factory=list)
    processes: dict[object, Process] = field(default_factory=dict)
    members: dict[str, bytes] = field(default_factory=dict)
    is_merged: bool = False

    @property
    def path(self) -> Path:
        return self.file.path


@dataclass
class Process:
    """A process of a trace, or a device, which a trace shows as one."""

    name: str = ""
    labels: str = ""
    sort_index: float = 0.0


@dataclass(frozen=True)
class Alignment:
    """How a rank's clock is moved.

    Attributes:
        shift_ns: to be added to its times.
        by: `clock`: the clocks agree, or say what they count from; `iterations`: they disagree, and the iterations that
            the ranks ran together were laid over one another.
    """

    shift_ns: int
    by: str


def check_one_capture(ranks: Sequence[RankTrace]) -> None:
    """Refuse what is not of one capture.

    Raises:
        TraceError: one line that names two files, and what sets them apart.
    """
    if len(ranks) < 2:
        raise TraceError(
            f"{printable(ranks[0].path) if ranks else 'nothing'}: one trace alone has nothing to merge with"
        )
    seen: dict[int, RankTrace] = {}
    for trace in ranks:
        if trace.is_merged:
            raise TraceError(f"{printable(trace.path)}: merged already")
        if not trace.first_us < float("inf"):
            raise TraceError(f"{printable(trace.path)}: no events in it that have a time")
        if trace.rank is None:
            raise TraceError(
                f"{printable(trace.path)}: neither its manifest nor the trace nor its name says which rank it is"
            )
        if trace.rank in seen:
            raise _not_one_capture(seen[trace.rank], trace, f"both are of rank {trace.rank}")
        seen[trace.rank] = trace
    first = ranks[0]
    for trace in ranks[1:]:
        _check_manifests(first, trace)
        if None not in (first.world_size, trace.world_size) and first.world_size != trace.world_size:
            raise _not_one_capture(first, trace, f"their world sizes are {first.world_size} and {trace.world_size}")
        if bool(first.iterations) != bool(trace.iterations):
            raise _not_one_capture(first, trace, "only one of them has iterations")
        if first.iterations and not _shared(first, trace):
            raise _not_one_capture(first, trace, "they have no iteration in common")
        is_one_run = first.file.manifest is not None and trace.file.manifest is not None
        if not (is_one_run and first.iterations) and not _overlap(first, trace):
            raise _not_one_capture(first, trace, "they are of different times")


def _check_manifests(first: RankTrace, other: RankTrace) -> None:
    a, b = first.file.manifest, other.file.manifest
    if a is None or b is None:
        return
    for what, one, two in (
        ("run", a.run_id, b.run_id),
        ("engine", a.engine, b.engine),
        ("window", str(a.window), str(b.window)),
        ("part", a.part, b.part),
        ("label", a.label, b.label),
    ):
        if one != two:
            raise _not_one_capture(first, other, f"{what} {one} and {what} {two}")


def align(ranks: Sequence[RankTrace]) -> list[Alignment]:
    """By how much each clock has to be moved, so that all of them count from the earliest base.

    The clocks of one machine agree, and a rank that is late must stay visible. So iterations move a clock only where it
    plainly disagrees: where they begin, in the median, more than half the time of an iteration away from those of the
    first rank.
    """
    bases = [trace.base_ns for trace in ranks]
    shifts = [base - min(bases) for base in bases] if all(bases) else [0 for _ in ranks]
    found = [Alignment(shifts[0], "clock")]
    for trace, shift in zip(ranks[1:], shifts[1:], strict=True):
        pairs = _shared(ranks[0], trace)
        if not pairs:
            found.append(Alignment(shift, "clock"))
            continue
        apart = [round((two.begin_us - one.begin_us) * 1e3) + shift - shifts[0] for one, two in pairs]
        skew = round(statistics.median(apart))
        usual = statistics.median(one.end_us - one.begin_us for one, _ in pairs) * 1e3
        if abs(skew) > usual / 2:
            found.append(Alignment(shift - skew, "iterations"))
        else:
            found.append(Alignment(shift, "clock"))
    return found


def _shared(one: RankTrace, two: RankTrace) -> list[tuple[IterationRange, IterationRange]]:
    """The iterations that both have: by number where the ranges name it, else by place if there are as many."""
    if not one.iterations or not two.iterations:
        return []
    if one.iterations[0].name.source != two.iterations[0].name.source:
        return []
    if one.iterations[0].name.number is None:
        same = len(one.iterations) == len(two.iterations)
        return list(zip(one.iterations, two.iterations, strict=True)) if same else []
    others = {(r.name.number, r.name.lo, r.name.hi): r for r in two.iterations}
    keyed = [(r, others.get((r.name.number, r.name.lo, r.name.hi))) for r in one.iterations]
    return [(first, second) for first, second in keyed if second is not None]


def _overlap(one: RankTrace, two: RankTrace) -> bool:
    moved = (two.base_ns - one.base_ns) / 1e3 if one.base_ns and two.base_ns else 0.0
    return one.first_us < two.last_us + moved and two.first_us + moved < one.last_us


def _not_one_capture(one: RankTrace, two: RankTrace, why: str) -> TraceError:
    return TraceError(f"{printable(one.path)} and {printable(two.path.name)} are not of one capture: {printable(why)}")
