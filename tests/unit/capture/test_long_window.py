"""A window of 5,000 iterations with torch's profiler, for real: every iteration lies in exactly one part."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

torch = pytest.importorskip("torch")

from verl_profiler_conf.capture.backends import backlog, engine_idle, torch_recording  # noqa: E402
from verl_profiler_conf.capture.manifest import gather  # noqa: E402
from verl_profiler_conf.capture.ranges import RANGE  # noqa: E402
from verl_profiler_conf.capture.session import Session  # noqa: E402
from verl_profiler_conf.capture.writer import Writer  # noqa: E402
from verl_profiler_conf.core.settings import Settings  # noqa: E402

ITERATIONS = 5_000


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
def test_a_window_of_5000_iterations(tmp_path: Path) -> None:
    raw = {"profile_token_start": 10, "profile_token_end": 10 + ITERATIONS, "save_path": str(tmp_path), "run_id": "job"}
    writer = Writer()
    session = Session(Settings.from_mapping(raw), engine="toy", version="1", writer=writer)
    value = torch.ones(3)
    sizes = []
    for token in range(ITERATIONS + 20):
        session.begin({"r": range(token, token + 1)})
        value = torch.cos(value)
        session.end()
        if token % 500 == 0 and Path("/proc/self/statm").exists():
            sizes.append(resident_mib())
    session.close()
    assert writer.flush(300)
    parts = sorted(gather(tmp_path, "job"), key=lambda manifest: manifest.part)
    assert [manifest.part for manifest in parts] == list(range(1, 21))
    assert [row.lo for manifest in parts for row in manifest.rows] == list(range(10, 10 + ITERATIONS))
    assert all(row.operators == 1 for manifest in parts for row in manifest.rows)
    found = []
    for manifest in parts:
        assert manifest.trace is not None
        assert manifest.opening_stall_ns > 0
        with gzip.open(tmp_path / manifest.trace, "rt") as file:
            events = json.load(file)["traceEvents"]
        ranges = [event for event in events if event.get("cat") == "user_annotation" and RANGE.match(event["name"])]
        operators = [event for event in events if event.get("cat") == "cpu_op"]
        assert len(ranges) == len(operators) == len(manifest.rows)
        found += [int(re.findall(r"\[(\d+):", event["name"])[0]) for event in ranges]
    assert found == list(range(10, 10 + ITERATIONS))
    assert not list(tmp_path.glob(".*"))
    if len(sizes) > 2:
        assert sizes[-1] - sizes[1] < 60, "parts that are written must not add up in memory"


def test_a_writer_that_does_not_keep_up_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it packs only while the engine stands still."""
    pack, limit = torch_recording.pack, 2

    def pack_late(*args: Any, **kwargs: Any) -> Any:
        wait_until(lambda: engine_idle._is_idle, "the engine waits")
        return pack(*args, **kwargs)

    monkeypatch.setattr(torch_recording, "pack", pack_late)
    monkeypatch.setattr(backlog, "LIMIT", 1)
    raw = {"profile_token_end": 200, "part_iterations": 20, "save_path": str(tmp_path), "run_id": "job"}
    writer = Writer()
    session = Session(Settings.from_mapping(raw), engine="toy", version="1", writer=writer)
    waiting = []
    for token in range(220):
        session.begin({"r": range(token, token + 1)})
        torch.cos(torch.ones(3))
        session.end()
        waiting.append(len(list(tmp_path.glob(".kineto-*.json"))))
    session.idle({"r": 220})
    session.close()
    assert writer.flush(300)
    parts = sorted(gather(tmp_path, "job"), key=lambda manifest: manifest.part)
    assert [row.lo for manifest in parts for row in manifest.rows] == list(range(200))
    assert all(manifest.trace for manifest in parts)
    assert len(parts) == 10
    assert 1 <= max(waiting) <= limit
