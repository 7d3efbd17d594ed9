"""What a gate does, one class per behaviour. Rollouts are written out: each line of a batch is one iteration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from gate_model.play import Trace, traces
from gate_model.schedules import Idle, Rollout, Step

from verl_profiler_conf.core.gate import (
    MAX_GAP,
    NO_ACTION,
    PREPARE,
    LeadGate,
    Opening,
    RecordedIteration,
    Verdict,
    make_gate,
)
from verl_profiler_conf.core.gate.lead import PREPARE_AHEAD
from verl_profiler_conf.core.window import TokenWindow, parse_windows

W = TokenWindow


def token(index: int) -> range:
    return range(index, index + 1)


def decode(tokens: int, *requests: str, first: int = 0) -> Rollout:
    """Each request makes one token an iteration, side by side."""
    return [Step({request: token(index) for request in requests}, {}) for index in range(first, first + tokens)]


def step(ended: dict[str, int | None] | None = None, **batch: range) -> Step:
    return Step(batch, ended or {})


def pause(iterations: int, **batch: range) -> Rollout:
    return [Step(dict(batch), {})] * iterations


def tokens(trace: Trace) -> list[int]:
    """The tokens of the tracked request in a trace, in the order they were made."""
    return [index for line in trace.lines if not line.gap for index in range(line.lo, line.hi)]


def events(trace: Trace) -> list[int]:
    return [line.event for line in trace.lines]


class TestWindow:
    """The window that is named is the window that is captured, to the token."""

    def test_from_start_to_end(self) -> None:
        [trace] = traces(decode(60, "a", "b"), (12, 46))
        assert tokens(trace) == list(range(12, 46))
        assert len(trace.lines) == 34
        assert trace.reason == "window"

    def test_of_the_first_token_is_the_one_iteration_that_finishes_the_prompt(self) -> None:
        chunks = pause(3, a=range(0))
        [trace] = traces([*chunks, *decode(5, "a")], (0, 1))
        assert events(trace) == [3]
        assert tokens(trace) == [0]

    def test_without_a_start_begins_at_token_zero(self) -> None:
        [window] = parse_windows(None, 80, [])
        [trace] = traces(decode(100, "a"), (window.start, window.end))
        assert tokens(trace) == list(range(80))

    def test_without_an_end_lasts_as_long_as_the_request(self) -> None:
        [trace] = traces([*decode(48, "a", "b"), Idle({"a": 48, "b": 48})], (40, None))
        assert tokens(trace) == list(range(40, 48))
        assert trace.reason == "request_end"

    def test_two_of_them_are_two_captures(self) -> None:
        first, second = traces(decode(120, "a"), (0, 4), (100, 104))
        assert (first.window, tokens(first)) == (W(0, 4), [0, 1, 2, 3])
        assert (second.window, tokens(second)) == (W(100, 104), [100, 101, 102, 103])

    def test_two_that_touch_share_no_iteration(self) -> None:
        first, second = traces(decode(20, "a"), (4, 8), (8, 12))
        assert events(first) == [4, 5, 6, 7]
        assert events(second) == [8, 9, 10, 11]

    def test_that_the_request_ends_inside_counts_as_captured(self) -> None:
        [trace] = traces([*decode(48, "a"), step({"a": 48}, b=token(0)), *decode(60, "b", first=1)], (40, 50))
        assert tokens(trace) == list(range(40, 48))
        assert trace.reason == "request_end"

    def test_that_the_request_just_completed_at_its_end_closed_for_the_window(self) -> None:
        rollout = [step(a=range(3)), step({"a": 2}, b=token(0))]
        [trace] = traces(rollout, (0, 2))
        assert trace.reason == "window"


class TestNeverReached:
    """A window that no request reaches leaves no trace, and the gate knows how close it came."""

    def test_furthest_token(self) -> None:
        gate = make_gate([W(100, 120)])
        for event in decode(48, "a", "b"):
            assert isinstance(event, Step)
            assert gate.step(event.batch) is NO_ACTION
        assert gate.furthest == 47
        assert gate.idle({"a": 48, "b": None}) is NO_ACTION
        assert gate.furthest == 47
        assert gate.unreached == (W(100, 120),)

    @pytest.mark.parametrize("track", ["any", "all"])
    def test_furthest_token_of_a_whole_batch(self, track: str) -> None:
        gate = make_gate([W(100, 120)], track=track)
        gate.step({"a": token(30), "b": range(12, 12)})
        gate.step({"b": range(12, 17)}, {"a": 31})
        assert gate.furthest == 30
        gate.idle({"b": 40})
        assert gate.furthest == 39

    def test_of_a_prompt_alone_is_none(self) -> None:
        gate = make_gate([W(100, 120)])
        assert gate.furthest == -1
        gate.step({"a": range(0)})
        assert gate.furthest == -1

    def test_counts_what_every_lead_made(self) -> None:
        gate = make_gate([W(100, 120)])
        gate.step({"a": token(60)})
        gate.step({"b": token(3)}, {"a": 61})
        assert gate.furthest == 60

    def test_not_said_of_a_window_that_is_captured_right_now(self) -> None:
        gate = make_gate([W(2, 4), W(100, 120)])
        gate.step({"a": token(2)})
        assert gate.unreached == (W(100, 120),)
        gate.disarm()
        assert gate.unreached == (W(100, 120),)

    def test_not_said_of_a_window_whose_next_part_is_awaited(self) -> None:
        gate = make_gate([W(2, 9)])
        gate.step({"a": token(2)})
        for _ in range(MAX_GAP + 1):
            gate.step({})
        assert not gate.is_open
        assert gate.unreached == ()


class TestLead:
    """Whose tokens count."""

    def test_is_the_first_request_scheduled(self) -> None:
        [trace] = traces(
            [*decode(2, "late"), *[step(late=token(i), early=token(i + 5)) for i in range(2, 20)]], (9, 12)
        )
        assert {line.request for line in trace.lines} == {"late"}

    def test_passes_to_the_one_furthest_along_that_has_not_passed(self) -> None:
        gone = step({"lead": 2}, passed=token(31), near=token(28), far=token(4))
        before = step(lead=token(1), passed=token(30), near=token(27), far=token(3))
        after = [step(passed=token(32 + i), near=token(29 + i), far=token(5 + i)) for i in range(9)]
        [trace] = traces([before, gone, *after], (30, 33))
        assert {line.request for line in trace.lines} == {"near"}
        assert tokens(trace) == [30, 31, 32]

    def test_passes_to_the_first_in_the_batch_of_those_equally_far(self) -> None:
        rollout = [step(z=token(0)), step({"z": 1}, m=token(0), a=token(0)), *decode(9, "m", "a", first=1)]
        [trace] = traces(rollout, (3, 5))
        assert {line.request for line in trace.lines} == {"m"}

    def test_opens_at_once_where_the_new_one_stands_before_the_window(self) -> None:
        [trace] = traces([step(a=token(1)), step({"a": 2}, b=token(5)), step(b=token(6))], (5, 7))
        assert events(trace) == [1, 2]

    def test_does_not_fall_to_a_request_that_has_passed_when_armed(self) -> None:
        rollout = [step(old=token(50 + i), new=token(i)) for i in range(9)]
        [trace] = traces(rollout, (4, 6))
        assert {line.request for line in trace.lines} == {"new"}

    def test_waits_for_an_arrival_where_all_have_passed(self) -> None:
        rollout = [*decode(9, "old", first=50), *[step(old=token(60 + i), new=token(i)) for i in range(9)]]
        [trace] = traces(rollout, (4, 6))
        assert tokens(trace) == [4, 5]

    def test_is_let_go_once_it_has_passed_although_it_is_not_scheduled(self) -> None:
        rollout = [*decode(3, "a"), *decode(9, "b")]
        first, second = traces(rollout, (2, 3), max_captures=2)
        assert {line.request for line in first.lines} == {"a"}
        assert {line.request for line in second.lines} == {"b"}

    def test_goes_back_for_an_earlier_window_with_another_request(self) -> None:
        rollout = [
            *[step(old=token(30 + i)) for i in range(4)],
            *[step(old=token(34 + i), new=token(i)) for i in range(9)],
        ]
        first, second = traces(rollout, (2, 4), (32, 34))
        assert (first.window, first.lines[0].request) == (W(32, 34), "old")
        assert (second.window, second.lines[0].request) == (W(2, 4), "new")

    def test_may_bear_the_name_of_one_that_ended(self) -> None:
        gate = make_gate([W(2, 3)], max_captures=None)
        assert gate.step({"a": token(2)}).close_after == "window"
        gate.step({"a": token(3)})
        gate.step({"b": token(0)}, {"a": 4})
        assert gate.step({"a": token(2)}, {"b": 1}).open == Opening(W(2, 3))

    def test_may_bear_the_name_of_one_that_ended_when_the_engine_ran_dry(self) -> None:
        gate = make_gate([W(2, 3)], max_captures=None)
        gate.step({"a": token(2)})
        gate.step({"a": token(3)})
        gate.idle()
        assert gate.step({"a": token(2)}).open == Opening(W(2, 3))

    def test_is_not_chosen_while_the_batch_is_empty(self) -> None:
        [trace] = traces([step(), step(), *decode(4, "a", "b")], (1, 2))
        assert {line.request for line in trace.lines} == {"a"}


class TestSpeculation:
    """An iteration makes one token for certain and up to `range.stop`; the truth comes with the next."""

    def test_iterations_that_make_a_token_of_the_window_are_captured_whole(self) -> None:
        rollout = [step(a=range(4)), step(a=range(4, 8)), step(a=range(8, 12)), step(a=range(12, 16))]
        [trace] = traces(rollout, (5, 9))
        assert [(line.lo, line.hi) for line in trace.lines] == [(4, 8), (8, 12)]

    def test_an_opening_that_was_in_vain_is_discarded(self) -> None:
        gate = make_gate([W(3, 5)])
        assert gate.step({"a": range(1, 5)}).open == Opening(W(3, 5))
        verdict = gate.step({"a": range(2, 3)})
        assert verdict == Verdict(settled=2, discard=True)
        assert gate.unreached == (W(3, 5),)
        assert gate.step({"a": token(3)}).open == Opening(W(3, 5))

    def test_one_discarded_may_be_opened_again_in_the_same_breath(self) -> None:
        gate = make_gate([W(3, 5)])
        gate.step({"a": range(1, 5)})
        assert gate.step({"a": range(2, 6)}) == Verdict(
            2, discard=True, open=Opening(W(3, 5)), iteration=RecordedIteration(2, 6, "a")
        )

    def test_one_that_stopped_right_before_the_window_was_in_vain(self) -> None:
        gate = make_gate([W(3, 5)])
        gate.step({"a": range(1, 5)})
        assert gate.step({"a": range(3, 3)}) == Verdict(settled=3, discard=True)

    def test_an_opening_in_vain_by_a_request_that_ends_is_discarded(self) -> None:
        gate = make_gate([W(3, 5)])
        gate.step({"a": range(1, 5)})
        assert gate.step({}, {"a": 3}) == Verdict(settled=3, discard=True)

    def test_it_is_kept_where_the_end_is_told_without_a_count(self) -> None:
        gate = make_gate([W(3, 5)])
        gate.step({"a": range(1, 5)})
        assert gate.idle() == Verdict(close="request_end")

    def test_rows_say_what_was_really_made(self) -> None:
        [trace] = traces([step(a=range(4)), step(a=range(2, 6)), step({"a": 5})], (0, None))
        assert [(line.lo, line.hi) for line in trace.lines] == [(0, 2), (2, 5)]

    def test_an_iteration_started_past_the_end_of_a_request_is_a_gap(self) -> None:
        """Overlapped engines start one more before they learn of a stop token."""
        [trace] = traces([step(a=token(0)), step(a=token(1)), step({"a": 1})], (0, None))
        assert [line.gap for line in trace.lines] == [False, True]

    def test_the_window_is_complete_once_its_last_token_must_have_been_made(self) -> None:
        [trace] = traces([step(a=range(4, 8)), *pause(3)], (2, 5), (4, 5))
        assert events(trace) == [0]
        assert trace.reason == "window"

    def test_the_capture_goes_on_where_the_end_was_possible_but_not_reached(self) -> None:
        [trace] = traces([step(a=range(4)), step(a=range(1, 4)), step(a=range(3, 7))], (0, 3))
        assert [(line.lo, line.hi) for line in trace.lines] == [(0, 1), (1, 3)]


class TestWhenItCloses:
    """As early as the truth is known: a close stops the device, and nothing else must be in the trace."""

    def test_directly_after_an_iteration_whose_tokens_are_certain(self) -> None:
        gate = make_gate([W(0, 1)])
        assert gate.step({"a": token(0)}) == Verdict(
            open=Opening(W(0, 1)), iteration=RecordedIteration(0, 1, "a"), close_after="window"
        )
        assert not gate.armed
        assert gate.step({"a": token(1)}) is NO_ACTION

    def test_before_the_next_one_under_speculation(self) -> None:
        gate = make_gate([W(0, 2)])
        assert gate.step({"a": range(3)}).close_after is None
        assert gate.step({"a": range(2, 5)}) == Verdict(settled=2, close="window")


class TestPause:
    """A lead that makes no token inside its window: preempted, prefilled anew, or left out by a pipeline bubble."""

    def test_is_captured_as_gap_rows(self) -> None:
        rollout = [*decode(3, "a"), *pause(2), *pause(3, a=range(3, 3)), *decode(4, "a", first=3)]
        [trace] = traces(rollout, (1, 5))
        assert tokens(trace) == [1, 2, 3, 4]
        assert [line.event for line in trace.lines if line.gap] == [3, 4, 5, 6, 7]

    def test_of_eight_iterations_does_not_split_the_capture(self) -> None:
        [trace] = traces([*decode(3, "a"), *pause(8), *decode(4, "a", first=3)], (1, 5))
        assert len(trace.lines) == 4 + 8

    def test_several_short_ones_do_not_add_up(self) -> None:
        rollout = [*decode(3, "a"), *pause(5), *decode(1, "a", first=3), *pause(5), *decode(1, "a", first=4)]
        [trace] = traces(rollout, (1, 5))
        assert tokens(trace) == [1, 2, 3, 4]

    @pytest.mark.parametrize("quiet", [{}, {"a": range(3, 3)}], ids=["not scheduled", "prefilled anew"])
    def test_of_nine_does_and_the_rest_is_the_next_part(self, quiet: dict[str, range]) -> None:
        first, second = traces([*decode(3, "a"), *pause(9, **quiet), *decode(4, "a", first=3)], (1, 5))
        assert (first.part, tokens(first), first.reason) == (1, [1, 2], "gap")
        assert len(first.lines) == 2 + 8
        assert (second.part, tokens(second), second.reason) == (2, [3, 4], "window")

    def test_that_the_request_never_comes_back_from_leaves_the_window_captured(self) -> None:
        [trace] = traces([*decode(3, "a"), *pause(9), step({"a": 3}), *decode(9, "b")], (1, 5))
        assert trace.reason == "gap"

    def test_before_the_window_changes_nothing(self) -> None:
        [trace] = traces([*decode(3, "a"), *pause(30), *decode(9, "a", first=3)], (5, 7))
        assert events(trace) == [35, 36]

    def test_of_the_lead_is_not_ended_by_the_end_of_others(self) -> None:
        gate = make_gate([W(1, 3)])
        gate.step({"a": token(0), "b": token(0)})
        assert gate.step({}, {"b": 1}) is NO_ACTION
        assert gate.step({"a": token(1)}, {}).open == Opening(W(1, 3))

    def test_hides_for_a_while_that_a_kept_part_holds_nothing(self) -> None:
        """Better a part too many than tokens lost; it is no capture, and the window is still to come."""
        gate = make_gate([W(3, 5)])
        gate.step({"a": range(1, 5)})
        closes = [gate.step({}).close for _ in range(MAX_GAP + 1)]
        assert closes == [None] * MAX_GAP + ["gap"]
        assert not gate.unreached
        assert gate.step({"a": token(2)}) is PREPARE
        assert gate.unreached == (W(3, 5),)
        assert gate.step({"a": token(3)}).open == Opening(W(3, 5), part=2)

    def test_in_which_the_lead_turns_out_to_have_completed_the_window(self) -> None:
        gate = make_gate([W(3, 5), W(9, 10)])
        gate.step({"a": range(3, 8)})
        for _ in range(MAX_GAP + 1):
            gate.step({})
        assert gate.step({"a": token(6)}) is PREPARE  # for the next window
        assert gate.step({"a": token(9)}).open == Opening(W(9, 10))


class TestMaxIterations:
    """Counts every iteration in the trace, gaps too."""

    def test_closes_after_that_many(self) -> None:
        [trace] = traces(decode(20, "a"), (2, 12), max_iterations=3)
        assert (tokens(trace), trace.reason) == ([2, 3, 4], "max_iterations")

    def test_that_just_suffice_for_the_window_closes_for_the_window(self) -> None:
        [trace] = traces(decode(20, "a"), (2, 5), max_iterations=3)
        assert trace.reason == "window"

    def test_counts_gaps(self) -> None:
        [trace] = traces([*decode(4, "a"), *pause(5), *decode(9, "a", first=4)], (2, 9), max_iterations=4)
        assert events(trace) == [2, 3, 4, 5]

    def test_holds_over_all_parts_of_a_window(self) -> None:
        _, second = traces([*decode(3, "a"), *pause(9), *decode(9, "a", first=3)], (2, 9), max_iterations=11)
        assert (tokens(second), second.reason) == ([3, 4], "max_iterations")

    def test_holds_where_a_speculating_lead_pauses(self) -> None:
        [trace] = traces([step(a=range(2)), *pause(5)], (0, 9), max_iterations=1)
        assert events(trace) == [0]

    def test_does_not_turn_an_opening_in_vain_into_a_capture(self) -> None:
        gate = make_gate([W(3, 9)], max_iterations=1)
        gate.step({"a": range(1, 5)})
        assert gate.step({}).close == "max_iterations"
        gate.step({"a": token(2)})
        assert gate.step({"a": token(3)}).close_after == "max_iterations"
        assert not gate.armed

    def test_of_a_capture_that_was_in_doubt_and_holds_tokens(self) -> None:
        gate = make_gate([W(3, 9)], max_iterations=1)
        gate.step({"a": range(1, 5)})
        gate.step({})
        assert gate.step({"a": token(4)}) is NO_ACTION
        assert not gate.armed

    def test_of_a_batch_that_speculates_is_seen_to_one_iteration_later(self) -> None:
        gate = make_gate([W(2, 9)], track="any", max_iterations=1)
        assert gate.step({"a": range(2, 5)}).close_after is None
        assert gate.step({"a": token(4)}) == Verdict(settled=4, close="max_iterations")

    @pytest.mark.parametrize("track", ["any", "all"])
    def test_of_a_batch_waits_until_the_window_was_left(self, track: str) -> None:
        rollout = [*decode(8, "a"), Idle({"a": 8}), *decode(8, "b")]
        first, second = traces(rollout, (2, 6), track=track, max_iterations=2, max_captures=None)
        assert [tokens(first), tokens(second)] == [[2, 3], [2, 3]]
        assert {first.reason, second.reason} == {"max_iterations"}


class TestMaxCaptures:
    """Captures of each window, per arming."""

    ROUNDS = (*decode(9, "a"), Idle({"a": 9}), *decode(9, "b"), Idle({"b": 9}), *decode(9, "c"))

    @pytest.mark.parametrize("track", ["lead", "any", "all"])
    @pytest.mark.parametrize(("asked", "taken"), [(1, 1), (2, 2), (None, 3)])
    def test_are_taken_of_one_request_after_the_other(self, track: str, asked: int | None, taken: int) -> None:
        captured = traces(self.ROUNDS, (2, 4), track=track, max_captures=asked)
        assert [tokens(trace) for trace in captured] == [[2, 3]] * taken

    def test_are_counted_for_each_window(self) -> None:
        captured = traces(self.ROUNDS, (2, 4), (6, 7), max_captures=2)
        assert [trace.window for trace in captured] == [W(2, 4), W(6, 7)] * 2


class TestArming:
    """`arm: request`: start_profile arms, stop_profile disarms."""

    @staticmethod
    def run(gate: LeadGate, rollout: Rollout) -> list[Verdict]:
        return [gate.step(event.batch, event.ended) for event in rollout if isinstance(event, Step)]

    def test_nothing_happens_before(self) -> None:
        gate = LeadGate([W(2, 4)], armed=False)
        assert set(self.run(gate, decode(9, "a"))) == {NO_ACTION}
        assert gate.idle() is NO_ACTION
        assert gate.disarm() is NO_ACTION
        assert gate.furthest == -1

    def test_each_round_captures_its_own_window(self) -> None:
        gate = LeadGate([W(20, 30)], armed=False)
        for name in ("first", "second"):
            gate.arm()
            rows = [verdict.iteration for verdict in self.run(gate, decode(48, name)) if verdict.iteration]
            assert rows == [RecordedIteration(index, index + 1, name) for index in range(20, 30)]
            gate.idle({name: 48})
            assert gate.disarm() is NO_ACTION

    def test_a_stop_before_the_window_leaves_nothing_that_fires_later(self) -> None:
        gate = LeadGate([W(20, 30)], armed=False)
        gate.arm()
        self.run(gate, decode(10, "a"))
        assert gate.disarm() is NO_ACTION
        assert set(self.run(gate, decode(48, "b"))) == {NO_ACTION}
        assert gate.furthest == 9

    def test_a_stop_inside_the_window_closes_it(self) -> None:
        gate = LeadGate([W(2, 4)])
        self.run(gate, decode(3, "a"))
        assert gate.disarm() == Verdict(close="stop_profile")
        assert gate.disarm() is NO_ACTION

    def test_the_end_of_the_job_gives_its_own_reason(self) -> None:
        gate = LeadGate([W(2, 4)])
        self.run(gate, decode(3, "a"))
        assert gate.disarm("job_end") == Verdict(close="job_end")

    def test_a_start_inside_the_window_changes_nothing(self) -> None:
        gate = LeadGate([W(2, 4)])
        self.run(gate, decode(3, "a"))
        gate.arm()
        assert gate.step({"a": token(3)}).close_after == "window"

    def test_a_request_in_flight_leads_if_the_window_is_before_it(self) -> None:
        gate = LeadGate([W(20, 30)], armed=False)
        self.run(gate, decode(10, "a"))
        gate.arm()
        [opening] = [verdict.open for verdict in self.run(gate, decode(30, "a", first=10)) if verdict.open]
        assert opening == Opening(W(20, 30))

    @pytest.mark.parametrize("track", ["any", "all"])
    def test_what_a_request_made_before_is_not_seen(self, track: str) -> None:
        gate = make_gate([W(20, 30)], track=track, armed=False)
        gate.step({"a": token(11)})
        gate.arm()
        gate.step({"b": token(0)}, {"a": 12})
        assert gate.furthest == 0

    def test_without_windows_is_none(self) -> None:
        assert not make_gate([]).armed


class TestIdle:
    """The engine ran dry: every request has ended, whether it is named or not."""

    def test_closes_what_is_open(self) -> None:
        gate = make_gate([W(2, 9)])
        gate.step({"a": token(2)})
        assert gate.idle({"a": 3}) == Verdict(close="request_end")

    def test_without_a_lead_does_nothing(self) -> None:
        assert make_gate([W(2, 9)]).idle({"a": 3}) is NO_ACTION

    @pytest.mark.parametrize("track", ["any", "all"])
    def test_closes_a_batch(self, track: str) -> None:
        gate = make_gate([W(2, 9)], track=track)
        gate.step({"a": token(2)})
        assert gate.idle({"a": 3}) == Verdict(close="request_end")
        assert gate.idle() is NO_ACTION


class TestAny:
    """Captured while any request makes a token of the window."""

    def test_holds_from_the_first_request_to_the_last(self) -> None:
        rollout = [step(a=token(i + 3), b=token(i)) for i in range(9)]
        [trace] = traces(rollout, (4, 6), track="any")
        assert events(trace) == [1, 2]
        first, second = traces(rollout, (4, 6), track="any", max_captures=2)
        assert (events(first), events(second)) == ([1, 2], [4, 5])

    def test_ignores_prompts(self) -> None:
        [trace] = traces([step(a=range(2, 2)), step(a=token(2), b=range(0)), step(a=token(3))], (2, 3), track="any")
        assert events(trace) == [1]

    def test_ends_with_the_requests(self) -> None:
        [trace] = traces([step(a=token(2), b=token(2)), step({"a": 3, "b": None})], (2, 5), track="any")
        assert trace.reason == "request_end"

    def test_ends_with_the_window_where_one_request_left_it_and_one_ended(self) -> None:
        [trace] = traces([step(a=token(2), b=token(4)), step({"a": 3}, b=token(5))], (2, 5), track="any")
        assert trace.reason == "window"

    def test_ends_with_the_window_where_a_request_ended_at_its_end(self) -> None:
        [trace] = traces([step(a=token(4)), step({"a": 5})], (2, 5), track="any")
        assert trace.reason == "window"

    def test_discards_an_opening_in_vain(self) -> None:
        gate = make_gate([W(3, 5)], track="any")
        assert gate.step({"a": range(1, 5)}).open == Opening(W(3, 5))
        assert gate.step({"a": token(2)}) == Verdict(settled=2, discard=True)
        assert gate.step({"a": token(3)}).open == Opening(W(3, 5))

    def test_keeps_a_last_row_in_vain_as_a_gap(self) -> None:
        [trace] = traces(
            [step(a=token(4)), step(a=token(5), b=range(1, 5)), step(a=token(6), b=token(2))], (3, 5), track="any"
        )
        assert [line.gap for line in trace.lines] == [False, True]

    def test_keeps_a_row_whose_truth_is_never_told(self) -> None:
        [trace] = traces([step(a=range(1, 5)), step(), step()], (3, 5), track="any")
        assert [(line.lo, line.hi) for line in trace.lines] == [(1, 5)]

    def test_windows_at_their_caps_do_not_bar_each_other(self) -> None:
        rollout = [step(a=token(i), b=token(i + 20)) for i in range(9)]
        captured = traces(rollout, (0, 9), (20, 29), track="any", max_iterations=1, max_captures=None)
        assert [(trace.window, events(trace)) for trace in captured] == [(W(0, 9), [0]), (W(20, 29), [1])]


class TestAll:
    """Captured while every request that decodes makes a token of the window."""

    def test_holds_from_the_last_request_to_the_first(self) -> None:
        [trace] = traces([step(a=token(i + 3), b=token(i)) for i in range(20)], (4, 10), track="all")
        assert events(trace) == [4, 5, 6]

    def test_ignores_prompts(self) -> None:
        [trace] = traces([step(a=token(2), b=range(0)), step(a=token(3), b=token(0))], (2, 5), track="all")
        assert events(trace) == [0]

    def test_discards_an_opening_in_which_one_request_did_not_reach_the_window(self) -> None:
        gate = make_gate([W(3, 9)], track="all")
        assert gate.step({"a": range(1, 5), "b": token(4)}).iteration == RecordedIteration(1, 5, "a")
        assert gate.step({"a": token(2), "b": token(5)}).discard


class OnlyAsked(Mapping[str, range]):
    """A batch of which only single requests may be asked."""

    def __init__(self, *, iterable: bool = False, **batch: range) -> None:
        self.batch = batch
        self.iterable = iterable
        self.asked: list[str] = []

    def __getitem__(self, request: str) -> range:
        self.asked.append(request)
        return self.batch[request]

    def __iter__(self) -> Iterator[str]:
        assert self.iterable, "looked at every request"
        return iter(self.batch)

    def __len__(self) -> int:
        raise AssertionError("counted the requests")


class TestCost:
    """With a lead, an iteration costs one look-up, whatever the size of the batch."""

    def test_before_the_window_at_it_and_in_a_pause_only_the_lead_is_looked_at(self) -> None:
        gate = make_gate([W(3, 6)])
        gate.step({"lead": token(0), "other": token(0)})
        for made in (token(1), token(2), token(3), range(4, 4), range(4, 8)):
            batch = OnlyAsked(lead=made, other=token(1))
            gate.step(batch, {"someone": 5})
            assert set(batch.asked) == {"lead"}
        assert gate.is_open

    @pytest.mark.parametrize("track", ["any", "all"])
    def test_for_a_whole_batch_each_request_is_looked_at_once(self, track: str) -> None:
        gate = make_gate([W(1, 2), W(3, 4)], track=track)
        for index in range(5):
            batch = OnlyAsked(iterable=True, a=token(index), b=token(index))
            gate.step(batch)
            assert batch.asked == ["a", "b"]
        assert not gate.armed

    def test_most_iterations_are_answered_with_the_one_idle_verdict(self) -> None:
        gate = make_gate([W(50, 60)])
        answers = [gate.step({"a": token(index)}) for index in range(50)]
        assert [index for index, verdict in enumerate(answers) if verdict is not NO_ACTION] == [50 - PREPARE_AHEAD]
