"""Takes one attribute away from an engine's object, wherever it lies in it."""

from __future__ import annotations

from typing import Any


def take_away(thing: Any, path: str) -> None:
    """Remove the attribute at `path` from an object, such as `sampling_params.max_tokens`.

    `*` stands for all items of a list. An attribute that is not there is no error: not every object has all of them.
    """
    name, _, below = path.partition(".")
    if name == "*":
        for item in thing:
            take_away(item, below)
    elif below:
        if hasattr(thing, name):
            take_away(getattr(thing, name), below)
    elif hasattr(thing, name):
        delattr(thing, name)
