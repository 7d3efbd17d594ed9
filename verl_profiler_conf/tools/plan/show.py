"""The plan of a launch as tables in the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_profiler_conf.core.settings import ENV_NAME
from verl_profiler_conf.core.sizes import size_text
from verl_profiler_conf.tools.plan.counters import PlanRow

MOST_FILES = 8

COUNTERS = ("engine", "version", "window", "counters", "verdict", "why", "without correction")
NARROWEST = 120
"""Columns of a console that the table of the counters needs. Below, each version of an engine has lines of its own."""


def print_plan(console: Console, report: dict[str, Any]) -> None:
    """Print every job of a launch, and what is wrong with it."""
    jobs = report["jobs"]
    for number, job in enumerate(jobs):
        if len(jobs) > 1:
            console.print(f"job {number}")
        _print_job(console, job, report)
    if report.get("base_of"):
        console.print(
            f"{report['base_of']} chooses the values of its jobs while it runs: this is the config without them, and a"
            " value of a job may change the window or be refused when that job starts",
            soft_wrap=True,
        )
    if report.get("cut_at"):
        console.print(f"the sweep has more jobs: the first {report['cut_at']} are planned")
    for line in report["problems"]:
        console.print(Text(f"problem: {line}", style="red"), soft_wrap=True)


def _print_job(console: Console, job: dict[str, Any], report: dict[str, Any]) -> None:
    if job.get("fields"):
        table = Table("setting", "value", "from")
        for row in job["fields"]:
            table.add_row(row["key"], str(row["value"]), row["from"])
        console.print(table)
    facts = Table(show_header=False, box=None)
    for name, text in _facts(job, report):
        facts.add_row(name, Text(text))
    console.print(facts)
    for line in job.get("warnings", ()):
        console.print(Text(f"warning: {line}", style="yellow"), soft_wrap=True)
    for line in job["problems"]:
        console.print(Text(f"problem: {line}", style="red"), soft_wrap=True)
    if job.get("environment"):
        console.print("for launchers without Hydra:")
        print_line(console, f"export {ENV_NAME}={shlex.quote(job['environment'])}")


def print_line(console: Console, text: str) -> None:
    """A line to copy: never broken."""
    console.print(Text(text), soft_wrap=True)


def _facts(job: dict[str, Any], report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if job.get("windows"):
        yield "tokens", ", ".join(f"[{start}, {'end' if end is None else end})" for start, end in job["windows"])
        yield "device", f"{job['device']} (torch built for {job.get('torch') or 'the CPU, or not installed'})"
        yield "captures go to", job.get("remote") or job["save_path"]
        if job.get("verl_save_path"):
            yield "verl's save_path", str(job["verl_save_path"])
        yield "ranks", "all" if job["all_ranks"] else f"{job['ranks']} of {report.get('world', 1)} in this launch"
        if job.get("replicas"):
            yield "steps, replicas", f"{job['steps'] or 'once'}, {job['replicas']}"
        yield "captures", str(job["captures"])
    for engine in job.get("engines", ()):
        how = f"{engine['version']}: {engine['how']}"
        how += f" ({engine['why']})" if engine["why"] else ""
        yield engine["engine"], how + (f"; {engine['counters']}" if engine["how"] == "counters" else "")
    names = job.get("files", [])
    for name in names[:MOST_FILES]:
        yield "file", name
    if len(names) > MOST_FILES:
        yield "", f"and {len(names) - MOST_FILES} more"
    if job.get("estimate"):
        yield from _estimate(job["estimate"])


def _estimate(estimate: dict[str, Any]) -> Iterator[tuple[str, str]]:
    cost = estimate["iteration"]
    if estimate["iterations"] is None:
        yield "estimate", f"{size_text(round(cost['trace_bytes']))} an iteration; the window has no end"
    else:
        yield "traces", f"about {size_text(estimate['trace_bytes'])}"
        yield "host memory", f"about {size_text(estimate['memory_bytes'])} until a trace is saved"
        yield "closing stall", f"about {estimate['closing_stall_s']:.2g} s"
    if estimate["disk_free"] is not None:
        yield "disk", f"{size_text(estimate['disk_free'])} free"
    yield "by", cost["source"]


def print_counters(console: Console, rows: Sequence[PlanRow]) -> None:
    """Print a window in the engines' own counters."""
    if console.width >= NARROWEST:
        table = Table(*COUNTERS, show_lines=True)
        for row in rows:
            table.add_row(*_counters_of(row))
        console.print(table)
        return
    for row in rows:
        engine, version, *rest = _counters_of(row)
        block = Table.grid(padding=(0, 2))
        for heading, text in zip(COUNTERS[2:], rest, strict=True):
            block.add_row(f"  {heading}", text)
        console.print(f"{engine} {version}")
        console.print(block)


def _counters_of(row: PlanRow) -> tuple[str, ...]:
    version = f"{row.version} (installed)" if row.installed else row.version
    return (row.engine, version, row.window, row.counters, row.fit, row.reason, row.plain)
