"""Integers, and what only looks like one."""

from __future__ import annotations

import pytest

from verl_profiler_conf.core.numbers import is_integer


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, True), (-3, True), (2**40, True), (True, False), (1.0, False), ("1", False), (None, False)],
)
def test_is_integer(value: object, expected: bool) -> None:
    assert is_integer(value) is expected
