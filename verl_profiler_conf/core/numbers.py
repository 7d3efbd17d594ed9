"""What counts as an integer in a configuration."""

from __future__ import annotations

from typing import TypeGuard


def is_integer(value: object) -> TypeGuard[int]:
    """Whether `value` is an integer. Python counts True and False as integers; a configuration does not."""
    return isinstance(value, int) and not isinstance(value, bool)
