"""Hooks in what an engine calls in every iteration: they are taken out again while no capture can come of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Around = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes the hooked function of a plain one."""


class SwappedMethod:
    """A method of a class, and the function that stands in its place while it is hooked.

    It is a plain function. Called in every iteration, with caches that the iteration has emptied, a wrapt wrapper takes
    three times as long.
    """

    def __init__(self, owner: type, name: str, around: Around) -> None:
        self._owner = owner
        self._name = name
        self._plain = vars(owner)[name]
        self._hooked = around(self._plain)

    def put_in(self) -> None:
        """Hook the method from its next call on. Leaves alone what other code has put there meanwhile."""
        if vars(self._owner).get(self._name) is self._plain:
            setattr(self._owner, self._name, self._hooked)

    def take_out(self) -> None:
        """Unhook the method from its next call on. Leaves alone what other code has put there meanwhile."""
        if vars(self._owner).get(self._name) is self._hooked:
            setattr(self._owner, self._name, self._plain)
