"""Names that a process claims: at a constant cost, and seen for what they are by everybody else in the folder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from claimed import leave_claim

from verl_profiler_conf.capture import claims as module
from verl_profiler_conf.capture.backends import ascend, cudart, memory, torch_recording
from verl_profiler_conf.capture.claims import Claim, claim_again, claims, reserve_stem
from verl_profiler_conf.capture.files import ENDINGS, MANIFEST_SUFFIX, marker

NO_PROCESS = 2**22 + 1
"""Above the largest process id that Linux has."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the file-system calls by which a name is reserved."""
    counted: Counter[str] = Counter()

    def count(place: Any, name: str) -> None:
        plain = getattr(place, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(place, name, call)

    for name in ("open", "write", "close", "scandir", "listdir", "stat"):
        count(os, name)
    count(os.path, "lexists")
    return counted


def reserve(folder: Path, name: str = "s") -> Path:
    """As a capture does: the manifest takes the place of the marker."""
    path = reserve_stem(folder, name)
    path.with_name(path.name + MANIFEST_SUFFIX).touch()
    marker(path).unlink()
    return path


def test_the_four_hundredth_costs_what_the_second_does(tmp_path: Path, calls: Counter[str]) -> None:
    for number in range(300):
        (tmp_path / f"s_{number + 1}{MANIFEST_SUFFIX}").touch()
    assert reserve(tmp_path).name == "s_301"
    assert calls["scandir"] == 1
    costs = []
    for number in range(2, 401):
        calls.clear()
        assert reserve_stem(tmp_path, "s").name == f"s_{300 + number}"
        costs.append(dict(calls))
    assert all(cost == costs[0] for cost in costs)
    assert sum(costs[0].values()) <= 4 + len(ENDINGS)
    assert "scandir" not in costs[0]


def test_another_label_needs_no_further_look_at_the_folder(tmp_path: Path, calls: Counter[str]) -> None:
    reserve(tmp_path, "s_step1")
    calls.clear()
    assert reserve(tmp_path, "s_step2").name == "s_step2_1"
    assert calls["scandir"] == 0


def test_a_rival_of_the_same_name_does_not_cost_a_walk(tmp_path: Path, calls: Counter[str]) -> None:
    """Another container with the same process id has made a thousand captures meanwhile."""
    assert reserve(tmp_path).name == "s_1"
    for number in range(1000):
        (tmp_path / f"s_{number + 1}{MANIFEST_SUFFIX}").touch()
    calls.clear()
    assert reserve(tmp_path).name == "s_1001"
    assert calls["open"] <= 2 * module._TRIES


def test_every_profiler_ends_its_files_in_a_known_way() -> None:
    suffixes = {ascend.SUFFIX, cudart.CudartProfiler.suffix, memory.SUFFIX, torch_recording.SUFFIX}
    assert suffixes <= set(ENDINGS)


def test_a_claim_says_whose_it_is(tmp_path: Path) -> None:
    path = reserve_stem(tmp_path, "s", "job")
    assert list(claims(tmp_path)) == [Claim(path.name, "job", os.getpid(), is_here=True)]


def test_a_name_that_has_a_placeholder_is_claimed_again(tmp_path: Path) -> None:
    path = reserve(tmp_path)
    assert list(claims(tmp_path)) == []
    claim_again(path, "job")
    assert list(claims(tmp_path)) == [Claim(path.name, "job", os.getpid(), is_here=True)]


@pytest.mark.parametrize(
    ("differs", "is_here", "is_gone"),
    [
        ({}, True, False),
        ({"pid": NO_PROCESS}, True, True),
        ({"pid": 2**80}, True, True),
        ({"pid": NO_PROCESS, "host": "elsewhere"}, False, False),
        ({"pid": NO_PROCESS, "pids": "pid:[1]"}, False, False),
    ],
)
def test_only_processes_of_this_machine_can_be_gone(
    differs: dict[str, object], is_here: bool, is_gone: bool, tmp_path: Path
) -> None:
    leave_claim(tmp_path / "s_1", "job", **differs)
    (claim,) = claims(tmp_path)
    assert (claim.is_here, claim.is_gone) == (is_here, is_gone)
    assert socket.gethostname() != "elsewhere"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_process_that_nobody_has_waited_for_is_gone(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()  # ends when the child does
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    leave_claim(tmp_path / "s_1", "job", pid=child.pid)
    assert [claim.is_gone for claim in claims(tmp_path)] == [True]
    child.communicate()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"run": 3}', '{"run": "r", "pid": null, "host": 1, "pids": 2}']
)
def test_a_marker_of_nobody_counts_while_it_may_be_being_written(text: str, tmp_path: Path) -> None:
    path = tmp_path / ".s_1.reserved"
    path.write_text(text)
    os.utime(path, (2**32, 2**32))  # in the year 2106, so that it is new however slow this test is
    (claim,) = claims(tmp_path)
    assert claim.may_be_of("any")
    assert not claim.is_gone
    os.utime(path, (0, 0))
    assert list(claims(tmp_path)) == []


def test_no_folder_no_claims(tmp_path: Path) -> None:
    assert list(claims(tmp_path / "none")) == []


def test_a_full_disk_leaves_no_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        reserve_stem(tmp_path, "s")
    assert list(tmp_path.iterdir()) == []
