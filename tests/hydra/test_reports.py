"""`profiler.report: html` on a real rollout: a Hydra app in a process of its own, with transformers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clone import CLONE

pytest.importorskip("numpy")
pytest.importorskip("plotly")
pytest.importorskip("torch")

App = Callable[..., Any]
WINDOW = ("+profiler=torch_window", "profiler.profile_token_start=4", "profiler.profile_token_end=10")


def rollout(folder: Path, *arguments: str) -> str:
    """Roll out, and return the console."""
    script = str(CLONE / "examples" / "rollout.py")
    command = [sys.executable, script, *WINDOW, "response_tokens=16", f"hydra.run.dir={folder}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_page_beside_the_trace_of_a_real_rollout(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    console = rollout(tmp_path, "profiler.report=html")
    page = tmp_path / "profile" / "report.html"
    (trace,) = page.parent.glob("*.pt.trace.json.gz")
    assert f"report: {page}\n" in console
    text = page.read_text()
    assert "All that was asked for is here, and the traces agree with their manifests." in text
    assert trace.name in text
    assert '"x":[4,5,6,7,8,9]' in text
    assert {path.name for path in page.parent.iterdir()} == {
        page.name, trace.name, trace.name.replace(".pt.trace.json.gz", ".manifest.json")
    }  # fmt: skip


def test_job_that_fails_ends_as_it_would_and_has_its_page(app: App) -> None:
    pytest.importorskip("transformers")
    work = ("tokens=50", "at=12", "leave=exit")
    plain = app(*work)
    run = app(*work, *WINDOW, "profiler.report=html")
    assert run.code == plain.code == 7
    (page,) = run.folder.rglob("report.html")
    assert any(line.endswith(f"report: {page}") for line in run.ours)


def test_no_page_without_a_capture_or_without_the_setting(app: App) -> None:
    run = app(*WINDOW, "profiler.report=html")
    assert not any("report" in line for line in run.ours if "INFO" in line)
    app("tokens=12", *WINDOW)
    assert not list(run.folder.rglob("*.html"))


def test_wrong_value_stops_the_job_in_one_line(app: App) -> None:
    run = app("tokens=12", *WINDOW, "profiler.report=pdf")
    assert run.code == 1
    assert run.tasks == []
    assert "profiler.report='pdf': must be html, or null" in run.err.splitlines()
