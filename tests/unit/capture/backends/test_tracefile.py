"""From raw trace to kept trace, without a profiler."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from verl_profiler_conf.capture.backends import tracefile
from verl_profiler_conf.capture.backends.tracefile import pack

RAW = """
  {
    "schemaVersion": 1,
  "traceEvents": [
  {
    "ph": "X", "cat": "user_annotation", "name": "response_tokens[0:4) iter=0 reqs=1", "pid": 1
  },
  {
    "ph": "X", "cat": "kernel", "name": "response_tokens[0:4) iter=0 reqs=12", "pid": 1
  },
  {
    "ph": "X", "cat": "gpu_memcpy", "name": "say \\"response_tokens[0:4) iter=0 reqs=1\\"", "pid": 1
  }
  ],"traceName": "%s" }
"""


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    path = tmp_path / "raw.json"
    path.write_text(RAW % path)
    return path


@pytest.mark.parametrize("chunk", [7, 64, 300, 10_000])
def test_whatever_the_size_of_a_chunk(chunk: int, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracefile, "_CHUNK", chunk)
    events = pack(raw, tmp_path / "t.gz", {"response_tokens[0:4) iter=0 reqs=1": "response_tokens[0:2) iter=0 reqs=1"})
    text = gzip.decompress((tmp_path / "t.gz").read_bytes()).decode()
    assert events == 2
    expected = (RAW % (tmp_path / "t.gz")).replace(
        '"name": "response_tokens[0:4) iter=0 reqs=1"', '"name": "response_tokens[0:2) iter=0 reqs=1"'
    )
    assert text == expected


def test_names_that_begin_differently(raw: Path, tmp_path: Path) -> None:
    pack(raw, tmp_path / "t.gz", {"kernel": "seed", "gpu_memcpy": "copy", "absent": "x"})
    text = gzip.decompress((tmp_path / "t.gz").read_bytes()).decode()
    assert '"cat": "seed"' in text
    assert '"cat": "copy"' in text
    assert "absent" not in text


def test_cut_short(raw: Path, tmp_path: Path) -> None:
    raw.write_bytes(raw.read_bytes()[:200])
    with pytest.raises(OSError, match="cut short after 200 bytes"):
        pack(raw, tmp_path / "t.gz", {})
    assert not (tmp_path / "t.gz").exists()


def test_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="wrote no trace"):
        pack(tmp_path / "raw.json", tmp_path / "t.gz", {})


def test_never_over_an_older_file(raw: Path, tmp_path: Path) -> None:
    (tmp_path / "t.gz").write_text("old")
    with pytest.raises(FileExistsError):
        pack(raw, tmp_path / "t.gz", {})
    assert (tmp_path / "t.gz").read_text() == "old"


def test_a_refusing_disk_leaves_nothing(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        pack(raw, tmp_path / "t.gz", {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["raw.json"]
