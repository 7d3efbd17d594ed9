"""The errors that this package raises on purpose. Their text is one line and says what to do."""

from __future__ import annotations

from typing import Any


class ConfigError(ValueError):
    """A setting that cannot be used. Its text is one line: the key, the value given, and what is allowed."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        self.key = key
        self.value = value
        self.allowed = allowed
        super().__init__(f"{key}={_one_line(value)}: {allowed}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Python's default passes the message as the only argument, and unpickling in a launcher's worker would fail.
        return type(self), (self.key, self.value, self.allowed)


class UnavailableError(RuntimeError):
    """The device profiler that was asked for cannot work here. Its text says why and what to do."""


def why_no_capture(error: Exception) -> str:
    """The reason, for logs and manifests. An `UnavailableError` says all; of any other failure the type matters."""
    if isinstance(error, UnavailableError):
        return f"no capture: {error}"
    return f"profiling stopped by a failure: {type(error).__name__}: {error}"


def _one_line(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4300 digits.
        return f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
