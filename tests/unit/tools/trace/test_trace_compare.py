"""Ranks beside each other, and two captures side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trace_files import launched, tokens, write

from verl_profiler_conf.tools.trace.analysis import analyse
from verl_profiler_conf.tools.trace.compare import Change, compare, compare_ranks
from verl_profiler_conf.tools.trace.figures import Analysis

REDUCE = "ncclDevKernel_AllReduce_Sum_bf16"


def capture(path: Path, steps: list[tuple[float, float]], *, rank: int | None = None, first: int = 20) -> Analysis:
    """Iterations of 100 microseconds, each with a kernel and a collective of so many microseconds."""
    events: list[Any] = []
    for at, (compute, communication) in enumerate(steps):
        events.append(tokens(first + at, first + at + 1, first + at, at * 100, 90))
        events += launched(2 * at, "gemm", at * 100 + 1, at * 100 + 5, compute)
        if communication:
            events += launched(2 * at + 1, REDUCE, at * 100 + 2, at * 100 + 5 + compute, communication)
    info = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": 2}}
    return analyse(write(path, events, **info))


class TestRanks:
    def test_who_waits_for_whom(self, tmp_path: Path) -> None:
        fast = capture(tmp_path / "a.json", [(20, 30)] * 4, rank=1)
        slow = capture(tmp_path / "b.json", [(45, 5)] * 4, rank=0)
        found = compare_ranks([fast, slow])
        assert found.iterations == 4
        assert found.slowest == 0
        assert [(r.rank, r.compute_us, r.communication_us, r.waits_us, r.last_share) for r in found.ranks] == [
            (0, 45, 5, 0, 1),
            (1, 20, 30, 25, 0),
        ]

    def test_nobody_stands_out(self, tmp_path: Path) -> None:
        one = capture(tmp_path / "a.json", [(20, 30), (30, 20)] * 2, rank=0)
        two = capture(tmp_path / "b.json", [(30, 20), (20, 30)] * 2, rank=1)
        assert compare_ranks([one, two]).slowest is None

    def test_only_iterations_that_all_ran(self, tmp_path: Path) -> None:
        one = capture(tmp_path / "a.json", [(20, 5)] * 4, rank=0)
        two = capture(tmp_path / "b.json", [(20, 5)] * 4, rank=1, first=22)
        assert compare_ranks([one, two]).iterations == 2
        assert compare_ranks([one, capture(tmp_path / "c.json", [(1, 1)], first=90)]).iterations == 0
        assert compare_ranks([]).ranks == ()

    def test_without_communication_by_time_on_the_host(self, tmp_path: Path) -> None:
        one = analyse(write(tmp_path / "a.json", [tokens(i, i + 1, i, i * 100, 50) for i in range(3)]))
        two = analyse(write(tmp_path / "b.json", [tokens(i, i + 1, i, i * 100, 80) for i in range(3)]))
        found = compare_ranks([one, two])
        assert found.slowest == 1
        assert [r.last_share for r in found.ranks] == [0, 1]


class TestSideBySide:
    def test_what_changed_most_comes_first(self, tmp_path: Path) -> None:
        before = capture(tmp_path / "a.json", [(20, 30)] * 4)
        after = capture(tmp_path / "b.json", [(50, 25)] * 2)
        found = compare(before, after)
        assert found.per_iteration
        assert found.kernels == (Change("gemm", 20, 50, "us/iteration"), Change(REDUCE, 30, 25, "us/iteration"))
        assert [change.difference for change in found.kernels] == [30, -5]
        assert found.kernels[0].ratio == 2.5
        figures = {change.name: change for change in found.figures}
        assert figures["decode iteration, median"] == Change("decode iteration, median", 90, 90, "us")
        assert figures["kernels"] == Change("kernels", 2, 2, "kernels/iteration")
        assert figures["computing"].after == pytest.approx(50)
        assert "prefill iteration, median" not in figures

    def test_what_only_one_of_them_has(self, tmp_path: Path) -> None:
        before = capture(tmp_path / "a.json", [(20, 30)])
        after = capture(tmp_path / "b.json", [(20, 0)])
        gone = compare(before, after).kernels[0]
        assert (gone.name, gone.after, gone.difference, gone.ratio) == (REDUCE, None, -30, None)

    def test_without_iterations_whole_traces_compare(self, tmp_path: Path) -> None:
        one = analyse(write(tmp_path / "a.json", launched(1, "k", 0, 5, 10)))
        two = analyse(write(tmp_path / "b.json", launched(1, "k", 0, 5, 30)))
        found = compare(one, two)
        assert not found.per_iteration
        assert found.kernels == (Change("k", 10, 30, "us"),)
