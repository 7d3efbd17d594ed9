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
@pytest.mark.parametrize(
    ("standing", "expected"),
    [
        ({"a": range(1)}, 9),
        ({"a": range(1), "b": range(4, 6)}, 4),
        ({"a": range(10, 10)}, 0),  # a prompt is refilled, and token 10 comes next
        ({"a": range(5, 14)}, 0),  # under `any` it opens
        ({"a": range(12, 13)}, 10),  # to the next window it is farther than from token 0 to the first
        ({"a": range(25, 26)}, 4),
        ({"a": range(40, 41)}, 10),  # only one that comes can reach a window
        ({"a": range(40, 41), "b": range(29, 30)}, 0),
    ],
)
def test_of_all_requests_the_nearest_counts(track: str, standing: dict[str, range], expected: int) -> None:
    gate = make_gate(WINDOWS, track=track)
    gate.step({"blocks": range(50, 51)})  # so that nothing opens under `all`
    gate.step({"blocks": range(51, 52), **standing})
    assert gate.headroom == expected


def test_a_request_that_pauses_counts_too() -> None:
    gate = make_gate(WINDOWS, track="any")
    gate.step({"a": range(8, 9), "b": range(1)})
    gate.step({"b": range(1, 2)})
    assert gate.headroom == 1
    gate.step({"b": range(2, 3)}, {"a": 9})
    assert gate.headroom == 7


def test_a_window_without_an_end_is_never_behind() -> None:
    gate = make_gate([TokenWindow(10, None)], track="all")
    gate.step({"a": range(1), "b": range(10, 11)})
    assert gate.headroom == 0


def test_nothing_is_promised_without_a_lead_while_open_or_disarmed() -> None:
    gate = make_gate(WINDOWS)
    assert gate.headroom == 0
    gate.step({"a": range(10, 11)})
    assert gate.is_open
    assert gate.headroom == 0
    gate.disarm()
    assert gate.headroom == 0
