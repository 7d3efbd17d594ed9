"""Whatever happens between the begin and the end of a recording of torch's: it is off afterwards. Each in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from verl_profiler_conf.capture.manifest import Manifest, gather

APP = Path(__file__).parents[2] / "support" / "apps" / "interrupted_loop.py"


@dataclass
class Outcome:
    code: int
    out: list[str]
    log: str
    manifests: list[Manifest]

    @property
    def tokens(self) -> list[list[int]]:
        return [[row.lo for row in manifest.rows] for manifest in self.manifests if manifest.trace]


def run(folder: Path, *arguments: str, window: tuple[int, int] = (2, 5)) -> Outcome:
    settings = {
        "profile_token_start": window[0],
        "profile_token_end": window[1],
        "device": "cpu",
        "save_path": str(folder),
        "run_id": "job",
    }
    done = subprocess.run(
        [sys.executable, str(APP), *arguments],
        env={**os.environ, "VERL_PROFILER_CONF": json.dumps(settings)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Outcome(done.returncode, done.stdout.splitlines(), done.stderr, gather(folder, "job"))


OFF = ["on: False", "grew: False"]


@pytest.mark.parametrize("how", ["start_raises_late", "stop_raises_before", "stop_raises_after"])
def test_where_torch_raises(how: str, tmp_path: Path) -> None:
    outcome = run(tmp_path, how)
    assert (outcome.code, outcome.out) == (0, OFF), outcome.log
    assert [manifest.closed_by for manifest in outcome.manifests] == ["error"]
    assert "injected" in outcome.manifests[0].notes[0]


@pytest.mark.parametrize(
    ("function", "tokens"), [("_prepare_profiler", []), ("_enable_profiler", []), ("_disable_profiler", [[2, 3, 4]])]
)
def test_where_ctrl_c_comes_within_torchs_call(function: str, tokens: list[list[int]], tmp_path: Path) -> None:
    outcome = run(tmp_path, "interrupt", function)
    assert (outcome.code, outcome.out) == (0, ["interrupted", *OFF]), outcome.log
    assert outcome.tokens == tokens


@pytest.mark.parametrize(
    ("how", "said"),
    [("exit", []), ("work", OFF), ("profile", ["own: True"]), ("loop", [])],
)
def test_where_the_process_forks_in_its_window(how: str, said: list[str], tmp_path: Path) -> None:
    outcome = run(tmp_path, "fork", how)
    assert (outcome.code, outcome.out) == (0, [*said, "child: 7", *OFF]), outcome.log
    assert outcome.tokens == [[2, 3, 4]]
    assert len(outcome.manifests) == 1


def test_a_child_that_is_forked_after_a_capture_ends_in_the_ordinary_way(tmp_path: Path) -> None:
    outcome = run(tmp_path, "fork_after")
    assert (outcome.code, outcome.out) == (0, ["child: 7"]), outcome.log


def test_where_the_job_ends_while_another_thread_is_in_its_window(tmp_path: Path) -> None:
    outcome = run(tmp_path, "end_while_a_thread_is_inside", "close", window=(2, 30))
    assert (outcome.code, outcome.out) == (0, ["closed", *OFF]), outcome.log
    assert outcome.tokens == [[2, 3]]
    assert outcome.manifests[0].closed_by == "job_end"


def test_where_sigterm_comes_while_another_thread_is_in_its_window(tmp_path: Path) -> None:
    outcome = run(tmp_path, "end_while_a_thread_is_inside", "sigterm", window=(2, 30))
    assert (outcome.code, outcome.out) == (-15, []), outcome.log
    assert outcome.tokens == [[2, 3]]
    assert outcome.manifests[0].closed_by == "job_end"


def test_where_the_main_thread_leaves_in_its_window(tmp_path: Path) -> None:
    outcome = run(tmp_path, "exits_inside")
    assert outcome.code == 7, outcome.log
    assert outcome.tokens == [[2, 3]]
