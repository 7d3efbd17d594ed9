"""Gates of several loops that share what is still to be captured."""

from __future__ import annotations

import pytest

from verl_profiler_conf.core.gate import NO_ACTION, CaptureQuota, Gate, make_gate
from verl_profiler_conf.core.window import TokenWindow

WINDOWS = (TokenWindow(2, 4), TokenWindow(6, 8))


def gates(count: int, *, track: str = "lead", max_captures: int | None = 1) -> list[Gate]:
    quota = CaptureQuota(len(WINDOWS), max_captures)
    return [make_gate(WINDOWS, track=track, max_captures=max_captures, quota=quota) for _ in range(count)]


def run(gate: Gate, tokens: range, name: str = "r") -> list[tuple[int, str]]:
    """(token, what happened), where anything did."""
    events = []
    for token in tokens:
        verdict = gate.step({name: range(token, token + 1)})
        if verdict.close is not None:
            events.append((token, f"close {verdict.close}"))
        if verdict.open is not None:
            events.append((token, f"open {verdict.open.window}"))
        if verdict.close_after is not None:
            events.append((token, f"close after: {verdict.close_after}"))
    return events


WHOLE = [
    (2, "open [2, 4)"),
    (3, "close after: window"),
    (6, "open [6, 8)"),
    (7, "close after: window"),
]


@pytest.mark.parametrize("track", ["lead", "any"])
def test_what_one_loop_has_captured_the_others_need_not(track: str) -> None:
    first, second = gates(2, track=track)
    assert next(token for token, _ in run(first, range(10))) == 2
    assert run(second, range(10)) == []
    assert first.unreached == second.unreached == ()


def test_whoever_comes_first_takes_a_window_and_the_others_go_on_waiting() -> None:
    first, second = gates(2)
    assert run(first, range(6)) == WHOLE[:2]
    assert run(second, range(10)) == WHOLE[2:]
    assert run(first, range(6, 10)) == []


def test_a_capture_under_way_counts_as_taken() -> None:
    first, second = gates(2)
    run(first, range(3))
    assert run(second, range(4)) == []
    assert second.unreached == (WINDOWS[1],)
    first.disarm()
    assert second.quota.wanted == (1,)


def test_two_captures_go_to_two_loops() -> None:
    first, second = gates(2, max_captures=2)
    assert run(first, range(5)) == WHOLE[:2]
    assert run(second, range(5)) == WHOLE[:2]


@pytest.mark.parametrize("track", ["lead", "any"])
def test_a_window_that_cannot_be_recorded_goes_by(track: str) -> None:
    (gate,) = gates(1, track=track)
    gate.may_record = lambda window: window == WINDOWS[1]
    events = run(gate, range(12))
    assert events[0] == (6, "open [6, 8)")
    assert gate.unreached == (WINDOWS[0],)
    assert run(gate, range(3), "next") == [] if track == "any" else True
    gate.may_record = lambda _: True
    gate.idle()
    assert run(gate, range(4), "later")[0] == (2, "open [2, 4)")


def test_the_furthest_token_of_a_lead_that_could_not_record_is_known() -> None:
    gate = make_gate([WINDOWS[0]])
    gate.may_record = lambda _: False
    run(gate, range(3))
    assert gate.furthest == 2
    assert run(gate, range(3, 6)) == []


def test_the_next_part_waits_for_the_recorder() -> None:
    gate = make_gate([TokenWindow(2, 9)])
    run(gate, range(4))
    for _ in range(20):
        gate.step({"r": range(4, 4)})
    assert not gate.is_open
    free = False
    gate.may_record = lambda _: free
    assert run(gate, range(4, 6)) == []
    free = True
    assert run(gate, range(6, 9))[0] == (6, "open [2, 9)")


def test_an_opening_that_came_to_nothing_is_given_back() -> None:
    first, second = gates(2)
    assert first.step({"r": range(1, 5)}).open is not None
    assert not second.quota.claim(0)
    assert first.step({"r": range(2, 2)}).discard
    assert second.quota.claim(0)


@pytest.mark.parametrize("track", ["lead", "any"])
def test_an_empty_capture_makes_the_window_wanted_again(track: str) -> None:
    gate = make_gate([WINDOWS[0]], track=track)
    run(gate, range(6), "missed")
    assert not gate.armed
    gate.wait_again(WINDOWS[0])
    assert gate.armed
    gate.idle()
    assert run(gate, range(6), "captured")[0] == (2, "open [2, 4)")


def test_requests_that_had_passed_are_looked_at_again_once_a_window_is_wanted_again() -> None:
    first, second = gates(2)
    run(first, range(10))
    assert run(second, range(1), "r") == []  # nothing is wanted, so no lead is chosen
    first.wait_again(WINDOWS[1])
    assert run(second, range(1, 10), "r") == WHOLE[2:]


def test_a_request_past_every_window_is_a_candidate_for_one_that_is_wanted_again() -> None:
    first, second = gates(2)
    run(first, range(5))
    second.step({"old": range(3, 4), "older": range(9, 10)})
    first.step({"r": range(6, 7)})
    first.disarm()
    assert second.step({"old": range(4, 5)}) is NO_ACTION
    second.wait_again(WINDOWS[1])
    assert run(second, range(5, 8), "old") == WHOLE[2:]


def test_a_shared_gate_stays_armed_for_what_may_be_wanted_again() -> None:
    first, second = gates(2)
    run(first, range(10))
    assert first.armed
    assert second.armed
    assert second.headroom == 0


def test_an_arming_makes_every_window_wanted() -> None:
    gate = make_gate(WINDOWS)
    run(gate, range(10))
    gate.arm()
    assert gate.quota.wanted == (0, 1)
    assert gate.quota.untouched == (0, 1)
