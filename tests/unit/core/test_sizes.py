"""Sizes as people write them."""

from __future__ import annotations

import pytest

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.sizes import parse_size, size_text


@pytest.mark.parametrize(
    ("value", "size"), [(0, 0), (7, 7), ("7", 7), ("7B", 7), ("2 KiB", 2048), ("1GiB", 2**30), ("3TiB", 3 * 2**40)]
)
def test_read(value: object, size: int) -> None:
    assert parse_size(value, "k") == size


@pytest.mark.parametrize("value", [None, True, -1, 1.5, "", "GiB", "1GB", "1 gib", "-1", "1.5GiB", [], "9" * 16])
def test_refused_in_one_line(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^k=.*must be a size: bytes, or text with KiB, MiB, GiB, TiB, as in 1GiB$"):
        parse_size(value, "k")


@pytest.mark.parametrize(("size", "text"), [(0, "0 bytes"), (182044, "182,044 bytes"), (2**31, "2.0 GiB")])
def test_shown(size: int, text: str) -> None:
    assert size_text(size) == text
