"""Who is in the batch that an SGLang scheduler runs, and which requests are followed from iteration to iteration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl_profiler_conf.engines.sglang.request import ARTIFICIAL


class Members:
    """Costs the same for any batch, as long as one request is asked about and the batch has the same members."""

    def __init__(self) -> None:
        self.followed: dict[str, Any] = {}
        """Requests whose tokens were asked for in the iteration before: their end will be asked for, too."""
        self.asked: dict[str, Any] = {}
        """Those of this iteration."""
        self.complete: set[str] = set()
        """Members whose last token is in flight. Up to some release SGLang runs them once more."""
        self.absent: dict[str, int] = {}
        """Followed requests that are not in the batch -> for how many iterations."""
        self._reqs: list[Any] = []
        self._mark: tuple[int, Any] = (-1, None)
        """Number of members, and the last one: SGLang changes its list in place."""
        self._known_rows: dict[str, int] = {}
        self._all_rows: dict[str, int] | None = None

    def take(self, reqs: list[Any]) -> None:
        """The next iteration runs these."""
        mark = (len(reqs), reqs[-1] if reqs else None)
        if reqs is not self._reqs or mark != self._mark:
            self._reqs, self._mark = reqs, mark
            self._known_rows, self._all_rows, self.complete = {}, None, set()

    def rows(self) -> dict[str, int]:
        """Real request -> its row, in scheduling order. Proportional to the batch, once per change of its members."""
        if self._all_rows is None:
            self._all_rows = {req.rid: row for row, req in enumerate(self._reqs) if not req.rid.startswith(ARTIFICIAL)}
        return self._all_rows

    def unfinished(self) -> Iterator[str]:
        """Real requests that have tokens to come."""
        return (request for request in self.rows() if request not in self.complete)

    def find(self, request: str) -> int:
        """The row of `request`, -1 where it is not in the batch or has no tokens to come.

        It is followed from then on.
        """
        row = self._known_rows.get(request)
        if row is None:
            if self._all_rows is not None:
                row = self._all_rows.get(request, -1)
            else:
                row = next((row for row, req in enumerate(self._reqs) if req.rid == request), -1)
            self._known_rows[request] = row
        if request in self.complete:
            return -1
        if row >= 0:
            self.asked[request] = self._reqs[row]
            if self.absent:
                self.absent.pop(request, None)
        elif request in self.followed:
            self.asked[request] = self.followed[request]
            self.absent[request] = self.absent.get(request, 0) + 1
        return row

    def all_followed(self) -> dict[str, Any]:
        """Those that were asked about in this iteration or in the one before."""
        return {**self.followed, **self.asked}

    def turn(self, *, keep_all: bool) -> dict[str, Any]:
        """An iteration has passed: those asked about in it are followed, with `keep_all` those from before as well."""
        self.followed = self.all_followed() if keep_all else self.asked
        self.asked = {}
        return self.followed
