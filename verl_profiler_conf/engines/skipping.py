"""Iterations that an engine file need not put to the session, because no request can reach a window in them."""

from __future__ import annotations

MAX_SKIPPED = 64
"""Iterations in a row that are skipped at most.

Few enough that the furthest token is nearly right even where a process ends without a last call.
"""


def skippable(headroom: int, *, max_drafts: int, in_flight: int) -> int:
    """How many of the coming iterations can be skipped.

    Args:
        headroom: tokens that each request can still make before a capture could begin.
        max_drafts: drafts that an iteration verifies at most for a request. All of them may be accepted.
        in_flight: iterations under way whose results are not known. Near the window their results are wanted.
    """
    return min(max(headroom // (1 + max_drafts) - max(in_flight, 1), 0), MAX_SKIPPED)


class SkipBudget:
    """Counts skipped iterations down. An engine file takes one from `left` for each, while there are any."""

    __slots__ = ("granted", "left")

    def __init__(self) -> None:
        self.left = 0
        self.granted = 0

    def grant(self, iterations: int) -> None:
        """Allow so many iterations to be skipped."""
        self.left = self.granted = iterations

    def settle(self) -> int:
        """How many were skipped since the grant, which ends here."""
        skipped = self.granted - self.left
        self.left = self.granted = 0
        return skipped
