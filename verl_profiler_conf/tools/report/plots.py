"""What the plots of a capture show, as plain numbers: drawn by the page (plotly) and by `--png` (matplotlib)."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl_profiler_conf.tools.trace.errors import printable
from verl_profiler_conf.tools.trace.figures import Analysis, Iteration

MOST_ITERATIONS = 1_000
"""Iterations of a capture in a plot. Of more, every n-th is drawn."""

MOST_PIECES = 1_500
"""Pieces of device work in the timeline. Of more, the longest are drawn."""

MOST_KERNELS = 12
"""Kernels in the plot of top kernels."""

NAME_CHARS = 120

STACK = (
    ("compute", "computing"),
    ("communication", "communicating, not hidden"),
    ("copy", "copying alone"),
    ("wait", "idle, waiting for a launch"),
    ("idle", "idle, otherwise"),
)
"""Parts of an iteration's device time that add up to all of it: a colour, and what it stands for."""


@dataclass
class Strip:
    """The timeline of one iteration. Times in microseconds after its first piece of work.

    Attributes:
        title: which iteration.
        lanes: names of the streams.
        pieces: lane, place in `names`, kind, begin, duration.
        names: of kernels and copies.
        left_out: pieces that are too short to be drawn.
    """

    title: str
    lanes: list[str] = field(default_factory=list)
    pieces: list[tuple[int, int, str, float, float]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    left_out: int = 0


@dataclass
class Plots:
    """The plots of one capture. Times in milliseconds, but for the strip.

    Attributes:
        x_title: what `x` is: a response token, or the number of the iteration.
        x: one value an iteration.
        wall: phase (`prefill`, `mixed`, `decode`, `unknown`) -> time on the host; None for iterations of other phases.
        busy: device time; empty without a device.
        stack: device time of each iteration in the parts of `STACK`; empty without a device.
        kernels: names, share of device time, kind; the largest first.
        kernels_title: what the bars are: kernels, or operators of the host where no device is.
        strip: None without device work in an iteration.
        left_out: iterations that are not drawn.
    """

    x_title: str
    x: list[int]
    wall: dict[str, list[float | None]]
    busy: list[float]
    stack: dict[str, list[float]]
    kernels: list[tuple[str, float, str]]
    kernels_title: str
    strip: Strip | None
    left_out: int


def plots_of(analysis: Analysis) -> Plots:
    """Pick and thin out what the plots of one capture show."""
    every = -(-len(analysis.iterations) // MOST_ITERATIONS) or 1
    iterations = analysis.iterations[::every]
    by_token = all(i.lo is not None for i in iterations)
    phases = [i.phase or "unknown" for i in iterations]
    has_device = analysis.device is not None and bool(iterations)
    kernels_title = "top kernels, share of device time"
    kernels = [(printable(k.name, NAME_CHARS), k.share, str(k.kind)) for k in analysis.kernels[:MOST_KERNELS]]
    if not kernels:
        kernels_title = "top operators, share of the host's own time in them"
        operators = [operator for operator in analysis.operators if not operator.is_annotation]
        whole = sum(operator.self_us for operator in operators) or 1.0
        kernels = [(printable(o.name, NAME_CHARS), o.self_us / whole, "host") for o in operators[:MOST_KERNELS]]
    return Plots(
        x_title="response token" if by_token else "iteration",
        x=[(i.lo or 0) if by_token else i.number for i in iterations],
        wall={
            phase: [_ms(i.wall_us) if own == phase else None for i, own in zip(iterations, phases, strict=True)]
            for phase in dict.fromkeys(phases)
        },
        busy=[_ms(i.device.busy_us) if i.device else 0.0 for i in iterations] if has_device else [],
        stack=_stack(iterations) if has_device else {},
        kernels=kernels,
        kernels_title=kernels_title,
        strip=_strip(analysis),
        left_out=len(analysis.iterations) - len(iterations),
    )


def _stack(iterations: tuple[Iteration, ...]) -> dict[str, list[float]]:
    parts: dict[str, list[float]] = {label: [] for _, label in STACK}
    for iteration in iterations:
        device = iteration.device
        times = [0.0] * len(STACK)
        if device is not None:
            alone = max(0.0, device.busy_us - device.compute_us - device.exposed_us)
            wait = min(device.launch_wait_us, device.idle_us)
            times = [device.compute_us, device.exposed_us, alone, wait, device.idle_us - wait]
        for values, time in zip(parts.values(), times, strict=True):
            values.append(_ms(time))
    return parts


def _strip(analysis: Analysis) -> Strip | None:
    if not analysis.strip or analysis.strip_iteration is None:
        return None
    iteration = analysis.iterations[analysis.strip_iteration]
    token = f"response token {iteration.lo}" if iteration.lo is not None else f"number {iteration.number}"
    pieces = sorted(analysis.strip, key=lambda piece: -piece.dur_us)[:MOST_PIECES]
    pieces.sort(key=lambda piece: piece.begin_us)
    begin = min(piece.begin_us for piece in analysis.strip)
    several = len({piece.device for piece in pieces}) > 1
    strip = Strip(f"device work of one iteration ({token})", left_out=len(analysis.strip) - len(pieces))
    lanes: dict[str, int] = {}
    names: dict[str, int] = {}
    for piece in pieces:
        lane = f"device {piece.device}, stream {piece.stream}" if several else f"stream {piece.stream}"
        number = lanes.setdefault(printable(lane, 40), len(lanes))
        name = names.setdefault(printable(piece.name, NAME_CHARS), len(names))
        strip.pieces.append((number, name, piece.kind, round(piece.begin_us - begin, 3), round(piece.dur_us, 3)))
    strip.lanes, strip.names = list(lanes), list(names)
    return strip


def _ms(microseconds: float) -> float:
    return round(microseconds / 1e3, 5)
