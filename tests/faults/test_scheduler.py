"""Faults within the scheduler of the real SGLang, one after the other in one engine.

Each run is held against the same run with `enable: false`.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("no SGLang in this environment", allow_module_level=True)

from fault_outcome import Outcome
from sglang_driver import CLOSE, Driver
from sglang_spy import wait_until_idle
from workloads import Build, window

pytestmark = pytest.mark.engine_sglang

PROMPTS = [[5 + number, 17, 250 - number, 3 * number + 9] * 4 for number in range(4)]


class Scheduler:
    """One engine, whose processes write what they say into a file."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.driver = Driver(folder)
        before = [(fd, os.dup(fd)) for fd in (1, 2)]
        log = os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        for fd, _ in before:
            os.dup2(log, fd)
        try:
            self.driver.engine(Build())
        finally:
            for fd, kept in before:
                os.dup2(kept, fd)
                os.close(kept)
            os.close(log)

    def run(self, folder: Path, fault: str, **settings: Any) -> tuple[list[list[int]], Outcome]:
        """The tokens of each response, and what the run left."""
        said = self.log.stat().st_size
        engine, spied = self.driver.begin(Build(), folder, {**window(4, 10), "on_error": "warn", **settings}, "", fault)
        sampling = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
        tokens = [output["output_ids"] for output in engine.generate(input_ids=PROMPTS, sampling_params=sampling)]
        wait_until_idle(spied)
        engine.collective_rpc(CLOSE)
        idle = [json.loads(line) for line in spied.read_text().splitlines() if "profiling" in line]
        assert idle, "the scheduler says whether a profiler is on"
        assert not any(line["profiling"] for line in idle), "a profiler stays on"
        text = self.log.read_bytes()[said:].decode()
        return tokens, Outcome(0, text, text, folder / "profile")


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scheduler]:
    scheduler = Scheduler(tmp_path_factory.mktemp("engine"))
    yield scheduler
    scheduler.driver.close()


def both(scheduler: Scheduler, folder: Path, fault: str, **settings: Any) -> Outcome:
    """What the run with a window left, whose tokens are those of the run without one."""
    plain, said = scheduler.run(folder / "plain", fault, enable=False)
    assert len(plain) == len(PROMPTS)
    tokens, outcome = scheduler.run(folder / "windowed", fault, **settings)
    assert tokens == plain
    own = [line for line in outcome.out if line.startswith(("child:", "own profiler:"))]
    assert own == [line for line in said.out if line.startswith(("child:", "own profiler:"))], outcome.err
    return outcome


@pytest.mark.parametrize("fault", ["start_raises_late", "stop_raises"])
def test_where_torchs_profiler_raises(scheduler: Scheduler, tmp_path: Path, fault: str) -> None:
    outcome = both(scheduler, tmp_path, fault)
    assert outcome.captured == []
    assert "RuntimeError: injected" in outcome.notes
    assert [each["closed_by"] for each in outcome.manifests] == ["error"]
    assert outcome.leftovers == []


@pytest.mark.parametrize("fault", ["fork", "fork_that_works"])
def test_a_child_that_is_forked_within_the_window(scheduler: Scheduler, tmp_path: Path, fault: str) -> None:
    outcome = both(scheduler, tmp_path, fault)
    assert "child: 7" in outcome.out
    assert (outcome.captured, len(outcome.manifests), outcome.leftovers) == ([[4, 5, 6, 7, 8, 9]], 1, [])


@pytest.mark.parametrize("fault", ["own_profiler", "itt"])
def test_another_profiler_comes_first_and_the_rest_is_a_further_part(
    scheduler: Scheduler, tmp_path: Path, fault: str
) -> None:
    outcome = both(scheduler, tmp_path, fault)
    assert ("own profiler: True" in outcome.out) == (fault == "own_profiler")
    assert outcome.captured == [[4, 5, 6], [7, 8, 9]]
    assert [each["closed_by"] for each in outcome.manifests] == ["other_profiler", "window"]
    assert outcome.leftovers == []


def test_a_folder_that_is_gone_is_made_again(scheduler: Scheduler, tmp_path: Path) -> None:
    assert both(scheduler, tmp_path, "folder_is_gone").captured == [[4, 5, 6, 7, 8, 9]]


def test_a_file_in_place_of_the_folder_loses_the_capture_and_that_is_said(scheduler: Scheduler, tmp_path: Path) -> None:
    outcome = both(scheduler, tmp_path, "file_in_place_of_folder")
    assert outcome.captured == []
    assert "could not be written" in outcome.err


def test_a_folder_with_every_character(scheduler: Scheduler, tmp_path: Path) -> None:
    folder = tmp_path / "pro\"f'i\\le\nü%5"
    both(scheduler, tmp_path, "nothing", save_path=str(folder))
    (trace,) = folder.glob("*.pt.trace.json.gz")
    assert trace.stat().st_size
