"""Faults on the real vLLM and SGLang, whose forwards run in processes of their own."""

from __future__ import annotations

import importlib.util
import re
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


def run(folder: Path, fault: str, window: dict[str, Any] | None) -> Outcome:
    folder.mkdir()
    environment = job_environment(folder, window) | ENVIRONMENT | {"ENGINE_FAULT": fault}
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
    return [line for line in outcome.out if line.startswith(("responses:", "ended"))]


def last_error(outcome: Outcome) -> str:
    """The exception that ended the job."""
    errors = re.findall(r"^([\w.]+(?:Error|Exception|Interrupt)\b)", outcome.err, re.MULTILINE)
    return errors[-1] if errors else ""


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
    assert (windowed.code, responses(windowed)) == (plain.code, []), windowed.err[-3000:]
    assert last_error(windowed) == last_error(plain)
    assert plain.code != 0
    (manifest,) = windowed.manifests
    assert (manifest["closed_by"], bool(manifest["trace"])) == ("error", True)
    assert [(row["lo"], row["hi"], row["tokens"]) for row in manifest["rows"]] == [(4, 5, 4), (5, 6, 4), (6, 6, 0)]
    assert windowed.leftovers == []


@pytest.mark.faults
def test_a_process_that_is_killed_within_the_window_leaves_a_word(tmp_path: Path) -> None:
    plain, windowed = both(tmp_path, "kill")
    assert (windowed.code, responses(windowed)) == (plain.code, []), windowed.err[-3000:]
    assert last_error(windowed) == last_error(plain)
    (manifest,) = windowed.manifests
    assert (manifest["trace"], manifest["opened_by"], manifest["closed_by"]) == (None, "window", None)
    assert f"a capture was open in process {manifest['pid']} of " in windowed.notes
    assert "no engine reported an iteration" not in windowed.err
    assert windowed.leftovers == []
