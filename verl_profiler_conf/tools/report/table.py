"""The captures of a folder as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from verl_profiler_conf.capture.manifest import Manifest
from verl_profiler_conf.tools.report.account import AskedWindow, spans_label
from verl_profiler_conf.tools.report.captures import Capture
from verl_profiler_conf.tools.trace.errors import printable


def account_table(asked: Sequence[AskedWindow]) -> Table:
    """One line for each window, rank and step that was asked for."""
    table = Table(title="asked for", title_justify="left")
    has_place = {
        "step": any(each.step is not None for each in asked),
        "replica": any(each.replica is not None for each in asked),
        "label": any(each.label and each.step is None for each in asked),
    }
    headings = [heading for heading, is_there in has_place.items() if is_there]
    for heading in (*headings, "engine", "rank", "asked", "captured", "missing", "why"):
        table.add_column(heading)
    for each in asked:
        place = {"step": each.step, "replica": each.replica, "label": each.label}
        table.add_row(
            *("" if place[heading] is None else printable(place[heading]) for heading in headings),
            printable(each.engine),
            str(each.rank),
            str(each.window),
            spans_label(each.captured),
            spans_label(each.missing) if each.missing else "",
            printable(each.why, 500),
        )
    return table


def captures_table(captures: Sequence[Capture]) -> Table:
    """One line for each capture with a manifest: what was asked for, what is in it."""
    headings, rows = _lines(captures)
    return _table("captures", [*headings, *HELD], rows)


def captures_tables(captures: Sequence[Capture], console: Console) -> list[Table]:
    """That table; where the console is too narrow for it, two, whose lines have numbers."""
    whole = captures_table(captures)
    if Measurement.get(console, console.options.update(max_width=_ENDLESS), whole).maximum <= console.width:
        return [whole]
    headings, rows = _lines(captures)
    cut = len(headings)
    return [
        _table("captures", ["#", *headings], [[str(n), *row[:cut]] for n, row in enumerate(rows, 1)]),
        _table("what is in them", ["#", *HELD], [[str(n), *row[cut:]] for n, row in enumerate(rows, 1)]),
    ]


def _lines(captures: Sequence[Capture]) -> tuple[list[str], list[list[str]]]:
    """Headings of the columns before those of `HELD`, and the cells of all of them."""
    captures = [capture for capture in captures if capture.manifest is not None]
    places = [_place(capture.manifest) for capture in captures if capture.manifest is not None]
    headings = [heading for heading in PLACE if any(place[heading] for place in places)]
    rows = [
        [*(place[heading] for heading in headings), *_cells(capture)]
        for capture, place in zip(captures, places, strict=True)
    ]
    return [*headings, *ASKED], rows


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in HELD else "left")
    for row in rows:
        table.add_row(*map(printable, row))
    return table


PLACE = ("label", "step", "replica", "node")
"""Columns that are there only when a capture has something to say in them."""

ASKED = ("engine", "rank", "asked", "captured", "closed by")
HELD = ("iterations", "requests", "ms/iteration", "operators", "kernels", "KiB")

_ENDLESS = 10_000
"""Wider than any table."""


def _place(manifest: Manifest) -> dict[str, str]:
    """Where and when a capture was made; a label that only repeats step and replica is left out."""
    numbers = {"step": manifest.step, "replica": manifest.replica}
    place = {name: "" if number is None else str(number) for name, number in numbers.items()}
    repeats = manifest.step is not None and manifest.replica is not None
    return {**place, "label": "" if repeats else manifest.label or "", "node": manifest.node or ""}


def iterations_table(capture: Capture, most: int = 12) -> Table:
    """One line an iteration; the middle of a long capture is left out."""
    manifest = capture.manifest
    table = Table(title="its iterations", title_justify="left")
    for heading in ("iteration", "tokens", "requests", "batch tokens", "ms"):
        table.add_column(heading, justify="right")
    rows = manifest.rows if manifest is not None else []
    skip = range(most // 2, len(rows) - most // 2) if len(rows) > most else range(0)
    for number, row in enumerate(rows):
        if number in skip:
            if number == skip.start:
                table.add_row("...", f"{len(skip)} more", "", "", "")
            continue
        tokens = "gap" if row.gap else tokens_label(row.lo, row.hi)
        table.add_row(str(row.index), tokens, str(row.requests), str(row.tokens), f"{row.wall_ns / 1e6:.2f}")
    return table


def tokens_label(lo: int, hi: int) -> str:
    """`20` or `20-22`: inclusive, as people count."""
    return str(lo) if hi - lo == 1 else f"{lo}-{hi - 1}"


def _cells(capture: Capture) -> list[str]:
    manifest, operators, kernels = capture.manifest, *_counts(capture)
    if manifest is None:
        return []
    rows = manifest.captured
    mean = sum(row.wall_ns for row in rows) / len(rows) / 1e6 if rows else None
    return [
        f"{manifest.engine} {manifest.engine_version}".strip(),
        str(manifest.rank if manifest.global_rank is None else manifest.global_rank),
        str(manifest.window),
        _captured(manifest),
        manifest.closed_by or "never reached",
        str(len(rows)),
        str(max((row.requests for row in rows), default=0)),
        "" if mean is None else f"{mean:.2f}",
        operators,
        kernels,
        f"{manifest.trace_bytes / 1024:.0f}",
    ]


def _counts(capture: Capture) -> tuple[str, str]:
    """How many operators and pieces of device work the trace holds."""
    if capture.analysis is not None:
        analysis = capture.analysis
        return str(analysis.operators_count), str(analysis.kernels_count + analysis.copies_count)
    return (str(capture.counts.operators), str(capture.counts.kernels)) if capture.counts is not None else ("", "")


def _captured(manifest: Manifest) -> str:
    rows = manifest.captured
    if not rows:
        furthest = manifest.furthest_token
        return f"none (furthest token {furthest})" if furthest >= 0 else "none (no token seen)"
    label = f"tokens {tokens_label(min(row.lo for row in rows), max(row.hi for row in rows))}"
    return label if manifest.part == 1 else f"{label}, part {manifest.part}"
