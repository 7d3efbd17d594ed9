"""Raw settings, read one by one by the type that they must have. Which values make sense is not decided here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.numbers import is_integer
from verl_profiler_conf.core.window import MAX_TOKEN


class RawSettings:
    """A mapping of plain values. Every method returns a checked value or raises a `ConfigError` with the full key.

    Args:
        values: field name -> plain value; every key is optional.
        prefix: path of the node in its config, for example `train.prof.`. Messages put it before each key.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str) -> None:
        self.values = values
        self.prefix = prefix

    def refuse_unknown(self, known: Collection[str]) -> None:
        for key, value in self.values.items():
            if key not in known:
                raise self.error(key, value, f"no such setting; there are {', '.join(sorted(known))}")

    def choice(self, key: str, allowed: Sequence[str], default: str) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise self.error(key, value, f"must be one of {', '.join(allowed)}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "must be true or false")
        return value

    def number(self, key: str, default: int, *, least: int) -> int:
        value = self.values.get(key, default)
        if not is_integer(value) or not least <= value <= MAX_TOKEN:
            raise self.error(key, value, f"must be an integer from {least} to {MAX_TOKEN}")
        return value

    def optional_number(self, key: str, default: int | None, *, least: int) -> int | None:
        value = self.values.get(key, default)
        if value is None:
            return None
        if not is_integer(value) or not least <= value <= MAX_TOKEN:
            raise self.error(key, value, f"must be an integer from {least} to {MAX_TOKEN}, or null")
        return value

    def text(self, key: str) -> str | None:
        """The text; None where it is null or empty."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, value, "must be text, or null")
        return value or None

    def sequence(self, key: str, allowed: str, default: Sequence[Any] = ()) -> list[Any]:
        value = self.values.get(key, default)
        if value is None:
            value = default
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise self.error(key, value, f"must be {allowed}")
        return list(value)

    def error(self, key: str, value: object, allowed: str) -> ConfigError:
        return ConfigError(f"{self.prefix}{key}", value, allowed)
