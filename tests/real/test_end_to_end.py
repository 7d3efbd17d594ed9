"""The same workloads on every engine: the trace holds the iterations of the window, whole, and no other's.

Run with the environment of an engine; what is checked is the trace, against a log that the package has no part in.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from oracle import Expected, Run, check, expect_crowd, expect_lead, read_trace
from workloads import WORKLOADS, Workload

ENGINES = ("vllm", "sglang")
HERE = [engine for engine in ENGINES if importlib.util.find_spec(engine) is not None]
if not HERE:
    pytest.skip("no engine in this environment", allow_module_level=True)

ENGINE = HERE[0]
DRIVER = importlib.import_module(f"{ENGINE}_driver")
pytestmark = getattr(pytest.mark, f"engine_{ENGINE}")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    driver = DRIVER.Driver(tmp_path_factory.mktemp("models"))
    yield driver
    driver.close()


def windows(workload: Workload) -> list[tuple[int, int | None]]:
    several = workload.settings.get("profile_token_windows")
    if several:
        return [tuple(pair) for pair in several]
    return [(workload.settings["profile_token_start"] or 0, workload.settings["profile_token_end"])]


def expected_captures(workload: Workload, run: Run) -> list[Expected]:
    track = workload.settings.get("track", "lead")
    logs = run.rounds if workload.settings.get("arm") == "request" else [run.log]
    skips = workload.settings.get("skip_captures", 0)
    if track == "lead":
        return [capture for log in logs for capture in expect_lead(log, windows(workload), skips)]
    window, everyone = windows(workload)[0], track == "all"
    return [c for log in logs for c in expect_crowd(log, window, everyone=everyone, skip_captures=skips)]


def lead_paused(run: Run) -> bool:
    lead = next(iter(run.log[0].made))
    seen = [it.number for it in run.log if lead in it.made]
    return seen != list(range(len(seen)))


def someone_paused(run: Run) -> bool:
    first, last, seen = {}, {}, {}
    for it in run.log:
        for request in it.made:
            first.setdefault(request, it.number)
            last[request] = it.number
            seen[request] = seen.get(request, 0) + 1
    return any(last[request] - first[request] + 1 > seen[request] for request in seen)


def chunks(run: Run) -> bool:
    return sum(not made for it in run.log for made in it.made.values()) > 3


def drafts_partly_accepted(run: Run) -> bool:
    lead = next(iter(run.log[0].made))
    lengths = {len(it.made[lead]) for it in run.log if lead in it.made}
    return 1 in lengths and max(lengths) > 1


DIFFICULTIES = {
    "preempted_lead": lead_paused,
    "preempted_others": someone_paused,
    "chunked": chunks,
    "chunked_no_overlap": chunks,
    "long_prompt": chunks,
    "ngram": drafts_partly_accepted,
    "draft": drafts_partly_accepted,
    "skip_ngram": drafts_partly_accepted,
}
"""A workload that has lost its difficulty would prove nothing."""


def by_build(workload: Workload) -> tuple[str, str]:
    return workload.build.speculation or "", repr(workload.build)


EVERY_VERSION = ("staggered", "early_ends", "two_rounds", "preempted_lead", "chunked", "ngram", "draft")
"""Run on all releases of an engine that there are environments for; the others on the newest."""

PARAMETERS = [
    pytest.param(w, id=w.name, marks=[pytest.mark.every_version] if w.name in EVERY_VERSION else [])
    for w in sorted(WORKLOADS, key=by_build)
    if getattr(DRIVER, "runs", lambda _: True)(w)
]


@pytest.mark.parametrize("workload", PARAMETERS)
def test_trace_holds_the_window(driver: Any, workload: Workload, tmp_path: Path) -> None:
    run = driver.run(workload, tmp_path)
    assert sorted(run.responses) == sorted(workload.responses * workload.rounds), "the job itself went as it should"

    if workload.name in DIFFICULTIES:
        assert DIFFICULTIES[workload.name](run), "the workload is what it says"

    expected = expected_captures(workload, run)
    traces = [read_trace(path) for path in run.folder.glob("*.pt.trace.json.gz")]
    assert len(traces) == len(expected)
    for trace, capture in zip(sorted(traces, key=lambda trace: trace.markers["begin"]), expected, strict=True):
        check(trace, capture, run.log)
    manifests = [json.loads(path.read_text()) for path in run.folder.glob("*.manifest.json")]
    assert sorted(m["trace"] for m in manifests if m["trace"]) == sorted(trace.path.name for trace in traces)
    if not expected:
        assert [(m["trace"], m["furthest_token"]) for m in manifests] == [(None, max(workload.responses) - 1)]
