"""Faults on the real vLLM and SGLang, whose forwards run in processes of their own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from clone import SUPPORT, python_path
from engine_fault_job import site
from fault_outcome import Outcome, job_environment
from waiting import wait_until

HERE = [engine for engine in ("vllm", "sglang") if importlib.util.find_spec(engine) is not None]
if not HERE:
    pytest.skip("no engine in this environment", allow_module_level=True)

ENGINE = HERE[0]
pytestmark = getattr(pytest.mark, f"engine_{ENGINE}")

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "SGLANG_USE_CPU_ENGINE": "1",
}

_plain: dict[str, Outcome] = {}
"""Runs without a window, which are the same for several tests."""


def run(folder: Path, fault: str, window: dict[str, Any] | None, ranks: int = 1) -> Outcome:
    folder.mkdir()
    environment = job_environment(folder, window) | ENVIRONMENT | {"ENGINE_FAULT": fault, "FAULT_RANKS": str(ranks)}
    if ranks > 1:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cpu) for cpu in range(ranks))
    environment["PYTHONPATH"] = python_path(site(folder / "site", ENGINE))
    command = [sys.executable, str(SUPPORT / "engine_fault_job.py"), ENGINE, str(folder / "models")]
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        done = subprocess.run(command, env=environment, cwd=folder, stdout=out, stderr=err, timeout=300, check=False)
    wait_until(lambda: not processes_of(folder), "no process of the job is left", seconds=60)
    return Outcome(done.returncode, (folder / "out").read_text(), (folder / "err").read_text(), folder / "profile")


def processes_of(folder: Path) -> list[int]:
    """Those that have the job's environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"FAULT_PIPE={folder}/".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def both(folder: Path, fault: str, **window: Any) -> tuple[Outcome, Outcome]:
    if fault not in _plain:
        _plain[fault] = run(folder / "plain", fault, None)
    return _plain[fault], run(folder / "windowed", fault, window)


def responses(outcome: Outcome) -> list[str]:
    """What the job has said itself: what came out, or the exception that ended it."""
    return [line for line in outcome.out if line.startswith(("responses:", "error:", "ended"))]


@pytest.mark.parametrize("state", ["open", "closed"])
def test_tokens_and_log_probabilities_are_those_without_a_window(tmp_path: Path, state: str) -> None:
    window = {"profile_token_start": 4, "profile_token_end": 10} if state == "open" else {"profile_token_start": 900}
    plain, windowed = both(tmp_path, "nothing", **{"profile_token_end": None, **window})
    assert plain.code == windowed.code == 0, windowed.err[-3000:]
    assert len(responses(plain)) == 2
    assert responses(windowed) == responses(plain)
    assert windowed.captured == ([[4, 5, 6, 7, 8, 9]] if state == "open" else [])
    assert windowed.leftovers == []


@pytest.mark.faults
def test_a_forward_that_raises_ends_the_capture_and_made_no_token(tmp_path: Path) -> None:
    plain, windowed = both(tmp_path, "raise")
    assert (windowed.code, responses(windowed)) == (plain.code, responses(plain)), windowed.err[-3000:]
    assert not any(line.startswith("responses:") for line in responses(plain))
    assert plain.code != 0
    (manifest,) = windowed.manifests
    assert (manifest["closed_by"], bool(manifest["trace"])) == ("error", True)
    assert [(row["lo"], row["hi"], row["tokens"]) for row in manifest["rows"]] == [(4, 5, 4), (5, 6, 4), (6, 6, 0)]
    assert windowed.leftovers == []


@pytest.mark.faults
def test_a_process_that_is_killed_within_the_window_leaves_a_word(tmp_path: Path) -> None:
    plain, windowed = both(tmp_path, "kill")
    assert (windowed.code, responses(windowed)) == (plain.code, responses(plain)), windowed.err[-3000:]
    assert not any(line.startswith("responses:") for line in responses(plain))
    (manifest,) = windowed.manifests
    assert (manifest["trace"], manifest["opened_by"], manifest["closed_by"]) == (None, "window", None)
    assert f"a capture was open in process {manifest['pid']} of " in windowed.notes
    assert "no engine reported an iteration" not in windowed.err
    assert windowed.leftovers == []


TWO_RANKS = {"all_ranks": True, "profile_token_start": None, "profile_token_end": None}
WINDOWS = {"profile_token_windows": [[1, 3], [4, 10]]}


@pytest.mark.faults
@pytest.mark.skipif(ENGINE != "vllm", reason="needs two ranks on a CPU")
def test_a_rank_that_is_lost_within_the_window(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", "kill_rank_1", None, ranks=2)
    windowed = run(tmp_path / "windowed", "kill_rank_1", {**TWO_RANKS, **WINDOWS}, ranks=2)
    assert (windowed.code, responses(windowed)) == (plain.code, responses(plain)), windowed.err[-3000:]
    assert windowed.captured == [[1, 2], [1, 2]], "what was complete is kept, of both ranks"
    (lost,) = (m for m in windowed.manifests if m["window"] == [4, 10] and m["rank"] == 1)
    assert (lost["trace"], lost["opened_by"], lost["closed_by"]) == (None, "window", None)
    (said,) = lost["notes"]
    assert said.startswith(f"a capture was open in process {lost['pid']} of ")
    assert any(line.endswith("no trace was written") and "tokens [4, 10)" in line for line in windowed.warnings)
    assert "no engine reported an iteration" not in windowed.err
    assert windowed.leftovers == []


@pytest.mark.faults
@pytest.mark.skipif(ENGINE != "vllm", reason="needs two ranks on a CPU")
def test_a_rank_that_never_writes_its_trace(tmp_path: Path) -> None:
    windowed = run(tmp_path / "windowed", "never_writes_rank_1", {"all_ranks": True}, ranks=2)
    assert windowed.code == 0, windowed.err[-3000:]
    assert len(responses(windowed)) == 2
    (kept,) = (m for m in windowed.manifests if m["trace"])
    assert (kept["rank"], [row["lo"] for row in kept["rows"]]) == (0, [4, 5, 6, 7, 8, 9])
    assert any("rank1" in line and "were not finished, because their process" in line for line in windowed.warnings)
