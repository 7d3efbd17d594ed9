"""Two windows or two runs side by side: `--against`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from verl_profiler_conf.tools.report.captures import Capture
from verl_profiler_conf.tools.report.figures_table import NAME_CHARS
from verl_profiler_conf.tools.report.summary import ms, percent
from verl_profiler_conf.tools.trace.compare import Change, Comparison, compare
from verl_profiler_conf.tools.trace.errors import TraceError, printable


@dataclass(frozen=True)
class Pair:
    """Two captures, and what differs."""

    before: Capture
    after: Capture
    comparison: Comparison


def pair_up(before: Sequence[Capture], after: Sequence[Capture], top: int = 20) -> list[Pair]:
    """Captures of the same engine, rank, window, part, step and replica; or the only one of each side.

    Raises:
        TraceError: no capture of one side has a counterpart on the other; one line.
    """
    old = [capture for capture in before if capture.analysis is not None]
    new = [capture for capture in after if capture.analysis is not None]
    if len(old) == len(new) == 1:
        return [_pair(old[0], new[0], top)]
    for key in (_key, _key_without_step):
        by_key: dict[tuple[object, ...], Capture] = {}
        for capture in old:
            by_key.setdefault(key(capture), capture)
        pairs = [_pair(by_key[key(capture)], capture, top) for capture in new if key(capture) in by_key]
        if pairs:
            return pairs
    raise TraceError(
        f"{len(new)} traces against {len(old)}: none is of the same engine, rank and window; give one trace of each"
    )


def _pair(before: Capture, after: Capture, top: int) -> Pair:
    if before.analysis is None or after.analysis is None:
        raise ValueError("a capture without figures")
    return Pair(before, after, compare(before.analysis, after.analysis, top))


def _key(capture: Capture) -> tuple[object, ...]:
    manifest = capture.manifest
    return (*_key_without_step(capture), manifest.step if manifest is not None else None)


def _key_without_step(capture: Capture) -> tuple[object, ...]:
    manifest = capture.manifest
    if manifest is None:
        return ("", capture.rank)
    return (manifest.engine, capture.rank, str(manifest.window), manifest.part, manifest.replica)


def against_section(pair: Pair, top: int = 10) -> Iterator[Table | Text]:
    """What the terminal shows of two captures."""
    yield Text(f"\n{pair.after.title}", style="bold")
    for side, capture in (("before", pair.before), ("after", pair.after)):  # a path stays in one piece, to be copied
        yield Text(f"  {side + ':':8}{printable(capture.path, 400)}", no_wrap=True, overflow="ignore")
    comparison = pair.comparison
    changed = [change for change in comparison.kernels or comparison.operators if change.difference][:3]
    if changed:
        listed = "; ".join(f"{printable(change.name, 50)} {_difference(change)}" for change in changed)
        yield Text(f"Changed most: {listed}.")
    yield _table("figures", "figure", comparison.figures)
    if comparison.kernels:
        yield _table("kernels, what changed most first", "kernel", comparison.kernels[:top])
    if comparison.operators:
        title = "operators (the host's own time), what changed most first"
        yield _table(title, "operator", comparison.operators[:top])


def _table(title: str, of: str, changes: Sequence[Change]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("before", "after", "difference", "in %"):
        table.add_column(heading, justify="right")
    table.add_column("unit")
    table.add_column(of, overflow="fold")
    for change in changes:
        ratio = "" if change.ratio is None else f"{change.ratio - 1:+.1%}"
        cells = [value(change.before, change.unit), value(change.after, change.unit)]
        cells.append(value(change.difference, change.unit, sign="+"))
        table.add_row(*cells, ratio, unit(change), printable(change.name, NAME_CHARS))
    return table


def _difference(change: Change) -> str:
    ratio = "" if change.ratio is None else f" ({change.ratio - 1:+.0%})"
    return f"{value(change.difference, change.unit, sign='+')} {unit(change)}{ratio}"


def unit(change: Change) -> str:
    """As shown: times are shown in milliseconds."""
    return change.unit.replace("us", "ms", 1) if change.unit.startswith("us") else change.unit


def value(number: float | None, of: str, sign: str = "") -> str:
    """A figure in the unit that `unit` names."""
    if number is None:
        return ""
    if of.startswith("us"):
        text = ms(number)
    elif of == "share":
        text = f"{100 * number:.1f} pp" if sign else percent(number)  # percentage points, beside a change in percent
    else:
        text = f"{number:,.1f}"
    return f"+{text}" if sign and number > 0 else text
