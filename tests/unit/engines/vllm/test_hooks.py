"""The hooks around a worker, on stand-ins for vLLM's classes: what cannot be provoked in a real engine on a CPU."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from oracle import Iteration, expect_lead
from vllm_runner import V1Runner
from vllm_schedule import DRAFTS, LONG, STOP, Pace, RandomEngine, load

from verl_profiler_conf.capture.session import close_all, live_sessions
from verl_profiler_conf.core.gate import LeadGate
from verl_profiler_conf.core.logs import forget_logged_texts
from verl_profiler_conf.core.settings import ENV_NAME
from verl_profiler_conf.engines.vllm import client, hooks, plugin
from verl_profiler_conf.engines.vllm import worker as worker_module
from verl_profiler_conf.engines.vllm.worker import STATE, global_rank

pytest.importorskip("torch")


class Worker:
    """As `vllm.v1.worker.gpu_worker.Worker`, from the hook's side."""

    def __init__(self, rank: int = 0, **parallel: Any) -> None:
        self.rank = rank
        self.calls: list[Any] = []
        self.raises: dict[str, Exception] = {}
        self.returns: Any = None
        self.during: Any = None
        """Runs within `execute_model`."""
        self.model_runner = SimpleNamespace(requests={})
        defaults = {
            "data_parallel_size": 1,
            "data_parallel_rank": 0,
            "world_size": 1,
            "pipeline_parallel_size": 1,
            "distributed_executor_backend": "mp",
        }
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(**{**defaults, **parallel}),
            scheduler_config=SimpleNamespace(async_scheduling=False),
            speculative_config=None,
            model_config=SimpleNamespace(max_model_len=1024),
        )

    def execute_model(self, scheduler_output: Any) -> Any:
        self.calls.append("execute_model")
        if self.during is not None:
            self.during()
        if "execute_model" in self.raises:
            raise self.raises["execute_model"]
        return self.returns

    def sample_tokens(self, grammar_output: Any) -> Any:
        self.calls.append("sample_tokens")
        if "sample_tokens" in self.raises:
            raise self.raises["sample_tokens"]
        return "sampled"

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        self.calls.append(("profile", is_start, profile_prefix))
        raise RuntimeError("Profiling is not enabled.")

    def compile_or_warm_up_model(self) -> None:
        for _ in range(3):
            self.execute_model(output({"_warmup_0_": 1}, new=("_warmup_0_",)))
            self.sample_tokens(None)

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def output(scheduled: dict[str, int], *, new: tuple[str, ...] = (), made: int = 0, finished: Any = ()) -> Any:
    params = SimpleNamespace(max_tokens=50, all_stop_token_ids=set())
    old = [name for name in scheduled if name not in new]
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=name, prompt_token_ids=[5] * scheduled[name], num_computed_tokens=0, sampling_params=params
            )
            for name in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=old,
            num_computed_tokens=[3 + made for _ in old],
            num_output_tokens=[made for _ in old],
            resumed_req_ids=set(),
        ),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens={},
        finished_req_ids=set(finished),
    )


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Publish settings; a worker class that has been hooked."""

    def publish(**settings: Any) -> type[Worker]:
        raw = {"profile_token_start": 2, "profile_token_end": 4, "save_path": str(tmp_path), "device": "cpu"}
        monkeypatch.setenv(ENV_NAME, json.dumps({**raw, **settings}))
        kind = type("Worker", (Worker,), dict(vars(Worker)))
        kind.plain, kind.plain_sample = kind.execute_model, kind.sample_tokens  # type: ignore[attr-defined]
        hooks._hook_worker("Worker")(SimpleNamespace(__name__="module", Worker=kind))
        return kind

    yield publish
    close_all()


def run(worker: Any, responses: int, name: str = "a") -> None:
    worker.execute_model(output({name: 4}, new=(name,)))
    worker.sample_tokens(None)
    for made in range(1, responses):
        worker.execute_model(output({name: 1}, made=made))
        worker.sample_tokens(None)
    worker.execute_model(output({}, finished=(name,)))


def run_with_table(worker: Any, responses: int, name: str = "a") -> None:
    """As `run`, on a worker whose model runner keeps its requests as V1's does."""
    runner = worker.model_runner
    for made in range(responses):
        told = output({name: 1}, made=made) if made else output({name: 4}, new=(name,))
        worker.during = lambda told=told: runner.update_states(told)
        worker.execute_model(told)
        worker.sample_tokens(None)
        runner.keep_sampled({name: [7]})
    told = output({}, finished=(name,))
    worker.during = lambda: runner.update_states(told)
    worker.execute_model(told)


def captured(folder: Path) -> list[tuple[int, int]]:
    """(lo, hi) of each captured iteration, over all captures."""
    manifests = [json.loads(path.read_text()) for path in sorted(folder.glob("*.manifest.json"))]
    return [(row["lo"], row["hi"]) for manifest in manifests for row in manifest["rows"]]


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
    with pytest.raises(AttributeError):
        worker.execute_model(SimpleNamespace(scheduled_new_reqs=[], unheard_of=True))


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


def is_hooked(kind: type) -> bool:
    return vars(kind)["execute_model"] is not kind.plain or vars(kind)["sample_tokens"] is not kind.plain_sample  # type: ignore[attr-defined]


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


# -- iterations that the gate is not asked about ----------------------------------------------------------------------


def decode(worker: Any, made: dict[str, int], *, refilled: str | None = None) -> None:
    """One iteration in which these requests make their next token."""
    out = output(dict.fromkeys(made, 1))
    cached = out.scheduled_cached_reqs
    cached.num_output_tokens = list(made.values())
    cached.num_computed_tokens = [3 + tokens for tokens in made.values()]
    if refilled is not None:
        cached.resumed_req_ids = {refilled}
        cached.num_computed_tokens[cached.req_ids.index(refilled)] = 0
        out.num_scheduled_tokens[refilled] = 4 + made[refilled]
    worker.execute_model(out)
    worker.sample_tokens(None)
    for request in made:
        made[request] += 1


def two_requests(worker: Any) -> dict[str, int]:
    out = output({"a": 4, "b": 4}, new=("a", "b"))
    for new in out.scheduled_new_reqs:
        new.sampling_params = SimpleNamespace(max_tokens=500, all_stop_token_ids=set())
    worker.execute_model(out)
    worker.sample_tokens(None)
    return {"a": 1, "b": 1}


@pytest.mark.parametrize("away", [8, 20, 60])
@pytest.mark.parametrize("before", range(56, 72, 3))
def test_a_lead_that_is_away_for_a_while_is_captured_when_it_is_there(
    hooked: Any, tmp_path: Path, before: int, away: int
) -> None:
    worker = hooked(profile_token_start=100, profile_token_end=104)()
    made = two_requests(worker)
    for _ in range(before):
        decode(worker, made)
    for _ in range(away):
        alone = {"b": made["b"]}
        decode(worker, alone)
        made |= alone
    decode(worker, made, refilled="a")
    for _ in range(100):
        decode(worker, made)
    close_all()
    assert captured(tmp_path) == [(token, token + 1) for token in range(100, 104)]


def forty_tokens(hooked: Any) -> Any:
    """A worker whose requests have made so many, far from its window."""
    worker = hooked(profile_token_start=100, profile_token_end=104)()
    made = two_requests(worker)
    for _ in range(39):
        decode(worker, made)
    return worker


def furthest(folder: Path) -> int:
    (manifest,) = (json.loads(path.read_text()) for path in folder.glob("*.manifest.json"))
    assert manifest["trace"] is None
    return int(manifest["furthest_token"])


def test_the_job_ends_and_how_far_it_came_is_known(hooked: Any, tmp_path: Path) -> None:
    worker = forty_tokens(hooked)
    close_all()
    assert furthest(tmp_path) == 39
    del worker  # it had to live until here


def test_another_job_begins_and_how_far_the_last_came_is_known(
    hooked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = forty_tokens(hooked)
    monkeypatch.setenv(
        ENV_NAME, json.dumps({"profile_token_end": 2, "save_path": str(tmp_path / "b"), "device": "cpu"})
    )
    worker.execute_model(output({"c": 4}, new=("c",)))
    assert furthest(tmp_path) == 39


def test_a_window_whose_iterations_were_skipped_is_said(
    hooked: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = hooked(profile_token_start=100, profile_token_end=200)()
    made = two_requests(worker)
    decode(worker, made)
    hook = vars(worker)[STATE]
    hook.grant(200)  # as no gate would have it
    while made["a"] <= 100:
        decode(worker, made)
    close_all()
    assert "iterations of a window were left out" in caplog.text
    assert not list(tmp_path.glob("*.gz"))


def test_a_worker_class_that_calls_the_one_it_inherits_from_counts_once(hooked: Any) -> None:
    base = hooked(profile_token_start=100, profile_token_end=104)

    class Own(base):  # type: ignore[misc]
        def execute_model(self, scheduler_output: Any) -> Any:
            return super().execute_model(scheduler_output)

    hooks._hook_worker("Own")(SimpleNamespace(__name__="module", Own=Own))
    worker = Own()
    made = two_requests(worker)
    for _ in range(40):
        decode(worker, made)
    (session,) = live_sessions()
    session.catch_up()
    assert session.iteration == 40


# -- random schedules, through the hook and the gate ------------------------------------------------------------------

KINDS = [(False, False), (True, False), (False, True), (True, True)]
"""Overlapped, speculative."""


def play(kind: type[Worker], engine: RandomEngine, steps: Iterable[Any], *, table: bool) -> list[dict[str, range]]:
    """Run the steps of an engine on a new worker; what its iterations made."""
    worker = kind()
    worker.vllm_config.scheduler_config.async_scheduling = engine.overlapped
    if engine.speculative:
        worker.vllm_config.speculative_config = SimpleNamespace(num_speculative_tokens=DRAFTS)
    runner = V1Runner(overlapped=engine.overlapped)
    if table:
        worker.model_runner = runner
    made: list[dict[str, range]] = []
    for step in steps:
        worker.returns = step.result
        worker.during = lambda step=step: runner.update_states(step.output)
        worker.execute_model(step.output)
        runner.keep_sampled(
            {name: [STOP if at == engine.ends[name] else 7 for at in tokens] for name, tokens in step.made.items()}
        )
        if step.made:
            made.append(step.made)
    return made


@pytest.mark.parametrize("table", [False, True], ids=["history", "table"])
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("pace", "starts"), [(Pace(), (5, 9, 14, 20)), (LONG, (30, 60, 90, 120, 160))], ids=["short", "long"]
)
@pytest.mark.parametrize(("overlapped", "speculative"), KINDS)
def test_random_schedules_are_captured_as_the_rule_says(
    hooked: Any,
    tmp_path: Path,
    overlapped: bool,
    speculative: bool,
    pace: Pace,
    starts: tuple[int, ...],
    seed: int,
    table: bool,
) -> None:
    engine = RandomEngine(load("0.33.0"), 1000 + seed, overlapped=overlapped, speculative=speculative, pace=pace)
    start = starts[seed % len(starts)]
    ended: list[frozenset[str]] = []
    told: set[str] = set()

    def watched() -> Iterator[Any]:
        for step in engine:
            told.update(step.output.finished_req_ids)
            if step.made:
                ended.append(frozenset(told))
            yield step

    made = play(hooked(profile_token_start=start, profile_token_end=start + 6), engine, watched(), table=table)
    close_all()
    log = []
    for number, row in enumerate(made):
        ends = {request: engine.finals[request] for request in row}
        real = {r: range(min(m.start, ends[r]), min(m.stop, ends[r])) for r, m in row.items()}
        log.append(Iteration(number, made=real, ended=ended[number]))
    expected = [
        (it.number, it.made[capture.request].start, it.made[capture.request].stop)
        for capture in expect_lead(log, [(start, start + 6)])
        for it in log
        if it.number in capture.iterations and it.number not in capture.gaps
    ]
    manifests = [json.loads(path.read_text()) for path in tmp_path.glob("*.manifest.json")]
    rows = [(row["index"], row["lo"], row["hi"]) for m in manifests for row in m["rows"] if not row["gap"]]
    assert sorted(rows) == expected


def left(folder: Path) -> list[Any]:
    """What a job has left, apart from what differs from run to run."""
    manifests = [json.loads(path.read_text()) for path in folder.glob("*.manifest.json")]
    for manifest in manifests:
        for row in manifest["rows"]:
            del row["wall_ns"]
    kept = ("window", "part", "rows", "tracked", "closed_by", "furthest_token", "notes")
    return sorted(([manifest[key] for key in kept] for manifest in manifests), key=str)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("track", ["lead", "any", "all"])
@pytest.mark.parametrize(("overlapped", "speculative"), KINDS)
@pytest.mark.parametrize("table", [False, True], ids=["history", "table"])
def test_skipped_iterations_make_no_difference(
    hooked: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    table: bool,
    overlapped: bool,
    speculative: bool,
    track: str,
    seed: int,
) -> None:
    start = (40, 90, 150, 400)[seed % 4]
    found, granted = [], []
    may_skip = worker_module.skippable
    for skips in (False, True):
        folder = tmp_path / str(skips)
        with monkeypatch.context() as patch:
            patch.setattr(
                worker_module,
                "skippable",
                lambda *given, skips=skips, **named: granted.append(may_skip(*given, **named)) or granted[-1] * skips,
            )
            engine = RandomEngine(
                load("0.33.0"), 2000 + seed, overlapped=overlapped, speculative=speculative, pace=LONG
            )
            play(
                hooked(profile_token_start=start, profile_token_end=start + 6, track=track, save_path=str(folder)),
                engine,
                engine,
                table=table,
            )
            close_all()
        found.append(left(folder))
    assert found[0], "a window that was not reached leaves word"
    if overlapped and track != "lead":  # asked in every iteration, it takes one that ran in vain for one more token
        figures = [max(entry.pop(5) for entry in entries) for entries in found]
        assert 0 <= figures[0] - figures[1] <= 1
        for entries in found:
            for entry in entries:
                entry[-1] = [note.split(": the furthest")[0] for note in entry[-1]]
    assert found[0] == found[1]
    assert max(granted) > 4
