"""The figures of captures as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from verl_profiler_conf.tools.report.captures import Capture
from verl_profiler_conf.tools.report.summary import Group, ms, percent, phase_times, sentences
from verl_profiler_conf.tools.trace.errors import printable
from verl_profiler_conf.tools.trace.figures import Analysis, Spread

NAME_CHARS = 90
"""Characters of a kernel's name that are shown. Templates can make names of thousands."""


def capture_section(capture: Capture, top: int = 10) -> Iterator[Table | Text]:
    """What the terminal shows of one capture.

    Args:
        capture: with or without an analysis; without one, nothing is shown.
        top: kernels and operators to list.
    """
    analysis = capture.analysis
    if analysis is None:
        return
    yield Text(f"\n{capture.title}", style="bold")
    if analysis.iterations:
        yield phases_table(analysis)
    else:
        yield Text("No iterations: no range in it names one.")
    for sentence in sentences(analysis):
        yield Text(sentence)
    if analysis.kernels:
        yield kernels_table(analysis, top)
    if any(not operator.is_annotation for operator in analysis.operators):
        yield operators_table(analysis, top)


def phases_table(analysis: Analysis) -> Table:
    """Wall time of the iterations, prefill and decode apart."""
    table = Table(title="time per iteration, ms", title_justify="left")
    has_device = analysis.device is not None
    table.add_column("iterations", no_wrap=True)
    for heading in ("count", "median", "p10", "p90", "largest", "begin to begin", *(["device busy"] * has_device)):
        table.add_column(heading, justify="right")
    for each in phase_times(analysis):
        wall = each.wall
        cells = [str(wall.count), *map(ms, (wall.median, wall.p10, wall.p90, wall.largest)), _median(each.period)]
        table.add_row(each.phase, *cells, *([_median(each.busy)] if has_device else []))
    return table


def _median(spread: Spread | None) -> str:
    return "" if spread is None else ms(spread.median)


def kernels_table(analysis: Analysis, top: int) -> Table:
    """The kernels and copies that take most of the device's time."""
    table = Table(title=f"top kernels (of {analysis.kernel_names:,})", title_justify="left")
    table.add_column("share", justify="right")
    for heading in ("ms", "calls", "us/call"):
        table.add_column(heading, justify="right")
    table.add_column("kind")
    table.add_column("kernel", overflow="fold")
    for kernel in analysis.kernels[:top]:
        each = f"{kernel.total_us / kernel.calls:.1f}"
        name = printable(kernel.name, NAME_CHARS)
        table.add_row(percent(kernel.share), ms(kernel.total_us), f"{kernel.calls:,}", each, kernel.kind, name)
    return table


def operators_table(analysis: Analysis, top: int) -> Table:
    """The operators that take most of the host's time, without what they call."""
    operators = [operator for operator in analysis.operators if not operator.is_annotation]
    whole = sum(operator.self_us for operator in operators) or 1.0
    has_device = any(operator.device_us for operator in operators)
    table = Table(title="top operators, by the host's own time in them", title_justify="left")
    for heading in ("share", "self ms", "ms", "calls", *(["device ms"] * has_device)):
        table.add_column(heading, justify="right")
    table.add_column("operator", overflow="fold")
    for operator in operators[:top]:
        cells = [percent(operator.self_us / whole), ms(operator.self_us), ms(operator.total_us), f"{operator.calls:,}"]
        cells += [ms(operator.device_us)] if has_device else []
        table.add_row(*cells, printable(operator.name, NAME_CHARS))
    return table


def ranks_table(group: Group) -> Table:
    """The ranks of a capture beside each other."""
    comparison = group.comparison
    table = Table(title=f"ranks of {group.title}, over {comparison.iterations} iterations, in ms", title_justify="left")
    for heading in ("rank", "iteration", "busy", "computes", "communicates", "waits"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("comes last", justify="right")
    has_slowest = any(rank.rank == comparison.slowest for rank in comparison.ranks)
    if has_slowest:
        table.add_column("")
    for rank in comparison.ranks:
        table.add_row(
            str(rank.rank),
            ms(rank.wall_us),
            percent(rank.busy_share),
            ms(rank.compute_us),
            ms(rank.communication_us),
            ms(rank.waits_us),
            percent(rank.last_share),
            *(["the others wait for it" if rank.rank == comparison.slowest else ""] if has_slowest else []),
        )
    return table
