"""How many iterations an engine file leaves out."""

from __future__ import annotations

import pytest

from verl_profiler_conf.engines.skipping import MAX_SKIPPED, SkipBudget, skippable


@pytest.mark.parametrize(
    ("headroom", "max_drafts", "in_flight", "expected"),
    [
        (0, 0, 0, 0),
        (10, 0, 0, 9),  # what is put to the session next makes the tenth
        (10, 0, 1, 8),
        (10, 0, 3, 6),
        (10, 3, 0, 1),  # each iteration may make four tokens
        (10, 3, 1, 0),
        (3, 3, 0, 0),
        (10**6, 0, 1, MAX_SKIPPED),
    ],
)
def test_no_request_reaches_the_window_in_a_skipped_iteration(
    headroom: int, max_drafts: int, in_flight: int, expected: int
) -> None:
    skipped = skippable(headroom, max_drafts=max_drafts, in_flight=in_flight)
    assert skipped == expected
    assert not skipped or (skipped + 1 + in_flight) * (1 + max_drafts) <= headroom


def test_skipped_iterations_are_counted_once() -> None:
    budget = SkipBudget()
    assert budget.settle() == 0
    budget.grant(5)
    budget.left -= 2
    assert budget.settle() == 2
    assert (budget.left, budget.settle()) == (0, 0)
