"""A window that goes by uncaptured first."""

from __future__ import annotations

import pytest
from gate_model.play import traces
from gate_model.schedules import Event, Idle, Step

from verl_profiler_conf.core.gate import NO_ACTION, PREPARE, CaptureQuota, Gate, make_gate
from verl_profiler_conf.core.window import TokenWindow

WINDOW = TokenWindow(2, 4)


def rollout(name: str, tokens: int = 6) -> list[Event]:
    """One request, alone, to its end."""
    steps = [Step({name: range(token, token + 1)}, {}) for token in range(tokens)]
    return [*steps, Idle({name: tokens})]


def captured(rollouts: list[Event], *windows: tuple[int, int | None], **setting: object) -> list[tuple[str, int]]:
    """(request, first token of the window) of each capture."""
    return [(trace.lines[0].request, trace.window.start) for trace in traces(rollouts, *windows, **setting)]


THREE = [*rollout("a"), *rollout("b"), *rollout("c")]


@pytest.mark.parametrize("track", ["lead", "any", "all"])
@pytest.mark.parametrize(
    ("skip", "most", "expected"),
    [(0, 1, ["a"]), (1, 1, ["b"]), (2, 1, ["c"]), (3, 1, []), (1, None, ["b", "c"]), (0, None, ["a", "b", "c"])],
)
def test_the_first_times_leave_nothing(track: str, skip: int, most: int | None, expected: list[str]) -> None:
    found = captured(THREE, (2, 4), track=track, skip_captures=skip, max_captures=most)
    assert [request for request, _ in found] == expected


def test_each_window_counts_for_itself() -> None:
    assert captured([*rollout("a", 3), *rollout("b"), *rollout("c")], (1, 2), (4, 5), skip_captures=1) == [
        ("b", 1),
        ("c", 4),
    ]


@pytest.mark.parametrize("track", ["lead", "any"])
def test_a_request_that_ends_before_the_window_does_not_count(track: str) -> None:
    short = [*rollout("short", 2), *rollout("a"), *rollout("b")]
    assert captured(short, (2, 4), track=track, skip_captures=1) == [("b", 2)]


@pytest.mark.parametrize("track", ["lead", "any"])
def test_a_request_that_ends_inside_the_window_counts(track: str) -> None:
    assert captured([*rollout("a", 3), *rollout("b")], (2, 4), track=track, skip_captures=1) == [("b", 2)]


@pytest.mark.parametrize("track", ["lead", "any", "all"])
def test_a_window_right_behind_one_that_goes_by_is_captured(track: str) -> None:
    """One iteration ends the window that goes by and opens the next one, and the other way round."""
    gate = make_gate([WINDOW, TokenWindow(4, 6)], track=track, skip_captures=1)
    gate.quota.claim_skip(1)
    gate.quota.count_skip(1)
    for token in range(4):
        assert gate.step({"a": range(token, token + 1)}) is NO_ACTION
    verdict = gate.step({"a": range(4, 5)})
    assert verdict.close is None
    assert verdict.open is not None
    assert verdict.iteration is not None


def test_nothing_is_said_of_a_window_that_goes_by() -> None:
    gate = make_gate([WINDOW], skip_captures=1)
    for made in (range(1), range(1, 5), range(3, 7), range(6, 7)):
        assert gate.step({"a": made}) is NO_ACTION
    assert gate.idle({"a": 7}) is NO_ACTION
    assert (gate.skipped(WINDOW), gate.unreached, gate.is_capturing) == (1, (WINDOW,), False)
    assert gate.step({"b": range(1)}) is PREPARE, "the next time is captured"


def test_a_window_that_was_not_reached_after_all_has_not_gone_by() -> None:
    gate = make_gate([WINDOW], skip_captures=1)
    gate.step({"a": range(1, 5)})
    assert gate.is_open
    gate.step({"a": range(2, 2)})
    assert (gate.is_open, gate.skipped(WINDOW)) == (False, 0)
    for token in range(2, 6):
        assert gate.step({"a": range(token, token + 1)}) is NO_ACTION
    assert gate.skipped(WINDOW) == 1


@pytest.mark.parametrize("track", ["lead", "any"])
def test_each_arming_counts_anew(track: str) -> None:
    gate = make_gate([WINDOW], track=track, skip_captures=1, armed=False)
    for request in "abc":
        gate.arm()
        for token in range(6):
            assert gate.step({request: range(token, token + 1)}) is NO_ACTION
        gate.idle({request: 6})
        assert gate.skipped(WINDOW) == 1
        assert gate.disarm() is NO_ACTION


@pytest.mark.parametrize("track", ["lead", "any"])
def test_a_start_while_a_window_goes_by_begins_anew(track: str) -> None:
    gate = make_gate([WINDOW], track=track, skip_captures=1)
    gate.step({"a": range(2, 3)})
    assert (gate.is_open, gate.is_capturing) == (True, False)
    gate.arm()
    assert (gate.is_open, gate.skipped(WINDOW)) == (False, 0)


@pytest.mark.parametrize("track", ["lead", "any"])
def test_a_stop_while_a_window_goes_by_ends_it(track: str) -> None:
    gate = make_gate([WINDOW], track=track, skip_captures=1)
    gate.step({"a": range(2, 3)})
    assert gate.disarm() is NO_ACTION
    assert gate.skipped(WINDOW) == 1


def test_a_window_goes_by_while_another_loop_records() -> None:
    """Nothing is recorded of it, so that the recorder is not asked for, neither for its parts."""
    gate = make_gate([TokenWindow(2, 9)], skip_captures=1)
    gate.may_record = _never
    gate.step({"a": range(2, 3)})
    for _ in range(20):
        gate.step({"a": range(3, 3)})
    assert not gate.is_open, "the lead pauses"
    gate.step({"a": range(3, 4)})
    assert gate.is_open
    gate.idle({"a": 4})
    assert gate.skipped(gate.windows[0]) == 1


def test_a_pause_in_a_window_that_goes_by_leaves_no_part() -> None:
    """The lead may not have reached the window when it paused; when it does, it is captured, as part 1."""
    quota = CaptureQuota(1, 1, 1)
    first, second = (make_gate([WINDOW], quota=quota) for _ in range(2))
    first.step({"a": range(1, 5)})
    for _ in range(20):
        first.step({"b": range(1)})
    first.step({"a": range(2, 2)})
    for token in range(6):
        second.step({"c": range(token, token + 1)})
    opening = first.step({"a": range(2, 3)}).open
    assert opening is not None
    assert opening.part == 1


def loops(count: int, **limits: int) -> list[Gate]:
    quota = CaptureQuota(1, limits.get("max_captures", 1), limits["skip_captures"])
    return [make_gate([WINDOW], quota=quota) for _ in range(count)]


def test_the_loops_of_an_arming_count_together() -> None:
    first, second, third = loops(3, skip_captures=2)
    for gate in (first, second):
        for token in range(6):
            assert gate.step({"a": range(token, token + 1)}).open is None
    assert third.step({"a": range(2, 3)}).open is not None


def test_a_time_under_way_counts_as_taken() -> None:
    first, second, third = loops(3, skip_captures=1)
    assert first.step({"a": range(2, 3)}) is NO_ACTION
    assert first.is_open
    assert second.step({"b": range(2, 3)}).open is not None
    assert first.step({"a": range(3, 4)}) is NO_ACTION
    assert third.step({"c": range(2, 3)}) is NO_ACTION, "the one capture is under way"


def test_a_stretch_that_reaches_its_cap_is_one_time() -> None:
    gate = make_gate([TokenWindow(2, 9)], track="any", max_iterations=2, skip_captures=1)
    for token in range(9):
        assert gate.step({"a": range(token, token + 1)}) is NO_ACTION
    gate.step({"b": range(1)}, {"a": 9})
    assert gate.step({"b": range(2, 3)}).open is not None


def test_tokens_that_went_by_are_not_asked_for() -> None:
    gate = make_gate([WINDOW], track="any", skip_captures=1)
    for token in range(5):
        gate.step({"a": range(token, token + 1)})
    gate.idle({"a": 5})
    assert gate.coverage(WINDOW) == (0, 0)
    for token in range(5):
        gate.step({"b": range(token, token + 1)})
    assert gate.coverage(WINDOW) == (2, 2)


def _never(_: TokenWindow) -> bool:
    return False
