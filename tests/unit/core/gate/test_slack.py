"""What the gate promises who does not ask before every iteration."""

from __future__ import annotations

import pytest

from verl_profiler_conf.core.gate import NO_ACTION, PREPARE, make_gate
from verl_profiler_conf.core.window import TokenWindow

WINDOWS = (TokenWindow(10, 12), TokenWindow(30, 32))


def test_so_many_tokens_can_be_made_unasked() -> None:
    gate = make_gate(WINDOWS)
    gate.step({"a": range(1)})
    assert gate.headroom == 5
    assert gate.step({"a": range(5, 6)}) is NO_ACTION, "the fifth token from there"
    assert gate.headroom == 0
    assert gate.step({"a": range(6, 7)}) is PREPARE, "the profiler gets ready four tokens ahead"
    assert gate.headroom == 3
    assert gate.step({"a": range(9, 10)}) is NO_ACTION, "the third token from there"
    assert gate.headroom == 0
    assert gate.step({"a": range(10, 11)}).open is not None


def test_it_aims_at_the_next_window_once_one_is_captured() -> None:
    gate = make_gate(WINDOWS)
    for token in range(12):
        gate.step({"a": range(token, token + 1)})
    gate.step({"a": range(12, 13)})
    assert gate.headroom == 13


@pytest.mark.parametrize("track", ["any", "all"])
def test_nothing_is_promised_for_a_crowd(track: str) -> None:
    gate = make_gate(WINDOWS, track=track)
    gate.step({"a": range(1)})
    assert gate.headroom == 0


def test_nothing_is_promised_without_a_lead_while_open_or_disarmed() -> None:
    gate = make_gate(WINDOWS)
    assert gate.headroom == 0
    gate.step({"a": range(10, 11)})
    assert gate.is_open
    assert gate.headroom == 0
    gate.disarm()
    assert gate.headroom == 0
