"""Writes a part of a trace as a trace of its own, in two readings: one finds what belongs to it, the other copies it.

A slice holds what the host did in the span of time, and the device work that was launched in it, whenever that ran. It
holds flow arrows that have both ends in it, and all names of processes and threads. Events are copied as they stand.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_profiler_conf.tools.trace.arrays import np
from verl_profiler_conf.tools.trace.categories import DEVICE
from verl_profiler_conf.tools.trace.errors import MERGED, TraceError, printable
from verl_profiler_conf.tools.trace.events import Event
from verl_profiler_conf.tools.trace.iterations import IterationRange, choose
from verl_profiler_conf.tools.trace.raw import RawDecoder, RawPiece
from verl_profiler_conf.tools.trace.reader import TraceReader
from verl_profiler_conf.tools.trace.select import Selection, Window, windows
from verl_profiler_conf.tools.trace.slice_index import (
    TO_DEVICE,
    WAITS,
    Place,
    SliceIndex,
    arrow_key,
    is_ascend_work,
    nanoseconds,
)
from verl_profiler_conf.tools.trace.source import Progress
from verl_profiler_conf.tools.trace.spool import KEEP_ROWS, Spool
from verl_profiler_conf.tools.trace.writing import TraceWriter

MEMBER = "verl_profiler_slice"
"""Member of a slice, beside its events: the file and the part of it that it is made from."""


@dataclass(frozen=True)
class Sliced:
    """What was written.

    Attributes:
        path: the slice.
        events: how many events it holds.
        of_events: how many the whole trace holds.
        iterations: how many iterations it holds; 0 for a slice by time of a trace without any.
        windows: the spans of the host's time, in microseconds after the first event of the trace.
    """

    path: Path
    events: int
    of_events: int
    iterations: int
    windows: tuple[Window, ...]


def slice_trace(
    path: Path,
    out: Path,
    selection: Selection,
    *,
    replace: bool = False,
    progress: Progress | None = None,
    keep_rows: int = KEEP_ROWS,
) -> Sliced:
    """Write a part of a trace as a trace of its own, whole or not at all.

    Args:
        path: a `.json` or `.json.gz`.
        out: where to; compressed where the name ends with `.gz`.
        selection: which part.
        replace: write over a file that is there.
        progress: called with how far each of the two readings is.
        keep_rows: launches and arrows kept in memory; more go through a temporary file.

    Raises:
        TraceError: the trace cannot be read, or the selection means nothing in it; one line.
        FileExistsError: `out` exists and `replace` is false.
        OSError: `out` cannot be written.
    """
    if out.exists() and not replace:
        raise FileExistsError(f"{out} exists already")
    was_enabled = gc.isenabled()
    gc.disable()  # a piece has no cycles: looking for them would cost a fifth of the time
    try:
        index = SliceIndex(keep_rows)
        reader = TraceReader(path, progress=progress)
        for piece in reader.pieces(RawDecoder()):
            index.add(piece.events, reader.piece_at, len(piece.data) - 2)
        index.flush()
        if MERGED in reader.members:
            raise TraceError(f"{printable(path)}: several ranks in one trace: slice those of the ranks, then merge")
        if not index.first_us < float("inf"):
            raise TraceError(f"{printable(path)}: no events in it that have a time")
        ranges = choose(index.ranges, selection.source)
        try:
            found = windows(selection, ranges, index.first_us)
        except TraceError as error:
            raise TraceError(f"{printable(path)}: {error}") from None
        return _copy(reader, out, found, ranges, index, selection, replace=replace)
    finally:
        if was_enabled:
            gc.enable()


def _copy(
    reader: TraceReader,
    out: Path,
    found: list[Window],
    ranges: list[IterationRange],
    index: SliceIndex,
    selection: Selection,
    *,
    replace: bool,
) -> Sliced:
    chooser = _Chooser(found, index)
    inside = tuple((begin - index.first_us, end - index.first_us) for begin, end in found)
    iterations = sum(1 for r in ranges if any(begin <= r.begin_us < end for begin, end in found))
    has_tokens = selection.start is not None or selection.end is not None
    added = {
        "of": reader.path.name,
        "iterations": iterations,
        "time_us": inside,
        "tokens": [selection.start or 0, selection.end] if has_tokens else None,
    }
    decoder = RawDecoder()
    places = [(place.at, place.size) for place in index.places if chooser.may_hold(place)]
    with TraceWriter(out, dict(reader.members), {MEMBER: added}, is_array=reader.is_array, replace=replace) as writer:
        for data in reader.again(places):
            try:
                piece = decoder.fast(data)
            except ValueError:
                piece = decoder.slow(data)
            keep = chooser.keep(piece)
            if keep:
                texts = piece.texts()
                writer.write([texts[at] for at in keep])
    return Sliced(out, writer.events, index.events, iterations, inside)


class _Chooser:
    """Which events of a piece belong to the slice."""

    def __init__(self, found: list[Window], index: SliceIndex) -> None:
        self._windows = found
        self._begin, self._end = found[0][0], found[-1][1]
        self._is_one = len(found) == 1
        self._has_launches = index.launches.rows > 0
        bounds = [(int(nanoseconds(begin)), int(nanoseconds(end))) for begin, end in found]
        parts = [index.launches.between(begin, end)["join"] for begin, end in bounds]
        self._joins = np.unique(np.concatenate(parts))
        self._externals = {external for at, external in index.externals if self._is_inside(at)}
        self._arrows = _whole_arrows(index.arrows, bounds)

    def may_hold(self, place: Place) -> bool:
        """Whether the piece can hold anything of the slice."""
        if place.always or (place.first_us < self._end and place.last_us >= self._begin):
            return True
        if not self._has_launches:
            return place.low <= place.high
        return any(
            len(known) and int(np.searchsorted(known, place.low)) < int(np.searchsorted(known, place.high, "right"))
            for known in (self._joins, self._arrows)
        )

    def keep(self, piece: RawPiece) -> list[int]:
        """Places in the piece, ascending."""
        kept: list[int] = []
        arrows: list[int] = []
        keys: list[int] = []
        device: list[int] = []
        joins: list[int] = []
        begin, end, is_one = self._begin, self._end, self._is_one
        for place, event in enumerate(piece.events):
            phase, category = event.ph, event.cat
            if phase == "X":
                join = self._join(event) if category in _JOINED else None
                if join is not None:
                    device.append(place)
                    joins.append(join)
                elif category == "gpu_user_annotation":
                    if self._is_annotated(event):
                        kept.append(place)
                elif begin <= event.ts < end and (is_one or self._is_inside(event.ts)):
                    kept.append(place)
            elif phase == "M":
                kept.append(place)
            elif event.id is not None and phase in "stf":
                arrows.append(place)
                keys.append(arrow_key(event))
            elif self._is_inside(event.ts):
                kept.append(place)
        kept += _known(arrows, keys, self._arrows)
        kept += _known(device, joins, self._joins)
        kept.sort()
        return kept

    def _join(self, event: Event) -> int | None:
        """The id that joins the event to its launch; None where time alone decides."""
        args = event.args
        if args is None or not self._has_launches:
            return None
        return args.correlation if event.cat else args.connection if is_ascend_work(event) else None

    def _is_annotated(self, event: Event) -> bool:
        external = event.args.external if event.args is not None else None
        return self._is_inside(event.ts) if external is None else external in self._externals

    def _is_inside(self, at: float) -> bool:
        return any(begin <= at < end for begin, end in self._windows)


_JOINED = DEVICE | WAITS | {""}


def _whole_arrows(arrows: Spool, bounds: list[tuple[int, int]]) -> Any:
    """Keys of the arrows that have both ends in the slice, ascending.

    An arrow to the device counts by its tail, for what it points at belongs to the slice whenever it runs.
    """
    found = [np.empty(0, "i8")]
    for rows in arrows.sorted_blocks():
        keys, group = np.unique(rows["key"], return_inverse=True)
        is_inside = np.zeros(len(rows), bool)
        for begin, end in bounds:
            is_inside |= (rows["at"] >= begin) & (rows["at"] < end)
        is_tail, is_head = rows["end"] & 3 == 0, rows["end"] & 3 == 1

        def some(chosen: Any, group: Any = group, size: int = len(keys)) -> Any:
            return np.bincount(group, chosen, size) > 0

        to_device = some(rows["end"] >= TO_DEVICE)
        belongs = np.where(to_device, some(is_inside & is_tail), ~some(~is_inside))
        found.append(keys[some(is_tail) & some(is_head) & belongs])
    return np.concatenate(found)


def _known(places: list[int], values: list[int], known: Any) -> list[int]:
    """Of `places`, those whose value is among the known ones, which are ascending."""
    if not places or not len(known):
        return []
    wanted = np.array(values, "i8")
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.array(places)[known[at] == wanted].tolist()  # type: ignore[no-any-return]
