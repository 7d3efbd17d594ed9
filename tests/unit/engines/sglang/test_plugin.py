"""SGLang's plugin where no SGLang is: what it hooks, and what cannot run on one CPU (data and pipeline parallelism,
disaggregation, sampling that comes later), on a stand-in for the scheduler that has just the members which are read."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import wrapt
from sglang_schedule import make_request

from verl_profiler_conf.capture.manifest import gather
from verl_profiler_conf.capture.session import Session, close_all
from verl_profiler_conf.core.errors import UnavailableError
from verl_profiler_conf.core.logs import forget_logged_texts, forget_reasons
from verl_profiler_conf.core.settings import ENV_NAME, Settings
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.engines import hooking
from verl_profiler_conf.engines.sglang import hooks, plugin, release
from verl_profiler_conf.engines.sglang.worker import global_rank
from verl_profiler_conf.launch.summary import missing_lines


class Mode:
    def __init__(self, name: str) -> None:
        self.name = name

    def is_decode(self) -> bool:
        return self.name == "DECODE"

    def is_prebuilt(self) -> bool:
        return self.name == "PREBUILT"


class NoSpeculation:
    def is_none(self) -> bool:
        return True


class StandInScheduler:
    """Runs whatever it is told, and keeps what a session was told meanwhile."""

    def __init__(self, **facts: Any) -> None:
        self.is_generation = True
        self.spec_algorithm = NoSpeculation()
        self.server_args = SimpleNamespace(enable_dp_attention=False)
        self.tp_rank, self.tp_size, self.pp_rank, self.pp_size, self.dp_rank = 0, 1, 0, 1, None
        self.idle = True
        vars(self).update(facts)

    def run_batch(self, batch: Any) -> Any:
        if isinstance(batch.outcome, Exception):
            raise batch.outcome
        return batch.outcome

    def launch_batch_sample_if_needed(self, result: Any, batch: Any) -> None:
        result.delay_sample_func = None

    def on_idle(self) -> None:
        pass

    def is_fully_idle(self) -> bool:
        return self.idle


class ProfileReqOutput(SimpleNamespace):
    pass


@pytest.fixture
def scheduler_class(monkeypatch: pytest.MonkeyPatch) -> type[StandInScheduler]:
    """A hooked scheduler, in a process that has loaded the plugin."""
    monkeypatch.setenv(ENV_NAME, json.dumps({"profile_token_start": 0, "profile_token_end": 2, "device": "cpu"}))
    hooked = type("Scheduler", (StandInScheduler,), {})
    hooks._hook_scheduler(SimpleNamespace(Scheduler=hooked))
    return hooked


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What sessions are told."""
    calls: list[str] = []

    def note(name: str) -> Any:
        def method(self: Session, *args: Any, **kwargs: Any) -> None:
            calls.append(" ".join([name, *(str(arg) for arg in args if isinstance(arg, str))]))

        return method

    for name in ("begin", "end", "idle", "start", "stop", "close"):
        monkeypatch.setattr(Session, name, note(name))
    return calls


def batch(mode: str = "DECODE", reqs: int = 1, outcome: Any = None) -> Any:
    return SimpleNamespace(
        forward_mode=Mode(mode),
        reqs=[make_request(f"r{i}", 3) for i in range(reqs)],
        seq_lens_cpu=[4] * reqs,
        encoder_lens_cpu=None,
        decoding_reqs=None,
        outcome=SimpleNamespace(delay_sample_func=None) if outcome is None else outcome,
    )


def test_plugin_does_nothing_without_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_NAME, raising=False)
    monkeypatch.setattr(hooks, "when_imported", lambda *_: pytest.fail("a module is hooked"))
    plugin.register()


def test_plugin_is_light() -> None:
    code = (
        "import sys; from verl_profiler_conf.engines.sglang.plugin import register; register(); register(); "
        "assert not {'torch', 'sglang', 'hydra', 'rich'} & set(sys.modules), 'imported'"
    )
    environment = {"PATH": "", ENV_NAME: json.dumps({"profile_token_start": 0}), "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_registering_twice_hooks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[str] = []
    monkeypatch.setenv(ENV_NAME, json.dumps({"profile_token_start": 0}))
    monkeypatch.setattr(hooking, "_hooked", set())
    monkeypatch.setattr(wrapt, "register_post_import_hook", lambda _, module: hooks.append(module))
    plugin.register()
    plugin.register()
    assert len(hooks) == len(set(hooks)) == 6


@pytest.mark.parametrize(("version", "says"), [("0.5.10.post1", True), ("0.5.11", False), ("my-fork", False)])
def test_release_without_plugins_is_named_once(
    version: str, says: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forget_logged_texts()
    module = ModuleType("sglang")
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang", module)
    assert [release.is_too_old(), release.is_too_old()] == [says, says]
    assert len(caplog.messages) == says
    assert all("0.5.11 or newer" in text and "mapping: iterations" in text for text in caplog.messages)


def test_scheduler_of_another_make_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Scheduler:
        def run_batch(self) -> None: ...

    before = dict(vars(Scheduler))
    hooks._hook_scheduler(SimpleNamespace(Scheduler=Scheduler))
    assert dict(vars(Scheduler)) == before
    assert ["launch_batch_sample_if_needed, on_idle" in text for text in caplog.messages] == [True]


def test_iteration_ends_with_its_sampling(scheduler_class: type[StandInScheduler], told: list[str]) -> None:
    scheduler = scheduler_class()
    scheduler.run_batch(batch())
    assert told == ["begin", "end"]
    later = batch(outcome=SimpleNamespace(delay_sample_func=print))
    result = scheduler.run_batch(later)
    assert told[2:] == ["begin"]
    scheduler.launch_batch_sample_if_needed(result, later)
    assert told[3:] == ["end"]


def test_failing_forward_saves_the_capture_and_raises(scheduler_class: type[StandInScheduler], told: list[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        scheduler_class().run_batch(batch(outcome=ZeroDivisionError()))
    assert told == ["begin", "idle", "close error"]


def test_batches_of_nothing_are_no_iterations(scheduler_class: type[StandInScheduler], told: list[str]) -> None:
    scheduler = scheduler_class()
    scheduler.on_idle()
    scheduler.run_batch(batch("PREBUILT"))  # disaggregated decoding: its requests' prompts were run elsewhere
    assert told == []
    scheduler.run_batch(batch())
    scheduler.idle = False  # requests wait for room
    scheduler.run_batch(batch("NO_ACTION", reqs=0))  # data-parallel attention: another rank has work
    assert told == ["begin", "end"]
    scheduler.idle = True
    scheduler.run_batch(batch("NO_ACTION", reqs=0))
    scheduler.on_idle()
    assert told[2:] == ["idle"], "once"


@pytest.mark.parametrize(
    ("facts", "rank"),
    [
        ({"tp_rank": 1, "tp_size": 2}, 1),
        ({"tp_rank": 1, "tp_size": 2, "pp_rank": 2, "pp_size": 3}, 5),
        ({"tp_rank": 1, "tp_size": 2, "pp_size": 3, "dp_rank": 2}, 13),
        ({"tp_rank": 3, "tp_size": 4, "dp_rank": 1, "server_args": SimpleNamespace(enable_dp_attention=True)}, 3),
    ],
)
@pytest.mark.parametrize("kept", ["scheduler", "ps", "context"])
def test_rank_over_stages_and_replicas(
    facts: dict[str, Any], rank: int, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = StandInScheduler(**facts)
    if kept != "scheduler":
        names = ("tp_rank", "tp_size", "pp_rank", "pp_size", "dp_rank")
        place = SimpleNamespace(**{name: vars(scheduler).pop(name) for name in names})
        if kept == "ps":
            vars(scheduler)["ps"] = place
        context = ModuleType("sglang.srt.runtime_context")
        context.get_parallel = lambda: place  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
        monkeypatch.setitem(sys.modules, "sglang.srt", ModuleType("sglang.srt"))
        monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    assert global_rank(scheduler) == rank


@pytest.mark.parametrize("facts", [{"is_generation": False}, {"enable_pdmux": True}])
def test_schedulers_that_make_no_tokens_one_by_one(
    facts: dict[str, Any], scheduler_class: type[StandInScheduler], told: list[str]
) -> None:
    scheduler = scheduler_class(**facts)
    scheduler.run_batch(batch())
    scheduler.on_idle()
    assert told == []


@pytest.mark.parametrize("field", ["type", "req_type"])
def test_profile_calls_arrive(
    field: str,
    scheduler_class: type[StandInScheduler],
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    window = {"profile_token_start": 0, "arm": "request", "device": "cpu", "save_path": str(tmp_path)}
    monkeypatch.setenv(ENV_NAME, json.dumps(window))
    structs = ModuleType("sglang.srt.managers.io_struct")
    structs.ProfileReqOutput = ProfileReqOutput  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, structs.__name__, structs)

    class Manager:
        def _profile(self, request: Any) -> str:
            return "SGLang's own"

    hooks._hook_profile("Manager", "_profile")(SimpleNamespace(Manager=Manager))
    scheduler_class()

    def call(kind: str, **more: Any) -> Any:
        request = SimpleNamespace(**{field: SimpleNamespace(name=kind)}, **more)
        return Manager()._profile(request)  # type: ignore[arg-type]

    for kind in ("STOP_PROFILE", "START_PROFILE", "STOP_PROFILE", "STOP_PROFILE"):
        assert call(kind).success
    call("START_PROFILE", profile_prefix="step7", start_step=3, num_steps=1)
    assert told == ["stop", "start", "stop", "stop", "start step7"]

    monkeypatch.setenv(ENV_NAME, json.dumps({**window, "arm": "job"}))
    scheduler_class()
    assert call("START_PROFILE") == "SGLang's own"


def test_batch_that_is_not_understood_costs_the_profile_only(
    scheduler_class: type[StandInScheduler],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    settings = Settings(windows=(TokenWindow(0, 2),), device="cpu", save_path=str(tmp_path), run_id="mine")
    monkeypatch.setenv(ENV_NAME, settings.to_json())
    scheduler = scheduler_class()
    strange = batch()
    strange.reqs = [SimpleNamespace()]
    with caplog.at_level(logging.WARNING):
        assert scheduler.run_batch(strange) is strange.outcome
        assert scheduler.run_batch(batch()) is not None
        scheduler.on_idle()
        close_all("job_end")
    (said,) = caplog.messages
    assert said.startswith("no capture: what the scheduler of SGLang ")
    (manifest,) = gather(tmp_path, "mine")
    assert (manifest.closed_by, manifest.trace) == ("error", None)
    assert manifest.notes[0].startswith("no capture: what the scheduler of SGLang ")
    assert "(no Req.rid, no Req.origin_input_ids, " in manifest.notes[0]
    forget_reasons()  # the job is another process, and its log is another
    (line,) = missing_lines(settings, [manifest], unfinished=False)
    assert "no capture: what the scheduler of SGLang " in line
    assert "never reached" not in line


def test_batch_that_is_not_understood_raises_where_asked(
    scheduler_class: type[StandInScheduler], told: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(
        ENV_NAME, json.dumps({"profile_token_start": 0, "on_error": "raise", "save_path": str(tmp_path)})
    )
    strange = batch()
    strange.reqs = [SimpleNamespace()]
    with pytest.raises(UnavailableError, match=r"no Req\.rid"):
        scheduler_class().run_batch(strange)


def test_settings_that_cannot_be_read_are_said_and_the_engine_runs(
    scheduler_class: type[StandInScheduler], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forget_logged_texts()
    monkeypatch.setenv(ENV_NAME, "{not json")
    scheduler = scheduler_class()
    assert scheduler.run_batch(batch()) is not None
    scheduler.on_idle()
    assert ["SGLang runs without the window" in text for text in caplog.messages] == [True]
