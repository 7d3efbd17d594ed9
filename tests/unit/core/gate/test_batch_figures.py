"""What a gate of all requests can say of a window: how much of it the captures hold, and why it was never reached."""

from __future__ import annotations

from verl_profiler_conf.core.gate import make_gate
from verl_profiler_conf.core.window import TokenWindow

WINDOW = TokenWindow(2, 4)


def test_captures_that_end_before_other_requests_come_hold_a_share() -> None:
    gate = make_gate([WINDOW], track="any")
    for token in range(4):
        gate.step({"a": range(token, token + 1)})
    assert gate.coverage(WINDOW) == (1, 2), "what the last iteration made is not told yet"
    gate.step({"b": range(1)}, {"a": 4})
    assert not gate.armed
    assert gate.coverage(WINDOW) == (2, 4), "b runs, and will make two more"


def test_requests_that_ended_count_with_what_they_made() -> None:
    gate = make_gate([WINDOW], track="any", max_captures=None)
    gate.step({"a": range(1), "b": range(1), "late": range(3, 4)})
    gate.step({"a": range(1, 2)}, {"b": 1, "late": None})
    gate.step({"a": range(2, 3)})
    gate.idle({"a": 3})
    assert gate.coverage(WINDOW) == (2, 2), "late made its token 3, and a its token 2"


def test_of_drafts_only_the_accepted_count() -> None:
    gate = make_gate([WINDOW], track="any")
    gate.step({"a": range(1, 5)})
    gate.step({"a": range(3, 7)})
    gate.step({"a": range(4, 8)})
    assert gate.coverage(WINDOW) == (2, 2)


def test_a_capture_that_is_cut_short_holds_a_share() -> None:
    gate = make_gate([WINDOW], track="any", max_iterations=1)
    gate.step({"a": range(2, 3), "b": range(1)})
    assert gate.coverage(WINDOW) == (1, 4)


def test_all_that_run_have_ended_when_the_engine_is_idle() -> None:
    gate = make_gate([WINDOW], track="any")
    gate.step({"a": range(1)})
    gate.idle()
    assert gate.coverage(WINDOW) == (0, 0)


def test_a_window_without_an_end_has_no_share() -> None:
    window = TokenWindow(2, None)
    gate = make_gate([window], track="any")
    gate.step({"a": range(2, 3)})
    assert gate.coverage(window) is None
    assert make_gate([WINDOW]).coverage(WINDOW) is None


def test_why_all_was_never_reached() -> None:
    gate = make_gate([WINDOW], track="all")
    for token in range(6):
        gate.step({"a": range(token, token + 1), "b": range(token + 2, token + 3), "c": range(token + 2, token + 3)})
    assert gate.furthest == 7
    assert gate.why_unreached(WINDOW) == (
        "track: all needs every decoding request to make tokens of it in the same iteration, and at most 2 of 3 did"
    )


def test_there_is_no_reason_where_nobody_came_so_far() -> None:
    for track in ("lead", "any", "all"):
        gate = make_gate([WINDOW], track=track)
        gate.step({"a": range(1)})
        assert gate.why_unreached(WINDOW) is None


def test_a_capture_that_is_stopped_holds_what_its_last_iteration_may_have_made() -> None:
    gate = make_gate([WINDOW], track="any")
    gate.step({"a": range(2, 3)})
    gate.disarm()
    assert gate.coverage(WINDOW) == (1, 2)
