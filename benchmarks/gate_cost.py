"""What an iteration costs while the gate is closed, in nanoseconds, at batches of 1, 64 and 1024 requests.

    python benchmarks/gate_cost.py

`lead` must not grow with the batch. The batch comes as a plain dict, and as the lazy mapping that engine hooks hand
in, which knows a request's range only when it is asked. Figures are the best of several repeats: the gate has no
other work that noise could be hiding.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from verl_profiler_conf.core.gate import Gate, make_gate
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.engines.skipping import skippable

BATCHES = (1, 64, 1024)
WINDOW = TokenWindow(1_000_000, 1_000_100)
PASSED = 2_000_000
NOBODY: dict[str, int | None] = {}


Build = Callable[[int, int], Mapping[str, range]]


class Lazy(Mapping[str, range]):
    """Works out a range for each request that it is asked for, as an engine's hook does."""

    def __init__(self, made: dict[str, int]) -> None:
        self._made = made

    def get(self, request: str, default: Any = None) -> Any:
        count = self._made.get(request)
        return default if count is None else range(count, count + 1)

    def __getitem__(self, request: str) -> range:
        count = self._made[request]
        return range(count, count + 1)

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def counts(requests: int, first: int) -> dict[str, int]:
    return {f"request-{index}": first for index in range(requests)}


def as_dict(requests: int, first: int) -> Mapping[str, range]:
    return {name: range(count, count + 1) for name, count in counts(requests, first).items()}


def as_lazy(requests: int, first: int) -> Mapping[str, range]:
    return Lazy(counts(requests, first))


def nanoseconds(gate: Gate, batch: Mapping[str, range], *, budget_s: float = 0.15, repeats: int = 5) -> float:
    """Best mean time of one `step`, the loop around it taken off."""
    step, nobody = gate.step, NOBODY
    for _ in range(3):
        assert step(batch, nobody).iteration is None, "the gate must be closed"

    def timed(calls: int) -> int:
        began = time.perf_counter_ns()
        for _ in range(calls):
            step(batch, nobody)
        return time.perf_counter_ns() - began

    def empty(calls: int) -> int:
        began = time.perf_counter_ns()
        for _ in range(calls):
            pass
        return time.perf_counter_ns() - began

    calls = max(10, int(budget_s * 1e9 / max(timed(10) / 10, 1)))
    gc.disable()
    try:
        return (min(timed(calls) for _ in range(repeats)) - min(empty(calls) for _ in range(repeats))) / calls
    finally:
        gc.enable()


def as_engines_ask(track: str, build: Build, batch: int) -> float:
    """Nanoseconds of an iteration where far from the window one is put to the gate, and the others are counted."""
    gate, standing = make_gate([WINDOW], track=track), build(batch, 5)
    asked = nanoseconds(gate, standing)
    began = time.perf_counter_ns()
    for _ in range(10):
        skipped = skippable(gate.headroom, max_drafts=0, in_flight=1)
    asked += (time.perf_counter_ns() - began) / 10
    return asked / (1 + skipped)


CASES: tuple[tuple[str, str, Build, int], ...] = (
    ("lead, dict", "lead", as_dict, 5),
    ("lead, lazy mapping", "lead", as_lazy, 5),
    ("lead, all requests passed, dict", "lead", as_dict, PASSED),
    ("lead, all requests passed, lazy mapping", "lead", as_lazy, PASSED),
    ("any, dict", "any", as_dict, 5),
    ("any, lazy mapping", "any", as_lazy, 5),
    ("all, dict", "all", as_dict, 5),
    ("all, lazy mapping", "all", as_lazy, 5),
)


def measure() -> list[tuple[str, list[float]]]:
    """One row per case: its name, and nanoseconds per closed iteration at each batch size."""
    rows = []
    for name, track, build, first in CASES:
        figures = [nanoseconds(make_gate([WINDOW], track=track), build(batch, first)) for batch in BATCHES]
        rows.append((name, figures))
    for track in ("lead", "any", "all"):
        rows.append((f"{track}, as engines ask", [as_engines_ask(track, as_lazy, batch) for batch in BATCHES]))
    return rows


def show(rows: list[tuple[str, list[float]]]) -> None:
    title = "ns per closed iteration"
    heads = [f"batch {batch}" for batch in BATCHES]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(f"{title:<42}" + "".join(f"{head:>12}" for head in heads))
        for name, figures in rows:
            print(f"{name:<42}" + "".join(f"{figure:>12,.0f}" for figure in figures))
        return
    table = Table("track, batch given as", *heads, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, figures in rows:
        table.add_row(name, *(f"{figure:,.0f}" for figure in figures))
    Console().print(table)


if __name__ == "__main__":
    show(measure())
