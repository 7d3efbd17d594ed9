"""Sizes of files, as people write them: `1GiB`, `512 MiB`, or a number of bytes."""

from __future__ import annotations

import re

from verl_profiler_conf.core.errors import ConfigError

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
MOST = 2**63 - 1
_SIZE = re.compile(r"(\d{1,15}) ?([KMGT]iB|B)?")


def parse_size(value: object, key: str) -> int:
    """A size in bytes.

    Args:
        value: an integer from 0, or text with a unit.
        key: of the setting, for the message.

    Raises:
        ConfigError: neither.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(key, value, f"must be a size: bytes, or text with {', '.join(list(UNITS)[2:])}, as in 1GiB")
    return int(match[1]) * UNITS[match[2] or ""]


def size_text(size: int) -> str:
    """`182,044 bytes`, `12.3 MiB`: for people."""
    for unit in ("GiB", "MiB"):
        if size >= UNITS[unit]:
            return f"{size / UNITS[unit]:.1f} {unit}"
    return f"{size:,} bytes"
