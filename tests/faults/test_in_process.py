"""Faults on an engine in the job's own process: the real transformers, or the real vLLM where it is installed.

The job goes as it goes without a window, and what is said of the window is true.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is not None:
    pytest.skip("SGLang has processes of its own", allow_module_level=True)
pytest.importorskip("transformers")

VLLM = importlib.util.find_spec("vllm") is not None
pytestmark = [
    *([pytest.mark.engine_vllm, pytest.mark.faults] if VLLM else [pytest.mark.slow]),
    pytest.mark.skipif(os.name != "posix", reason="signals, forks and limits of Unix"),
]

Both = Callable[..., tuple[Any, Any]]


def check_alike(plain: Any, run: Any) -> None:
    """Tokens, scores, exit code and the job's own exception."""
    assert (run.code, run.out) == (plain.code, plain.out), run.err
    own = [line for line in plain.err.splitlines() if "job's own error" in line]
    assert [line for line in run.err.splitlines() if "job's own error" in line] == own


@pytest.mark.parametrize("fault", ["nothing", "sampled"])
def test_results_are_those_without_a_window(both: Both, fault: str) -> None:
    plain, run = both(fault)
    check_alike(plain, run)
    assert plain.code == 0
    assert (run.captured, run.leftovers, run.warnings) == ([[4, 5, 6, 7, 8, 9]], [], [])


@pytest.mark.parametrize("fault", ["nothing", "sampled"])
def test_results_are_those_without_a_window_that_stays_closed(both: Both, fault: str) -> None:
    plain, run = both(fault, profile_token_start=90, profile_token_end=99)
    check_alike(plain, run)
    assert run.captured == []
    assert "never reached in 16 iterations: the furthest response token seen is 15" in run.notes


@pytest.mark.parametrize(
    ("fault", "code"), [("os_exit", 9), ("kill", -9), ("hang_up", -1), ("quit", -3), ("user_signal", -10)]
)
def test_a_process_that_is_ended_within_its_window_leaves_a_word(both: Both, fault: str, code: int) -> None:
    plain, run = both(fault)
    check_alike(plain, run)
    assert plain.code == code
    (manifest,) = run.manifests
    assert (manifest["trace"], manifest["opened_by"], manifest["closed_by"]) == (None, "window", None)
    assert f"a capture was open in process {manifest['pid']} of " in run.notes
    assert run.leftovers == []


@pytest.mark.parametrize(
    ("fault", "code", "closed_by", "tokens"),
    [
        ("raise", 1, "error", [4, 5, 6]),
        ("exit", 7, "error", [4, 5, 6]),
        ("interrupt", -2, "error", [4, 5, 6]),
        ("terminate", -15, "job_end", [4, 5, 6]),
    ],
)
def test_a_job_that_leaves_within_its_window_keeps_its_capture(
    both: Both, fault: str, code: int, closed_by: str, tokens: list[int]
) -> None:
    plain, run = both(fault)
    check_alike(plain, run)
    assert plain.code == code
    assert run.captured == [tokens]
    (manifest,) = run.manifests
    assert manifest["closed_by"] == closed_by
    if closed_by == "error":  # the iteration under way made no token
        assert [row["tokens"] for row in manifest["rows"]] == [4, 4, 0]
    assert run.leftovers == []


@pytest.mark.parametrize("fault", ["fork", "fork_that_works"])
def test_a_child_that_is_forked_within_the_window(both: Both, fault: str) -> None:
    plain, run = both(fault)
    check_alike(plain, run)
    assert "child: 7" in plain.out
    assert (run.captured, len(run.manifests), run.leftovers) == ([[4, 5, 6, 7, 8, 9]], 1, [])


@pytest.mark.parametrize("fault", ["own_profiler", "itt"])
def test_the_jobs_own_profiler_comes_first_and_the_rest_is_a_further_part(both: Both, fault: str) -> None:
    plain, run = both(fault)
    check_alike(plain, run)
    assert plain.code == 0
    assert run.captured == [[4, 5, 6], [7, 8, 9]]
    assert [each["closed_by"] for each in run.manifests] == ["other_profiler", "window"]
    assert run.leftovers == []


@pytest.mark.skipif(not VLLM, reason="transformers has no profiler of its own")
def test_vllms_own_profiler_is_started_within_the_window(both: Both) -> None:
    plain, run = both("engines_own_profiler")
    check_alike(plain, run)
    (operators,) = (int(line.split()[-1]) for line in plain.out if line.startswith("own profiler: "))
    assert operators, "its trace is not empty, and check_alike has found as much in the other one"
    assert run.captured == [[4, 5, 6], [9]]
    assert [each["closed_by"] for each in run.manifests] == ["other_profiler", "window"]
    assert run.leftovers == []


@pytest.mark.parametrize("fault", ["start_raises_late", "stop_raises"])
def test_where_torchs_profiler_raises(both: Both, fault: str) -> None:
    plain, run = both(fault)
    check_alike(plain, run)
    assert run.captured == []
    assert "RuntimeError: injected" in run.notes
    assert [each["closed_by"] for each in run.manifests] == ["error"]


def test_a_torch_without_kineto_is_the_reason_that_is_given(both: Both) -> None:
    plain, run = both("no_kineto")
    check_alike(plain, run)
    assert "built without Kineto" in run.notes
    assert "built without Kineto" in run.err


def test_a_folder_that_is_gone_is_made_again(both: Both) -> None:
    plain, run = both("folder_is_gone")
    check_alike(plain, run)
    assert run.captured == [[4, 5, 6, 7, 8, 9]]


@pytest.mark.parametrize("fault", ["file_in_place_of_folder", "no_room", "no_descriptors"])
def test_a_folder_that_cannot_be_written_loses_the_capture_and_that_is_said(both: Both, fault: str) -> None:
    plain, run = both(fault)
    check_alike(plain, run)
    assert run.captured == []
    assert "no engine reported" not in run.err
    assert any("could not be written" in line or "cannot be written" in line for line in run.warnings), run.err


@pytest.mark.parametrize("fault", ["no_room_for_a_while", "no_descriptors_for_a_while"])
def test_what_could_not_be_written_is_written_when_the_job_ends(both: Both, fault: str) -> None:
    plain, run = both(fault)
    check_alike(plain, run)
    assert plain.code == 0
    assert run.captured == [[4, 5, 6, 7, 8, 9]], run.err
    assert any("has been written after all" in line for line in run.warnings)
    assert (len(run.manifests), run.leftovers) == (1, [])


def test_sigterm_while_the_end_of_the_job_waits_for_the_trace(both: Both) -> None:
    _, run = both("terminated_while_it_is_written")
    assert run.code == -15
    assert (run.captured, run.leftovers) == ([[4, 5, 6, 7, 8, 9]], [])
    assert "captures are finished first" in run.err


@pytest.mark.parametrize(("fault", "code"), [("export_never_ends", 0), ("export_is_interrupted", -2)])
def test_an_export_that_never_ends_is_given_up(both: Both, fault: str, code: int) -> None:
    plain, run = both(fault)
    assert run.code == code, run.err
    assert run.out == (plain.out if code == 0 else plain.out[:-1])
    (manifest,) = run.manifests
    assert (manifest["trace"], manifest["closed_by"]) == (None, "error")
    assert ("Ctrl-C" if code else "did not come to an end within") in run.notes
    assert any("given up" in line for line in run.warnings)
    if code == 0:
        assert "still being written: 1; Ctrl-C gives them up" in run.err
    assert [name for name in run.leftovers if name.endswith(".reserved")] == []


def test_a_folder_with_every_character(both: Both) -> None:
    plain, run = both("nothing", save_path="pro\"f'i\\le\nü%5")
    check_alike(plain, run)
    (trace,) = run.folder.parent.glob("pro*/*.pt.trace.json.gz")
    assert trace.stat().st_size
