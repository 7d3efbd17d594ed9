"""The memory snapshot's file, which a page on the web has to read."""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from verl_profiler_conf.capture.backends import memory


def test_snapshot_is_readable_by_memory_viz_whatever_pythons_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = pickle.dump

    def dump(value: Any, file: BinaryIO, protocol: int = 5) -> None:
        """As in Python 3.14, whose default is 5."""
        plain(value, file, protocol)

    monkeypatch.setattr(pickle, "dump", dump)
    event = {"action": "alloc", "addr": 1 << 40, "size": 512, "frames": [], "user_metadata": "response_tokens[2:3)"}
    snapshot = {"segments": [], "device_traces": [[event]]}
    written = memory.MemoryRecording(snapshot, has_names=True).write(tmp_path / "capture", {})
    assert written.path is not None
    data = written.path.read_bytes()
    (protocol,) = (argument for opcode, argument, _ in pickletools.genops(data) if opcode.name == "PROTO")
    assert protocol == 4
    assert pickle.loads(data)["device_traces"] == [[event]]  # noqa: S301 - written a moment ago
