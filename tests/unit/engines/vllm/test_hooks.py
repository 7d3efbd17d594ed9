"""The hooks around a worker, on stand-ins for vLLM's classes: what cannot be provoked in a real engine on a CPU."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm_runner import V1Runner
from vllm_worker import Worker, captured, is_hooked, output, run, run_with_table

from verl_profiler_conf.capture.live import close_all, live_sessions
from verl_profiler_conf.core.errors import UnavailableError
from verl_profiler_conf.core.gate import LeadGate
from verl_profiler_conf.core.logs import forget_logged_texts
from verl_profiler_conf.core.settings import ENV_NAME
from verl_profiler_conf.engines.vllm import client, hooks, plugin
from verl_profiler_conf.engines.vllm.worker import STATE, global_rank

pytest.importorskip("torch")


def test_an_iteration_ends_with_its_sampling(hooked: Any, tmp_path: Path) -> None:
    worker = hooked()()
    run(worker, 6)
    close_all()
    assert captured(tmp_path) == [(2, 3), (3, 4)]
    assert worker.calls.count("execute_model") == 7


def test_releases_without_sample_tokens_end_an_iteration_at_once(hooked: Any, tmp_path: Path) -> None:
    worker = hooked()()
    worker.returns = SimpleNamespace(sampled_token_ids=[[7]], req_id_to_index={"a": 0})
    worker.execute_model(output({"a": 4}, new=("a",)))
    for made in range(1, 6):
        worker.execute_model(output({"a": 1}, made=made))
    close_all()
    assert captured(tmp_path) == [(2, 3), (3, 4)]


def test_ranks_of_a_pipeline_that_never_sample(hooked: Any, tmp_path: Path) -> None:
    worker = hooked()()
    worker.execute_model(output({"a": 4}, new=("a",)))
    for made in range(1, 6):
        worker.execute_model(output({"a": 1}, made=made))
    close_all()
    assert captured(tmp_path) == [(2, 3), (3, 4)]


def test_warm_up_is_no_request(hooked: Any, tmp_path: Path) -> None:
    worker = hooked(profile_token_start=0, profile_token_end=1)()
    worker.compile_or_warm_up_model()
    assert live_sessions()[0].iteration == -1
    run(worker, 2)
    close_all()
    assert captured(tmp_path) == [(0, 1)]
    (manifest,) = tmp_path.glob("*.manifest.json")
    assert json.loads(manifest.read_text())["tracked"] == ["a"]


def test_an_output_without_a_forward_is_no_iteration(hooked: Any) -> None:
    worker = hooked()()
    run(worker, 6)
    assert live_sessions()[0].iteration <= 5


def test_the_window_that_was_not_reached_is_said_when_the_engine_rests(hooked: Any, tmp_path: Path) -> None:
    worker = hooked(profile_token_start=30, profile_token_end=40)()
    run(worker, 6)
    (path,) = tmp_path.glob("*.manifest.json")
    manifest = json.loads(path.read_text())
    assert manifest["trace"] is None
    assert manifest["furthest_token"] == 5


@pytest.mark.parametrize("start", [2, 3, 17, 18, 19, 20, 40])
@pytest.mark.parametrize("drafts", [0, 3])
def test_the_gate_is_asked_in_time(
    hooked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, drafts: int
) -> None:
    """Far from the window it is not asked before every iteration."""
    asked: list[int] = []
    worker = hooked(profile_token_start=start, profile_token_end=start + 2)()
    worker.vllm_config.speculative_config = SimpleNamespace(num_speculative_tokens=drafts) if drafts else None
    step = LeadGate.step
    monkeypatch.setattr(LeadGate, "step", lambda *given: (asked.append(1), step(*given))[1])
    run(worker, start + 4)
    close_all()
    assert captured(tmp_path) == [(start, start + 1), (start + 1, start + 2)]
    if start == 40:
        assert len(asked) < 30


def test_the_furthest_token_is_known_when_stopped_far_from_the_window(hooked: Any, tmp_path: Path) -> None:
    worker = hooked(profile_token_start=40, profile_token_end=50, arm="request")()
    worker.profile(True)
    worker.execute_model(output({"a": 4}, new=("a",)))
    for made in range(1, 9):
        worker.execute_model(output({"a": 1}, made=made))
        worker.sample_tokens(None)
    worker.profile(False)
    (path,) = tmp_path.glob("*.manifest.json")
    assert json.loads(path.read_text())["furthest_token"] == 8


def test_a_rank_that_is_not_asked_for_has_no_session(hooked: Any, tmp_path: Path) -> None:
    worker = hooked()(rank=1)
    run(worker, 6)
    assert live_sessions() == ()
    close_all()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rank", "parallel", "expected"),
    [
        (1, {}, 1),
        (1, {"data_parallel_size": 2, "data_parallel_rank": 1, "world_size": 2}, 3),
        (1, {"data_parallel_size": 2, "data_parallel_rank": 0, "data_parallel_index": 1, "world_size": 2}, 3),
        (3, {"data_parallel_size": 2, "data_parallel_rank": 1, "distributed_executor_backend": "external_launcher"}, 3),
    ],
)
def test_ranks_count_over_all_data_parallel_engines(rank: int, parallel: dict[str, Any], expected: int) -> None:
    assert global_rank(Worker(rank, **parallel)) == expected


@pytest.mark.parametrize("starts", [True, False])
def test_profile_calls_are_left_to_the_engine_under_arm_job(hooked: Any, starts: bool) -> None:
    worker = hooked()()
    with pytest.raises(RuntimeError, match="not enabled"):
        worker.profile(starts)


def test_profile_calls_are_left_to_the_engine_whose_counters_are_used(hooked: Any) -> None:
    worker = hooked(arm="request", mapping="iterations")()
    with pytest.raises(RuntimeError, match="not enabled"):
        worker.profile(True)


def test_start_arms_stop_disarms_under_arm_request(hooked: Any, tmp_path: Path) -> None:
    worker = hooked(arm="request")()
    run(worker, 6, "before")
    worker.profile(False)
    worker.profile(True, "step7")
    worker.profile(True, "again")
    run(worker, 6, "a")
    worker.profile(False)
    worker.profile(False)
    run(worker, 6, "after")
    close_all()
    assert captured(tmp_path) == [(2, 3), (3, 4)]
    manifests = [json.loads(path.read_text()) for path in tmp_path.glob("*.manifest.json")]
    assert [m["tracked"] for m in manifests if m["trace"]] == [["a"]]
    assert not any(isinstance(call, tuple) for call in worker.calls), "the engine's own profiler was never started"


def test_ranks_that_are_not_asked_for_swallow_the_calls_too(hooked: Any) -> None:
    worker = hooked(arm="request")(rank=1)
    worker.profile(True)
    worker.profile(False)
    assert worker.calls == []


@pytest.mark.parametrize("track", ["lead", "any", "all"])
@pytest.mark.parametrize("where", ["execute_model", "sample_tokens"])
@pytest.mark.parametrize("fails_at", [2, 3, 4])
def test_a_failing_forward_is_the_jobs_own_and_the_capture_is_kept(
    hooked: Any, tmp_path: Path, fails_at: int, where: str, track: str
) -> None:
    """The token that it would have made is not listed, whether it is the first of the window or the last."""
    worker = hooked(profile_token_end=5, track=track)()
    worker.execute_model(output({"a": 4}, new=("a",)))
    worker.sample_tokens(None)
    for made in range(1, fails_at):
        worker.execute_model(output({"a": 1}, made=made))
        worker.sample_tokens(None)
    worker.raises = {where: ValueError("out of memory")}

    def iterate() -> None:
        worker.execute_model(output({"a": 1}, made=fails_at))
        worker.sample_tokens(None)

    with pytest.raises(ValueError, match="out of memory"):
        iterate()
    worker.shutdown()
    (manifest,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.manifest.json"))
    if track != "lead" and fails_at == 2:  # nothing of the window was made by anybody
        assert manifest["trace"] is None
        return
    assert manifest["closed_by"] == "error"
    rows = [(row["lo"], row["hi"], row["tokens"], row["gap"]) for row in manifest["rows"]]
    whole = [(token, token + 1, 1, False) for token in range(2, fails_at)]
    assert rows == [*whole, (fails_at, fails_at, 0, True)]
    assert (tmp_path / manifest["trace"]).exists()


def test_a_scheduler_output_that_is_not_understood_harms_nobody(hooked: Any, caplog: pytest.LogCaptureFixture) -> None:
    worker = hooked()()
    worker.returns = "result"
    strange = SimpleNamespace(scheduled_new_reqs=[], unheard_of=True)
    with caplog.at_level(logging.WARNING):
        assert worker.execute_model(strange) == "result"
        assert worker.execute_model(strange) == "result"
    assert len([r for r in caplog.records if "the job goes on" in r.message]) == 1
    run(worker, 6)


def test_a_scheduler_output_that_is_not_understood_is_raised_where_asked_for(hooked: Any) -> None:
    worker = hooked(on_error="raise")()
    with pytest.raises(UnavailableError, match=r"no SchedulerOutput\.num_scheduled_tokens"):
        worker.execute_model(SimpleNamespace(scheduled_new_reqs=[], unheard_of=True))


def test_a_second_job_is_told_of_an_output_that_is_not_understood(
    hooked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of the output can be read, so that the worker does not even learn that another job has begun."""
    worker = hooked(ranks=[3], save_path=str(tmp_path / "one"))()
    run(worker, 6)
    second = {"profile_token_start": 4, "save_path": str(tmp_path / "two"), "device": "cpu"}
    monkeypatch.setenv(ENV_NAME, json.dumps(second))
    hooks.put_in()
    worker.execute_model(object())
    worker.execute_model(object())
    assert len([record for record in caplog.records if "the job goes on" in record.message]) == 1
    (manifest,) = (json.loads(path.read_text()) for path in (tmp_path / "two").glob("*.manifest.json"))
    assert "profiling stopped by a failure: AttributeError" in manifest["notes"][0]


def test_settings_that_cannot_be_read_leave_the_engine_alone(
    hooked: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_logged_texts()
    worker = hooked(profile_token_end=-1)()
    with caplog.at_level(logging.WARNING):
        run(worker, 6)
    assert len([r for r in caplog.records if "profile_token_end=-1" in r.message]) == 1
    assert worker.calls.count("sample_tokens") == 6


def test_shutdown_closes_and_writes(hooked: Any, tmp_path: Path) -> None:
    worker = hooked(profile_token_start=2, profile_token_end=None)()
    worker.execute_model(output({"a": 4}, new=("a",)))
    for made in range(1, 6):
        worker.execute_model(output({"a": 1}, made=made))
    worker.shutdown()
    assert captured(tmp_path)[:3] == [(2, 3), (3, 4), (4, 5)]
    assert len(list(tmp_path.glob("*.pt.trace.json.gz"))) == 1
    assert worker.calls[-1] == "shutdown"


@pytest.fixture
def in_process_client() -> Any:
    """What drives an engine in the job's own process: it is given each request."""

    class InprocClient:
        def add_request(self, request: str) -> str:
            return request

    hooks._hook_in_process_client(SimpleNamespace(InprocClient=InprocClient))
    return InprocClient()


def test_a_second_job_in_the_same_process_has_its_own_window(
    hooked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process_client: Any
) -> None:
    worker = hooked(save_path=str(tmp_path / "one"))()
    assert in_process_client.add_request("a") == "a"
    run(worker, 6, "a")
    second = {"profile_token_start": 4, "save_path": str(tmp_path / "two"), "device": "cpu"}
    monkeypatch.setenv(ENV_NAME, json.dumps(second))
    in_process_client.add_request("b")
    run(worker, 6, "b")
    monkeypatch.delenv(ENV_NAME)
    in_process_client.add_request("c")
    run(worker, 6, "c")
    close_all()
    assert captured(tmp_path / "one") == [(2, 3), (3, 4)]
    assert captured(tmp_path / "two") == [(4, 5), (5, 6)]


def test_a_worker_that_was_not_asked_for_has_no_hooks_left(hooked: Any) -> None:
    kind = hooked()
    assert is_hooked(kind)
    worker = kind(rank=1)
    worker.compile_or_warm_up_model()
    run(worker, 2)
    assert not is_hooked(kind)


def test_when_all_is_captured_no_hooks_are_left(hooked: Any, tmp_path: Path) -> None:
    kind = hooked()
    worker = kind()
    run(worker, 6)
    assert not is_hooked(kind)
    close_all()
    assert captured(tmp_path) == [(2, 3), (3, 4)]


def test_hooks_stay_while_any_worker_of_the_process_waits(hooked: Any, tmp_path: Path) -> None:
    kind = hooked()
    first, second = kind(), kind()
    second.compile_or_warm_up_model()
    run(first, 6, "a")
    assert is_hooked(kind)
    run(second, 6, "b")
    assert not is_hooked(kind)
    third = kind()
    third.compile_or_warm_up_model()
    run(third, 6, "c")
    close_all()
    assert captured(tmp_path) == [(2, 3), (3, 4)] * 3


def test_a_start_call_brings_the_hooks_back(hooked: Any, tmp_path: Path) -> None:
    kind = hooked(arm="request")
    worker = kind()
    worker.model_runner = V1Runner()
    run_with_table(worker, 6, "a")
    assert not is_hooked(kind)
    (word,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.manifest.json"))
    assert "start_profile was never called" in word["notes"][0]
    worker.profile(True)
    assert is_hooked(kind)
    run_with_table(worker, 6, "b")
    worker.profile(False)
    run_with_table(worker, 6, "c")
    assert not is_hooked(kind)
    close_all()
    assert captured(tmp_path) == [(2, 3), (3, 4)]


def test_hooks_of_others_on_top_are_left_alone(hooked: Any) -> None:
    kind = hooked()
    below = kind.execute_model

    def on_top(worker: Any, output: Any) -> Any:
        return below(worker, output)

    kind.execute_model = on_top
    run(kind(rank=1), 2)
    assert vars(kind)["execute_model"] is on_top


def test_two_engines_in_one_process_do_not_mix(hooked: Any, tmp_path: Path) -> None:
    kind = hooked()
    first, second = kind(), kind()
    first.execute_model(output({"a": 4}, new=("a",)))
    first.sample_tokens(None)
    run(second, 6, "b")
    for made in range(1, 6):
        first.execute_model(output({"a": 1}, made=made))
        first.sample_tokens(None)
    close_all()
    manifests = [json.loads(path.read_text()) for path in tmp_path.glob("*.manifest.json")]
    assert sorted(m["tracked"][0] for m in manifests if m["trace"]) == ["a", "b"]


def test_a_worker_class_that_calls_the_one_it_inherits_from_runs_one_iteration(hooked: Any) -> None:
    base = hooked()

    class Own(base):  # type: ignore[misc, valid-type]
        def execute_model(self, scheduler_output: Any) -> Any:
            return super().execute_model(scheduler_output)

    hooks._hook_worker("Own")(SimpleNamespace(__name__="module", Own=Own))
    worker = Own()
    worker.execute_model(output({"a": 4}, new=("a",)))
    worker.sample_tokens(None)
    assert live_sessions()[0].iteration == 0


def test_ray_runs_iterations_past_the_worker(hooked: Any, tmp_path: Path) -> None:
    worker = hooked()()

    class RayWorkerWrapper:
        def __init__(self) -> None:
            self.worker = worker

        def execute_model_ray(self, given: tuple[Any, Any]) -> Any:
            return Worker.sample_tokens(worker, given)

    hooks._hook_ray(SimpleNamespace(RayWorkerWrapper=RayWorkerWrapper))
    wrapper = RayWorkerWrapper()
    wrapper.execute_model_ray((output({"a": 4}, new=("a",)), None))
    for made in range(1, 6):
        wrapper.execute_model_ray((output({"a": 1}, made=made), None))
    close_all()
    assert captured(tmp_path) == [(2, 3), (3, 4)]


def test_what_cannot_be_hooked_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        hooks._hook_worker("Worker")(SimpleNamespace(__name__="vllm.v1.worker.gpu_worker"))
    (record,) = caplog.records
    assert "cannot be windowed by tokens" in record.message
    assert "mapping: iterations" in record.message


# -- calls of clients ------------------------------------------------------------------------------------------------


class FrontEnd:
    """As LLMEngine from 0.32 on."""

    def __init__(self) -> None:
        self._profile_session_active = False

    def start_profile(self) -> str:
        if self._profile_session_active:
            raise RuntimeError("already active")
        self._profile_session_active = True
        return "started"


@pytest.mark.parametrize(("arm", "refuses"), [("request", False), ("job", True)])
def test_a_second_start_is_refused_for_the_engines_own_profiler_only(
    monkeypatch: pytest.MonkeyPatch, arm: str, refuses: bool
) -> None:
    monkeypatch.setenv(ENV_NAME, json.dumps({"arm": arm}))
    kind = type("LLMEngine", (), dict(vars(FrontEnd)))
    client._hook_front_end("LLMEngine")(SimpleNamespace(LLMEngine=kind))
    engine = kind()
    assert engine.start_profile() == "started"
    if refuses:
        with pytest.raises(RuntimeError, match="already active"):
            engine.start_profile()
    else:
        assert engine.start_profile() == "started"


@pytest.mark.parametrize(("arm", "attached", "routes"), [("request", [], 1), ("request", ["x"], 1), ("job", [], 0)])
def test_the_http_routes_are_there_under_arm_request(
    monkeypatch: pytest.MonkeyPatch, arm: str, attached: list[str], routes: int
) -> None:
    monkeypatch.setenv(ENV_NAME, json.dumps({"arm": arm}))
    router = SimpleNamespace(path="/start_profile")

    class App:
        def __init__(self) -> None:
            self.routes: list[Any] = []

        def include_router(self, router: Any) -> None:
            self.routes.append(router)

    def attach_router(app: App) -> None:
        if attached:
            app.include_router(router)

    module = ModuleType("api_router")
    module.attach_router, module.router = attach_router, router  # type: ignore[attr-defined]
    client._hook_router(module)
    app = App()
    module.attach_router(app)
    assert len(app.routes) == routes


# -- the entry point -------------------------------------------------------------------------------------------------

SILENT = """
import sys
import verl_profiler_conf.engines.vllm.plugin as plugin
assert plugin.register() is None
heavy = {"torch", "vllm", "wrapt", "omegaconf", "rich", "verl_profiler_conf.capture.session"} & set(sys.modules)
assert not heavy, heavy
"""


def test_without_a_window_the_plugin_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_NAME, raising=False)
    done = subprocess.run([sys.executable, "-c", SILENT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


HOOKS_ONCE = """
import sys, types
import verl_profiler_conf.engines.vllm.plugin as plugin
for _ in range(3):
    plugin.register()
assert "torch" not in sys.modules and "vllm" not in sys.modules
for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu_worker"):
    sys.modules[name] = types.ModuleType(name)
class Worker:
    def execute_model(self, output): return output
sys.modules["vllm.v1.worker.gpu_worker"].Worker = Worker
plain = Worker.execute_model
import wrapt
wrapt.notify_module_loaded(sys.modules["vllm.v1.worker.gpu_worker"])
assert Worker.execute_model is not plain and Worker.execute_model.__wrapped__ is plain
"""


def test_registered_again_and_again_it_hooks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_NAME, "{}")
    done = subprocess.run([sys.executable, "-c", HOOKS_ONCE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_plugin_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise OSError("no room")

    monkeypatch.setenv(ENV_NAME, "{}")
    monkeypatch.setattr(hooks, "install", fails)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "no room" in caplog.text


def test_the_hook_lives_and_dies_with_its_worker(hooked: Any) -> None:
    worker = hooked()()
    run(worker, 2)
    assert STATE in vars(worker)
