"""One event of a trace, and how pieces of a trace become events: by msgspec, or by the standard library without it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from verl_profiler_conf.tools.trace.chunks import Decoder

try:
    import msgspec
except ImportError:
    HAS_MSGSPEC = False
else:
    HAS_MSGSPEC = True

MAX_ID = 2**63 - 1
MAX_TIME_US = 4e15
"""The year 2096 on a clock that counts from 1970: what lies beyond is no time."""

MAX_DURATION_US = 1e14
"""Three years."""


class Args(Protocol):
    """What is read of an event's `args`.

    Attributes:
        correlation: joins a launch on the host to the work that it started on the device.
        external: joins device work, and the launch of it, to the operator that asked for it.
        name: of a process or thread, in a metadata event.
        labels: of a process, in a metadata event.
        sort_index: of a process or thread, in a metadata event.
        task_type: of device work, as Ascend writes it.
        connection: Ascend's correlation.
    """

    correlation: int | None
    external: int | None
    name: Any
    labels: Any
    sort_index: Any
    task_type: str | None
    connection: int | None


class Event(Protocol):
    """One event. Times are microseconds on the trace's own clock.

    Attributes:
        ph: phase: `X` complete, `M` metadata, `s` and `f` the ends of a flow arrow, `i` instant.
        cat: category; empty where there is none.
        name: of the operator, kernel, range, ...
        ts: when it began.
        dur: how long it took.
        pid: process; for device work the device.
        tid: thread; for device work the stream.
        id: of a flow arrow.
        args: None where there are none.
    """

    ph: str
    cat: str
    name: str
    ts: float
    dur: float
    pid: int | str | None
    tid: int | str | None
    id: int | str | None

    @property
    def args(self) -> Args | None: ...


@dataclass(slots=True)
class PlainArgs:
    """`Args` as the standard library's JSON reader fills it."""

    correlation: int | None = None
    external: int | None = None
    name: Any = None
    labels: Any = None
    sort_index: Any = None
    task_type: str | None = None
    connection: int | None = None


@dataclass(slots=True)
class PlainEvent:
    """`Event` as the standard library's JSON reader fills it."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str | None = 0
    tid: int | str | None = 0
    id: int | str | None = None
    args: PlainArgs | None = None


if HAS_MSGSPEC or TYPE_CHECKING:
    from typing import Annotated

    _Id = Annotated[int, msgspec.Meta(ge=-(2**63), le=MAX_ID)]
    _Time = Annotated[float, msgspec.Meta(ge=-MAX_TIME_US, le=MAX_TIME_US)]
    _Duration = Annotated[float, msgspec.Meta(ge=-MAX_DURATION_US, le=MAX_DURATION_US)]

    class _Args(msgspec.Struct, gc=False):
        correlation: _Id | None = None
        external: _Id | None = msgspec.field(name="External id", default=None)
        name: Any = None
        labels: Any = None
        sort_index: Any = None
        task_type: str | None = msgspec.field(name="Task Type", default=None)
        connection: _Id | None = msgspec.field(name="connection_id", default=None)

    class _Event(msgspec.Struct, gc=False):
        ph: str = ""
        cat: str = ""
        name: str = ""
        ts: _Time = 0.0
        dur: _Duration = 0.0
        pid: int | str | None = 0
        tid: int | str | None = 0
        id: int | str | None = None
        args: _Args | None = None


def decoder() -> Decoder[list[Event]]:
    """The fastest decoder that is installed."""
    return TypedDecoder() if HAS_MSGSPEC else PlainDecoder()


class PlainDecoder:
    """By the standard library: slow, and understands what is not quite JSON (`NaN`) or not of the usual types."""

    def fast(self, data: bytes) -> list[Event]:
        return self.slow(data)

    def slow(self, data: bytes) -> list[Event]:
        try:
            rows = json.loads(data)
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8: {error.reason}") from None
        return [_plain(row) for row in rows if isinstance(row, dict)]


class TypedDecoder:
    """By msgspec: reads only the fields of `Event` and passes over the rest."""

    def __init__(self) -> None:
        self._decoder: Any = msgspec.json.Decoder(list[_Event])
        self._lax: Any = msgspec.json.Decoder(list[_Event], strict=False)  # also times in text, as Ascend writes them

    def fast(self, data: bytes) -> list[Event]:
        try:
            return self._decoder.decode(data)  # type: ignore[no-any-return]
        except msgspec.ValidationError:
            if self._decoder is self._lax:
                raise
            events = self._lax.decode(data)
            self._decoder = self._lax
            return events  # type: ignore[no-any-return]

    def slow(self, data: bytes) -> list[Event]:
        return PlainDecoder().slow(data)


def _plain(row: dict[str, Any]) -> PlainEvent:
    args = row.get("args")
    return PlainEvent(
        ph=_text(row.get("ph")),
        cat=_text(row.get("cat")),
        name=_text(row.get("name")),
        ts=_time(row, "ts", MAX_TIME_US),
        dur=_time(row, "dur", MAX_DURATION_US),
        pid=_label(row.get("pid", 0)),
        tid=_label(row.get("tid", 0)),
        id=_label(row.get("id")),
        args=_plain_args(args) if isinstance(args, dict) else None,
    )


def _plain_args(args: dict[str, Any]) -> PlainArgs:
    task_type = args.get("Task Type")
    return PlainArgs(
        correlation=_id(args.get("correlation")),
        external=_id(args.get("External id")),
        name=args.get("name"),
        labels=args.get("labels"),
        sort_index=args.get("sort_index"),
        task_type=task_type if isinstance(task_type, str) else None,
        connection=_id(args.get("connection_id")),
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _label(value: Any) -> int | str | None:
    return value if value is None or type(value) in (int, str) else str(value)


def _id(value: Any) -> int | None:
    """A correlation; text that is a number counts, what is no number or too large for one joins nothing."""
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            return None
    return value if type(value) is int and -MAX_ID <= value <= MAX_ID else None


def _time(row: dict[str, Any], key: str, most: float) -> float:
    value = row.get(key, 0.0)
    try:
        time = float(0.0 if value is None else value)
    except (TypeError, ValueError, OverflowError):
        time = math.nan
    if not abs(time) <= most:
        raise ValueError(f"{key} is {str(value)[:40]}, which is no time in microseconds")
    return time
