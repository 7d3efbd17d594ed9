"""However a job ends, its capture is whole, and the job's own exception and exit code are what they would have been."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

App = Callable[..., Any]

ENDINGS = {
    "raise": "LookupError: the job's own error",
    "exit": "",
    "interrupt": "KeyboardInterrupt",
    "terminate": "",
}
"""How the app's task leaves in the middle of its window -> what it says on stderr."""


@pytest.mark.parametrize("how", ENDINGS)
def test_job_that_ends_inside_its_window(app: App, how: str) -> None:
    work = ("tokens=50", "at=12", f"leave={how}")
    plain = app(*work)
    run = app(*work, "+profiler=torch_window", "profiler.profile_token_start=8", "profiler.profile_token_end=40")
    assert run.code == plain.code != 0
    assert ENDINGS[how] in run.err
    if how == "raise":
        assert [line for line in run.err.splitlines() if "job's own" in line] == [
            line for line in plain.err.splitlines() if "job's own" in line
        ]
    (manifest,) = run.manifests()
    assert [(row["lo"], row["hi"]) for row in manifest["rows"]] == [(token, token + 1) for token in range(8, 13)]
    assert manifest["closed_by"] in ("error", "job_end")
    (trace,) = run.folder.rglob("*.pt.trace.json.gz")
    assert trace.name == manifest["trace"]
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("name", "").startswith("response_tokens[")]
    assert sorted(set(names)) == sorted(f"response_tokens[{t}:{t + 1}) iter={t} reqs=2" for t in range(8, 13))
    summary = [line for line in run.ours if "captured tokens 8-12 of [8, 40): " in line]
    assert len(summary) == 1
    assert f"5 iterations of loop, rank 0 -> {trace}" in summary[0]
    assert f"({trace.stat().st_size:,} bytes)" in summary[0]
    leftovers = [path.name for path in trace.parent.iterdir() if path.name.startswith(".")]
    assert leftovers == []


def test_window_reached_and_left(app: App) -> None:
    run = app("tokens=20", "+profiler=torch_window", "profiler.profile_token_windows=[[2,4],[10,13]]")
    assert run.code == 0, run.err
    windows = [(m["window"], [row["lo"] for row in m["rows"]], m["closed_by"]) for m in run.manifests()]
    assert sorted(windows) == [([2, 4], [2, 3], "window"), ([10, 13], [10, 11, 12], "window")]
    assert len([line for line in run.ours if "iterations of loop" in line]) == 2
    assert not any("WARNING" in line for line in run.ours)


def test_window_never_reached(app: App) -> None:
    run = app(
        "tokens=20", "+profiler=torch_window", "profiler.profile_token_start=100", "profiler.profile_token_end=120"
    )
    assert run.code == 0, run.err
    (manifest,) = run.manifests()
    assert manifest["trace"] is None
    assert manifest["furthest_token"] == 19
    (warning,) = (line for line in run.ours if "WARNING" in line)
    assert "the furthest response token seen is 19" in warning


def test_multirun_jobs_each_have_their_own_capture(app: App) -> None:
    run = app("-m", "tokens=20", "+profiler=torch_window", "profiler.profile_token_end=3,5")
    assert run.code == 0, run.err
    assert sorted(len(manifest["rows"]) for manifest in run.manifests()) == [3, 5]
    assert len({manifest["run_id"] for manifest in run.manifests()}) == 2


@pytest.mark.parametrize(("name", "tokens"), [("own_window", list(range(8))), ("plain", None)])
def test_launcher_that_composes_its_config_itself(app: App, name: str, tokens: list[int] | None) -> None:
    run = app("--config_name", name, file="composes.py")
    assert run.code == 0, run.err
    assert "RAN" in run.out
    captured = [[row["lo"] for row in manifest["rows"]] for manifest in run.manifests()]
    assert captured == ([] if tokens is None else [tokens])
    if tokens is not None:
        assert [path.parent for path in run.folder.rglob("*.pt.trace.json.gz")] == [run.folder / "profile"]


EARLY_ENDINGS = {
    "raise": "because the job failed (LookupError: the job's own error) before any engine reported an iteration",
    "interrupt": "because Ctrl-C ended the job before any engine reported an iteration",
    "terminate": "because SIGTERM ended the job before any engine reported an iteration",
    "exit": "because no engine reported an iteration; `verl-profiler doctor`",
}
"""How the app's task leaves before its first iteration -> why there is no capture. After sys.exit nothing is certain:
some apps end so."""


@pytest.mark.parametrize("how", EARLY_ENDINGS)
def test_job_that_ends_before_any_iteration(app: App, how: str) -> None:
    plain = app(f"leave={how}")
    run = app(f"leave={how}", "+profiler=torch_window", "profiler.profile_token_end=40")
    assert run.code == plain.code != 0
    (warning,) = (line for line in run.ours if "no capture" in line)
    assert f"tokens [0, 40): no capture, {EARLY_ENDINGS[how]}" in warning
    assert ("doctor" in warning) == (how == "exit")
    assert ("left by sys.exit" in warning) == (how == "exit")


def test_job_that_fails_before_its_window(app: App) -> None:
    run = app("tokens=9", "at=5", "leave=raise", "+profiler=torch_window", "profiler.profile_token_start=8")
    (warning,) = (line for line in run.ours if "WARNING" in line and "never reached" in line)
    assert "the furthest response token seen is 5" in warning
    assert warning.endswith("no trace was written; the job failed (LookupError: the job's own error)")
