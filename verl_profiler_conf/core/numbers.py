"""What counts as a number in settings and schedules."""

from __future__ import annotations

from typing import TypeGuard


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer. `True` and `False` are not: Python counts them as 1 and 0."""
    return isinstance(value, int) and not isinstance(value, bool)
