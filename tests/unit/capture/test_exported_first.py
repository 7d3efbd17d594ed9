"""A capture that makes way for a profiler of the job is exported before that profiler is prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from verl_profiler_conf.capture.backends import pending  # noqa: E402
from verl_profiler_conf.capture.manifest import gather  # noqa: E402
from verl_profiler_conf.capture.session import Session  # noqa: E402
from verl_profiler_conf.capture.writer import Writer  # noqa: E402
from verl_profiler_conf.core.settings import Settings  # noqa: E402


def test_a_profiler_of_the_job_inside_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[int] = []
    original = torch.autograd.profiler._prepare_profiler

    def prepare(*args: Any, **kwargs: Any) -> Any:
        waiting.append(len(pending._guard.recordings))
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.autograd.profiler, "_prepare_profiler", prepare)
    raw = {"profile_token_start": 0, "profile_token_end": 6, "save_path": str(tmp_path), "run_id": "job"}
    writer = Writer()
    session = Session(Settings.from_mapping(raw), engine="toy", version="1", writer=writer)
    for token in range(6):
        session.begin({"r": range(token, token + 1)})
        torch.sin(torch.ones(3))
        session.end()
        if token == 2:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                torch.cos(torch.ones(3))
    session.close()
    assert writer.flush(60)
    assert waiting == [0, 0, 0]  # ours, the job's, and ours again: nothing was pending when one was prepared
    parts = gather(tmp_path, "job")
    assert [manifest.closed_by for manifest in parts] == ["other_profiler", "window"]
    assert [row.lo for manifest in parts for row in manifest.rows] == list(range(6))
