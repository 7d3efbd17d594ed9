"""When the gate asks for the device profiler to be prepared."""

from __future__ import annotations

import pytest

from verl_profiler_conf.core.gate import NO_ACTION, PREPARE, make_gate
from verl_profiler_conf.core.gate.lead import PREPARE_AHEAD
from verl_profiler_conf.core.window import TokenWindow


def asked(windows: list[tuple[int, int]], tokens: int, *, name: str = "a", most: int = 1) -> list[int]:
    """Tokens before which the gate asked."""
    gate = make_gate([TokenWindow(*window) for window in windows], max_captures=None)
    return [token for token in range(0, tokens, most) if gate.step({name: range(token, token + most)}) is PREPARE]


def test_once_and_a_few_tokens_ahead() -> None:
    assert asked([(20, 22)], 40) == [20 - PREPARE_AHEAD]


def test_before_each_window() -> None:
    assert asked([(20, 22), (40, 41)], 60) == [20 - PREPARE_AHEAD, 40 - PREPARE_AHEAD]


def test_not_where_the_next_window_follows_at_once() -> None:
    assert asked([(20, 22), (22, 24)], 40) == [20 - PREPARE_AHEAD]


@pytest.mark.parametrize("start", [0, 1])
def test_without_tokens_ahead_at_the_first_that_there_is(start: int) -> None:
    assert asked([(start, start + 2)], 10) == list(range(start))


def test_speculation_may_jump_over_it() -> None:
    assert asked([(20, 22)], 40, most=8) == []


def test_again_for_a_new_lead() -> None:
    gate = make_gate([TokenWindow(20, 22)])
    for token in range(18):
        gate.step({"a": range(token, token + 1)})
    answers = [gate.step({"b": range(token, token + 1)}, {"a": 18} if token == 0 else {}) for token in range(20)]
    assert [token for token, verdict in enumerate(answers) if verdict is not NO_ACTION] == [20 - PREPARE_AHEAD]
    assert answers[20 - PREPARE_AHEAD] is PREPARE


def test_a_prompt_in_chunks_asks_for_nothing() -> None:
    gate = make_gate([TokenWindow(3, 5)])
    assert [gate.step({"a": range(0)}) for _ in range(3)] == [NO_ACTION] * 3
    assert gate.step({"a": range(1)}) is PREPARE


@pytest.mark.parametrize("track", ["any", "all"])
def test_a_batch_is_not_looked_at_ahead(track: str) -> None:
    gate = make_gate([TokenWindow(20, 22)], track=track)
    assert all(gate.step({"a": range(token, token + 1)}) is NO_ACTION for token in range(20))
