"""A vLLM whose objects lack a field that is read: the engine runs as ever, and one line says what is missing.

On stand-ins for the objects, since the real ones have these fields.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from changed_outputs import VLLM_ATTRIBUTES
from taken_away import take_away
from vllm_worker import captured, output

from verl_profiler_conf.capture.session import close_all
from verl_profiler_conf.core.logs import forget_logged_texts
from verl_profiler_conf.engines.vllm import shutdown
from verl_profiler_conf.engines.vllm.results import sampled_tokens

torch = pytest.importorskip("torch")

TOKENS = 8
WINDOW = [(2, 3), (3, 4)]


@pytest.fixture(autouse=True)
def _first_time() -> None:
    forget_logged_texts()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def generate(worker: Any, lacks: str = "") -> None:
    """A response, by an engine whose scheduler's outputs lack a field. Every iteration has to run."""
    outputs = [output({"a": 4}, new=("a",)), *(output({"a": 1}, made=made) for made in range(1, TOKENS))]
    outputs.append(output({}, finished=("a",)))
    worker.during = lambda: torch.sin(torch.ones(3))
    for each in outputs:
        if lacks:
            take_away(each, lacks)
        worker.execute_model(each)
        worker.sample_tokens(None)
    close_all()
    assert worker.calls == ["execute_model", "sample_tokens"] * len(outputs)


def test_nothing_is_missing(hooked: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    generate(hooked()())
    assert captured(tmp_path) == WINDOW
    assert lines(caplog) == []


@pytest.mark.parametrize(
    "path",
    [
        *VLLM_ATTRIBUTES,
        "scheduled_cached_reqs.req_ids",
        "scheduled_cached_reqs.num_computed_tokens",
        "scheduled_new_reqs.*.req_id",
        "scheduled_new_reqs.*.prompt_token_ids",
        "scheduled_new_reqs.*.num_computed_tokens",
        "scheduled_new_reqs.*.sampling_params",
        "scheduled_new_reqs.*.sampling_params.max_tokens",
    ],
)
def test_output_without_a_field(path: str, hooked: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    generate(hooked()(), lacks=path)
    (line,) = lines(caplog)
    assert path.rpartition(".")[2] in line
    (manifest,) = (json.loads(file.read_text()) for file in tmp_path.glob("*.manifest.json"))
    assert (manifest["trace"], manifest["closed_by"]) == (None, "error")


@pytest.mark.parametrize(
    "path",
    [
        "scheduled_cached_reqs.num_output_tokens",
        "scheduled_cached_reqs.resumed_req_ids",
        "scheduled_new_reqs.*.sampling_params.all_stop_token_ids",
    ],
)
def test_output_without_a_field_that_not_every_release_has(
    path: str, hooked: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generate(hooked()(), lacks=path)
    assert captured(tmp_path) == WINDOW
    assert lines(caplog) == []


@pytest.mark.parametrize(
    "path",
    [
        "rank",
        "vllm_config",
        "vllm_config.parallel_config",
        "vllm_config.parallel_config.pipeline_parallel_size",
        "vllm_config.parallel_config.data_parallel_size",
        "vllm_config.parallel_config.data_parallel_rank",
        "vllm_config.parallel_config.distributed_executor_backend",
        "vllm_config.parallel_config.world_size",
        "vllm_config.scheduler_config",
        "vllm_config.speculative_config",
        "vllm_config.model_config",
        "vllm_config.model_config.max_model_len",
    ],
)
def test_worker_without_a_field(path: str, hooked: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker = hooked(all_ranks=True)(data_parallel_size=2)
    take_away(worker, path)
    generate(worker)
    (line,) = lines(caplog)
    assert f"no attribute '{path.rpartition('.')[2]}'" in line
    assert captured(tmp_path) == []


@pytest.mark.parametrize(
    "path",
    [
        "vllm_config.scheduler_config.async_scheduling",
        "model_runner",
        "model_runner.requests",
        "model_runner.input_batch",
        "model_runner.input_batch.req_id_to_index",
    ],
)
def test_worker_without_a_field_that_it_can_do_without(
    path: str, hooked: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = hooked()()
    worker.model_runner.input_batch = SimpleNamespace(req_id_to_index={})
    take_away(worker, path)
    generate(worker)
    assert captured(tmp_path) == WINDOW
    assert lines(caplog) == []


def test_model_runner_whose_requests_have_no_tokens(
    hooked: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are read once iterations are skipped, far from the window."""
    worker = hooked(profile_token_start=100, profile_token_end=102)()
    request = SimpleNamespace(prompt_token_ids=[5] * 4, sampling_params=SimpleNamespace(max_tokens=200))
    worker.model_runner = SimpleNamespace(requests={"a": request}, input_batch=SimpleNamespace(req_id_to_index={}))
    generate(worker)
    (line,) = lines(caplog)
    assert "no attribute 'output_token_ids'" in line
    assert captured(tmp_path) == []


# -- results -----------------------------------------------------------------------------------------------------------

ROW = SimpleNamespace(tolist=lambda: [7, 8, -1])
PENDING = {
    "_model_runner_output": SimpleNamespace(req_id_to_index={"a": 0}),
    "async_copy_ready_event": SimpleNamespace(synchronize=lambda: None),
    "sampled_token_ids_cpu": [ROW],
}
"""A result that is still on its way from the device."""
READY = {"req_id_to_index": {"a": 0}, "sampled_token_ids": [[7, 8]]}


@pytest.mark.parametrize("result", [PENDING, READY])
def test_result_without_a_field_is_not_read(result: dict[str, Any]) -> None:
    assert sampled_tokens(SimpleNamespace(**result), "a") == [7, 8]
    for name in result:
        rest = {other: value for other, value in result.items() if other != name}
        assert sampled_tokens(SimpleNamespace(**rest), "a") is None


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_force(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutdown, "_folders", {tmp_path})
    monkeypatch.setenv("VERL_PROFILER_CONF", json.dumps({"profile_token_start": 0, "save_path": str(tmp_path)}))


@pytest.mark.usefixtures("in_force")
def test_front_end_without_the_function(caplog: pytest.LogCaptureFixture) -> None:
    shutdown._hook_front_end(ModuleType("vllm.v1.engine.utils"))
    (line,) = lines(caplog)
    assert "has no vllm.v1.engine.utils.shutdown" in line


@pytest.mark.usefixtures("in_force")
def test_front_end_whose_function_takes_no_processes(caplog: pytest.LogCaptureFixture) -> None:
    module: Any = ModuleType("vllm.v1.engine.utils")
    module.shutdown = lambda **_: "ended"
    shutdown._hook_front_end(module)
    assert module.shutdown(handles=[]) == "ended"
    (line,) = lines(caplog)
    assert line == "vLLM may end before its captures are finished: KeyError: 'procs'"


@pytest.mark.usefixtures("in_force")
@pytest.mark.parametrize("lacks", ["EngineCore", "shutdown", "model_executor", "collective_rpc"])
def test_engine_core_without_a_part(lacks: str, caplog: pytest.LogCaptureFixture) -> None:
    class EngineCore:
        def __init__(self) -> None:
            if lacks != "model_executor":
                self.model_executor = SimpleNamespace()

        def shutdown(self) -> str:
            return "ended"

    if lacks == "shutdown":
        del EngineCore.shutdown
    module: Any = ModuleType("vllm.v1.engine.core")
    if lacks != "EngineCore":
        module.EngineCore = EngineCore
    shutdown._hook_engine_core(module)
    if lacks in ("model_executor", "collective_rpc"):
        core = EngineCore()
        assert [core.shutdown(), core.shutdown()] == ["ended"] * 2
    (line,) = lines(caplog)
    assert lacks in line
    assert line.startswith("vLLM may end before its captures are finished: ")
