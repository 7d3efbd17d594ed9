"""One message for all keys that contradict a preset, so that a user sees all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_profiler_conf.core.errors import ConfigError


class ConflictsError(ConfigError):
    """Several settings that cannot be used. The text is a line with their number, then a line for each."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        super().__init__(errors[0].key, errors[0].value, errors[0].allowed)
        self.errors = tuple(errors)
        lines = "\n".join(f"  {error}" for error in errors)
        self.args = (f"{len(errors)} keys contradict the preset:\n{lines}",)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.errors,)


def one_message(errors: Sequence[ConfigError]) -> ConfigError:
    """One error for all; a single one stays as it is."""
    return errors[0] if len(errors) == 1 else ConflictsError(errors)
