"""Rows come out in the order of their key, however many there are, and whether they fit into memory or not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_profiler_conf.tools.trace.spool import Spool

ROW = [("key", "i8"), ("value", "i4")]


def filled(batches: list[list[int]], keep: int) -> tuple[Spool, list[tuple[int, int]]]:
    spool = Spool(ROW, "key", keep)
    rows: list[tuple[int, int]] = []
    for batch in batches:
        numbered = [(key, len(rows) + place) for place, key in enumerate(batch)]
        spool.add(np.array(numbered, spool.dtype))
        rows += numbered
    return spool, rows


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(-50, 50), max_size=40), max_size=12), st.sampled_from([1, 4, 30, 100, 10_000]))
def test_all_rows_in_order_and_one_key_in_one_block(batches: list[list[int]], keep: int) -> None:
    spool, rows = filled(batches, keep)
    blocks = [block.tolist() for block in spool.sorted_blocks()]
    assert [row for block in blocks for row in block] == sorted(rows, key=lambda row: row[0])
    seen = [{key for key, _ in block} for block in blocks]
    assert sum(map(len, seen)) == len(set().union(*seen)) if seen else True
    assert spool.rows == len(rows)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(-9, 9), max_size=20), max_size=8),
    st.sampled_from([1, 4, 30, 10_000]),
    st.none() | st.integers(-12, 12),
    st.none() | st.integers(-12, 12),
)
def test_rows_between_two_keys(batches: list[list[int]], keep: int, low: int | None, high: int | None) -> None:
    spool, rows = filled(batches, keep)
    wanted = [r for r in rows if (low is None or r[0] >= low) and (high is None or r[0] < high)]
    assert [r[0] for r in spool.between(low, high).tolist()] == sorted(r[0] for r in wanted)


@pytest.mark.parametrize("keep", [10, 1000])
def test_blocks_are_small_where_little_is_kept(keep: int) -> None:
    spool, _ = filled([list(range(20_000))], keep)
    sizes = [len(block) for block in spool.sorted_blocks()]
    assert sum(sizes) == 20_000
    assert max(sizes) <= keep


def test_rows_may_come_after_a_look() -> None:
    spool, _ = filled([[3, 1]], 100)
    assert [r[0] for r in spool.between(None, None).tolist()] == [1, 3]
    spool.add(np.array([(2, 0)], spool.dtype))
    assert [r[0] for r in spool.between(None, None).tolist()] == [1, 2, 3]
