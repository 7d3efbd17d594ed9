"""The report as one page in one file: `--html`.

The page holds plotly.js, the numbers of its plots, and tables. Its own content security policy forbids it to load
anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from verl_profiler_conf.capture.files import write_atomically
from verl_profiler_conf.tools.report.account import AskedWindow
from verl_profiler_conf.tools.report.against import Pair, against_section
from verl_profiler_conf.tools.report.captures import Capture, Reading
from verl_profiler_conf.tools.report.figures_table import kernels_table, operators_table, phases_table, ranks_table
from verl_profiler_conf.tools.report.plots import STACK, Plots, plots_of
from verl_profiler_conf.tools.report.summary import groups, ms, percent, phase_times, sentences
from verl_profiler_conf.tools.report.table import account_table, captures_table
from verl_profiler_conf.tools.trace.errors import ExtraMissingError, printable
from verl_profiler_conf.tools.trace.figures import Analysis

MOST_CAPTURES = 8
"""Captures that have plots on one page. It has to stay below 6 MB, of which plotly.js takes 4.8."""

MOST_ROWS = 400
"""Rows of a table."""

TOP = 25
"""Kernels and operators in a table."""

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_HERE = Path(__file__).parent


def write_page(
    out: Path, reading: Reading, asked: Sequence[AskedWindow], pairs: Sequence[Pair] = (), *, replace: bool = True
) -> None:
    """Write the page.

    Raises:
        ExtraMissingError: plotly is not installed.
        FileExistsError: `out` exists and `replace` is false.
        OSError: the page cannot be written.
    """
    write_atomically(out, page(reading, asked, pairs).encode(errors="backslashreplace"), replace=replace)


def page(reading: Reading, asked: Sequence[AskedWindow], pairs: Sequence[Pair] = ()) -> str:
    """The page's text.

    Raises:
        ExtraMissingError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ExtraMissingError("plotly", "--html") from None
    shown = [(c, c.analysis) for c in reading.captures if c.analysis is not None]
    drawn = [(capture, analysis, plots_of(analysis)) for capture, analysis in shown[:MOST_CAPTURES]]
    body = [*_head(reading, asked), *(part for pair in pairs for part in _pair(pair))]
    for number, (capture, analysis, plots) in enumerate(drawn):
        body += _section(number, capture, analysis, plots)
    if len(shown) > len(drawn):
        body.append(f'<p class="faint">{len(shown) - len(drawn)} more captures are in the tables alone.</p>')
    body += (_table(ranks_table(group)) for group in groups(reading.captures))
    data = {"stack": STACK, "captures": [asdict(plots) for _, _, plots in drawn]}
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<title>verl-profiler report</title>",
            f"<style>\n{_own('page.css')}</style>\n</head>\n<body>",
            *body,
            f'<script type="application/json" id="data">{_script_data(data)}</script>',
            f"<script>{get_plotlyjs()}</script>",
            f"<script>\n{_own('page.js')}</script>\n</body>\n</html>\n",
        ]
    )


def _own(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _script_data(data: Any) -> str:
    """The data as JSON without `<`, so that no name in it can end the script's element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")


def _head(reading: Reading, asked: Sequence[AskedWindow]) -> Iterator[str]:
    missing = [each.line for each in asked if each.missing]
    short = [each.line for each in asked if each.unmade and not each.missing]
    yield "<h1>verl-profiler report</h1>"
    yield from (f'<p class="bad">{_text(line)}</p>' for line in (*reading.problems, *missing)[:MOST_ROWS])
    yield from (f'<p class="faint">{_text(line)}</p>' for line in short[:MOST_ROWS])
    if asked and not missing and not short and not reading.problems:
        yield '<p class="faint">All that was asked for is here, and the traces agree with their manifests.</p>'
    if asked:
        yield _table(account_table(asked[:MOST_ROWS]))
        yield _table(captures_table(reading.captures[:MOST_ROWS]))


def _section(number: int, capture: Capture, analysis: Analysis, plots: Plots) -> Iterator[str]:
    yield f"<h2>{_text(capture.title)}</h2>"
    yield f'<p class="faint">{_text(capture.path, 400)}</p>'
    notes = capture.manifest.notes if capture.manifest is not None else []
    yield from (f'<p class="faint">{_text(note, 400)}</p>' for note in (*notes, *capture.remarks)[:20])
    yield f'<div class="cards">{"".join(_cards(analysis))}</div>'
    yield from (f"<p>{_text(sentence, 400)}</p>" for sentence in sentences(analysis))
    yield '<div class="plots">'
    more = f"every {-(-len(analysis.iterations) // len(plots.x))}th is drawn" if plots.left_out else ""
    if plots.x:
        title = "time of each iteration" + (" over its response token" if plots.x_title != "iteration" else "")
        yield _figure(number, "time", title, more, wide=not plots.stack)
    if plots.stack:
        yield _figure(number, "stack", "device time of each iteration", more)
    if plots.kernels:
        yield _figure(number, "kernels", plots.kernels_title, wide=True)
    if plots.strip is not None:
        left = f"{plots.strip.left_out} shorter pieces are not drawn" if plots.strip.left_out else ""
        yield _figure(number, "strip", plots.strip.title, left, wide=True)
    yield '</div>\n<p class="faint">Drag in a plot to zoom, double-click to see all of it again.</p>'
    if analysis.iterations:
        yield _table(phases_table(analysis))
    if analysis.kernels:
        yield _table(kernels_table(analysis, TOP))
    if analysis.operators:
        yield _table(operators_table(analysis, TOP))


def _figure(number: int, plot: str, title: str, more: str = "", *, wide: bool = False) -> str:
    place = f'<div class="plot" data-plot="{plot}" data-capture="{number}"></div>'
    small = f" <small>{_text(more)}</small>" if more else ""
    kind = ' class="wide"' if wide else ""
    return f"<figure{kind}><figcaption>{_text(title)}{small}</figcaption>{place}</figure>"


def _cards(analysis: Analysis) -> Iterator[str]:
    times = {each.phase: each.wall for each in phase_times(analysis)}
    wall = times.get("decode") or times.get("all")
    if wall is not None:
        which = "decode iteration" if "decode" in times else "iteration"
        yield _card(f"{ms(wall.median)} ms", f"median {which}; p10 {ms(wall.p10)}, p90 {ms(wall.p90)}")
    yield _card(f"{len(analysis.iterations):,}", "iterations")
    device = analysis.device
    if device is None:
        yield _card(f"{analysis.operators_count:,}", "operators on the host; no device work")
        return
    yield _card(percent(device.busy_share), "of the device's time busy")
    bound = "yes" if device.launch_bound else "no"
    yield _card(bound, f"launch-bound; {ms(device.launch_wait_us)} ms wait for launches")
    if device.hidden_share is not None:
        yield _card(percent(device.hidden_share), f"of {ms(device.communication_us)} ms communication hidden")


def _card(value: str, label: str) -> str:
    return f'<div class="card"><b>{escape(value)}</b><span>{escape(label)}</span></div>'


def _pair(pair: Pair) -> Iterator[str]:
    for number, piece in enumerate(against_section(pair, TOP)):
        if isinstance(piece, Table):
            yield _table(piece)
        else:
            tag = "p" if number else "h2"
            yield f"<{tag}>{_text(piece.plain.strip(), 1000)}</{tag}>"


def _table(table: Table) -> str:
    """A table of the terminal as one of the page."""
    columns = table.columns
    heads = "".join(f"<th{_side(c.justify)}>{_text(_plain(c.header))}</th>" for c in columns)
    rows: Iterable[tuple[Any, ...]] = zip(*(list(column.cells) for column in columns), strict=True)
    sides = [_side(column.justify) for column in columns]
    body = "".join(
        f"<tr>{''.join(f'<td{side}>{_text(_plain(c), 1000)}</td>' for side, c in zip(sides, row, strict=True))}</tr>\n"
        for row in rows
    )
    caption = f"<caption>{_text(_plain(table.title))}</caption>" if table.title else ""
    return f'<div class="scroll"><table>{caption}<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}</tbody></table></div>'


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def _side(justify: str) -> str:
    return ' class="right"' if justify == "right" else ""


def _text(text: object, most: int = 300) -> str:
    return escape(printable(text, most))
