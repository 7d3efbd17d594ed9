"""A release may change what its scheduler says. The engine runs on, and each job is told: never silence."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import changed_outputs
import pytest
from sglang_schedule import Rollout, make_batch, make_request
from vllm_schedule import RandomEngine, load
from vllm_worker import hooked_class, output, run

from verl_profiler_conf.capture.session import close_all
from verl_profiler_conf.capture.writer import default_writer
from verl_profiler_conf.core.releases import VLLM
from verl_profiler_conf.core.settings import ENV_NAME
from verl_profiler_conf.engines.sglang import release as sglang
from verl_profiler_conf.engines.sglang.worker import SchedulerHook
from verl_profiler_conf.engines.vllm import hooks
from verl_profiler_conf.engines.vllm import release as vllm


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    close_all()


def publish(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    raw = {"profile_token_start": 2, "profile_token_end": 4, "save_path": str(folder), "device": "cpu"}
    monkeypatch.setenv(ENV_NAME, json.dumps(raw))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def notes(folder: Path) -> list[str]:
    return ["; ".join(json.loads(path.read_text())["notes"]) for path in folder.glob("*.manifest.json")]


@pytest.mark.parametrize("second_job", [False, True], ids=["first job", "second job"])
@pytest.mark.parametrize("change", changed_outputs.VLLM)
def test_vllm(
    change: str, second_job: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish(monkeypatch, tmp_path / "one")
    worker = hooked_class()()
    worker.returns = "result"
    if second_job:
        run(worker, 6)
        close_all()
        assert default_writer().flush(30)
        assert len(notes(tmp_path / "one")) == 1
        caplog.clear()
        publish(monkeypatch, tmp_path / "two")
        hooks.put_in()
    changed = changed_outputs.VLLM[change]
    for made in range(6):
        told = output({"b": 1}, made=made) if made else output({"b": 4}, new=("b",))
        assert worker.execute_model(changed(told)) == "result"
    (line,) = said(caplog)
    assert "profiling of vllm stops here, the job goes on" in line
    assert "\n" not in line
    (note,) = notes(tmp_path / ("two" if second_job else "one"))
    assert note.startswith("profiling stopped by a failure: ")


@pytest.mark.parametrize("change", changed_outputs.SGLANG)
def test_sglang(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    publish(monkeypatch, tmp_path)
    scheduler = SimpleNamespace(
        is_generation=True,
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
        server_args=SimpleNamespace(),
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        dp_rank=None,
        is_fully_idle=lambda: True,
    )
    hook = SchedulerHook(scheduler)
    changed = changed_outputs.SGLANG[change](make_batch("DECODE", [make_request("r", 3)], [4]))
    for _ in range(3):
        try:
            hook.begin(changed)
        except Exception as error:  # as the hook of run_batch does
            hook.give_up(error)
    (line,) = said(caplog)
    assert "profiling of sglang stops here, the job goes on" in line
    (note,) = notes(tmp_path)
    assert note.startswith("profiling stopped by a failure: ")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_has_not_what_is_read_of_it_is_said_with_a_manifest(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish(monkeypatch, tmp_path)
    if engine == "vllm":
        worker = hooked_class()()
        del worker.vllm_config.scheduler_config, worker.vllm_config.model_config
        run(worker, 3)
    else:
        place = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "dp_rank": None}
        SchedulerHook(SimpleNamespace(is_generation=True, server_args=SimpleNamespace(), **place))
    (line,) = said(caplog)
    assert f"profiling of {engine} stops here, the job goes on (AttributeError: " in line
    assert len(notes(tmp_path)) == 1


@pytest.mark.parametrize("version", [VLLM.read[0], VLLM.read[-1]])
@pytest.mark.parametrize("overlapped", [False, True])
def test_what_vllms_releases_say_is_understood(version: str, overlapped: bool) -> None:
    engine = RandomEngine(load(version), 7, overlapped=overlapped, speculative=True)
    assert {vllm.not_understood(step.output) for step in engine} == {None}


@pytest.mark.parametrize("overlap", [False, True])
def test_what_sglang_says_is_understood(overlap: bool) -> None:
    rollout = Rollout(7, overlap=overlap, speculative=overlap)
    found = []
    while rollout.run(lambda batch: found.append(sglang.not_understood(batch))) is not None:
        pass
    assert set(found) == {None}
