"""An engine without a part that is read of it: that is said once, and the engine runs as ever. With stand-ins for the
engines' classes, since the real ones have these parts."""

from __future__ import annotations

import json
import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import wrapt

from verl_profiler_conf.capture.live import close_all
from verl_profiler_conf.core.logs import forget_logged_texts
from verl_profiler_conf.core.settings import ENV_NAME
from verl_profiler_conf.engines import hooking
from verl_profiler_conf.engines.sglang import client as sglang_client
from verl_profiler_conf.engines.sglang import hooks as sglang_hooks
from verl_profiler_conf.engines.transformers import continuous, plugin
from verl_profiler_conf.engines.transformers import hooks as transformers_hooks
from verl_profiler_conf.engines.vllm import client as vllm_client
from verl_profiler_conf.engines.vllm import hooks as vllm_hooks


@pytest.fixture(autouse=True)
def window(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    forget_logged_texts()
    settings = {"profile_token_start": 0, "arm": "request", "device": "cpu", "save_path": str(tmp_path)}
    monkeypatch.setenv(ENV_NAME, json.dumps(settings))
    yield
    close_all()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -- transformers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lacks"), [(plugin.MODULE, "GenerationMixin"), (continuous.MODULE, "ContinuousBatchingManager")]
)
def test_transformers_can_be_imported_without_the_class(
    name: str, lacks: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hooks: dict[str, Any] = {}
    monkeypatch.setattr(hooking, "_hooked", set())
    monkeypatch.setattr(wrapt, "register_post_import_hook", lambda hook, module: hooks.update({module: hook}))
    plugin.install()
    hooks[name](ModuleType(name))
    (line,) = warnings(caplog)
    assert line.startswith(f"{name} runs without the window: AttributeError")
    assert lacks in line


@pytest.mark.parametrize("name", ["_sample", "_assisted_decoding", "_has_unfinished_sequences"])
def test_transformers_without_a_loop(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def generate(self: Any) -> str:
        return "generated"

    wanted = ("_sample", "_assisted_decoding", "_has_unfinished_sequences")
    mixin: Any = type("GenerationMixin", (), {"generate": generate, **dict.fromkeys(wanted, generate)})
    delattr(mixin, name)
    pytest.importorskip("transformers")  # its version is named
    transformers_hooks.hook(SimpleNamespace(GenerationMixin=mixin))
    (line,) = warnings(caplog)
    assert f"GenerationMixin.{name}" in line
    assert mixin().generate() == "generated"


def test_a_transformers_with_only_the_counted_loops_is_hooked_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    def run(self: Any, *_: Any) -> str:
        return "ran"

    wanted = ("generate", "_sample", "_assisted_decoding", "_has_unfinished_sequences")
    mixin: Any = type("GenerationMixin", (), dict.fromkeys(wanted, run))
    transformers_hooks.hook(SimpleNamespace(GenerationMixin=mixin))
    assert warnings(caplog) == []
    assert isinstance(vars(mixin)["generate"], wrapt.FunctionWrapper)
    assert not hasattr(mixin, "_beam_search")


@pytest.mark.parametrize("name", ["_generation_step", "prepare_next_batch", "_run_generation_loop"])
def test_continuous_batching_without_a_method(name: str, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("transformers")  # its version is named

    def run(self: Any) -> str:
        return "ran"

    processor: Any = type("Processor", (), dict.fromkeys(("_generation_step", "prepare_next_batch"), run))
    manager: Any = type("Manager", (), {"_run_generation_loop": run, "start": run})
    for kind in (processor, manager):
        if name in vars(kind):
            delattr(kind, name)
    continuous.hook_continuous(SimpleNamespace(ContinuousBatchProcessor=processor, ContinuousBatchingManager=manager))
    assert [manager().start(), manager().start()] == ["ran", "ran"]
    lines = [line for line in warnings(caplog) if "arm: request waits" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("no capture of continuous batching in transformers ")


# -- vLLM --------------------------------------------------------------------------------------------------------------


def test_vllm_on_ray_without_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    class RayWorkerWrapper:
        def execute_model_ray(self, given: Any) -> str:
            return "ran"

    vllm_hooks._hook_ray(SimpleNamespace(RayWorkerWrapper=RayWorkerWrapper))
    wrapper: Any = RayWorkerWrapper()
    assert [wrapper.execute_model_ray((None, None)) for _ in range(3)] == ["ran"] * 3
    (line,) = warnings(caplog)
    assert "has no worker: no capture under Ray" in line


@pytest.mark.parametrize("name", ["RayWorkerWrapper", "execute_model_ray"])
def test_vllm_without_its_ray_executor(name: str) -> None:
    module = SimpleNamespace(RayWorkerWrapper=type("RayWorkerWrapper", (), {}))
    if name == "RayWorkerWrapper":
        del module.RayWorkerWrapper
    vllm_hooks._hook_ray(module)
    assert name not in vars(module) or "execute_model_ray" not in vars(module.RayWorkerWrapper)


@pytest.mark.parametrize("app", [SimpleNamespace(), SimpleNamespace(routes=[])])
def test_vllm_whose_server_takes_no_routes(app: Any, caplog: pytest.LogCaptureFixture) -> None:
    module: Any = ModuleType("api_router")
    module.router, module.attach_router = SimpleNamespace(), lambda app: "attached"
    vllm_client._hook_router(module)
    assert module.attach_router(app) == "attached"
    (line,) = warnings(caplog)
    assert line.startswith("this vLLM server has no /start_profile, which arm: request waits for: AttributeError")


# -- SGLang ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lacks", ["server_status", "obj"])
def test_sglang_whose_requests_are_not_known(lacks: str, caplog: pytest.LogCaptureFixture) -> None:
    class TokenizerManager:
        def __init__(self) -> None:
            if lacks != "server_status":
                self.server_status = SimpleNamespace(name="Starting")

        def generate_request(self, **request: Any) -> str:
            return "generated"

    def warm_up(manager: Any) -> list[str]:
        return [manager.generate_request(**{"obj" if lacks != "obj" else "request": SimpleNamespace()})] * 2

    module: Any = ModuleType("http_server")
    module._wait_and_warmup = warm_up
    sglang_client._hook_server(module)
    sglang_client._hook_tokenizer(SimpleNamespace(TokenizerManager=TokenizerManager))
    assert module._wait_and_warmup(TokenizerManager()) == ["generated"] * 2
    (line,) = warnings(caplog)
    assert line.startswith("SGLang's own requests are not known by name")


@pytest.mark.parametrize("lacks", ["class", "method"])
def test_sglang_without_the_method_of_start_profile(lacks: str, caplog: pytest.LogCaptureFixture) -> None:
    module = SimpleNamespace(Manager=type("Manager", (), {})) if lacks == "method" else SimpleNamespace()
    sglang_hooks._hook_profile("Manager", "_profile")(module)
    (line,) = warnings(caplog)
    assert "has no Manager._profile" in line
    assert "use arm: job" in line


@pytest.mark.parametrize("lacks", ["type", "answer", "recv_req"])
def test_sglang_whose_profile_request_is_not_known(
    lacks: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    structs: Any = ModuleType("structs")
    structs.ProfileReqOutput = SimpleNamespace
    if lacks == "answer":
        del structs.ProfileReqOutput
    monkeypatch.setitem(sys.modules, "structs", structs)
    monkeypatch.setattr(sglang_hooks, "ANSWERS", "structs")
    armed: list[bool] = []
    hook = SimpleNamespace(profile=lambda starts, label: not armed.append(starts))
    monkeypatch.setattr(sglang_hooks, "_hook_of_process", hook)

    class Manager:
        def _profile(self, *_: Any, **__: Any) -> str:
            return "SGLang's own"

    sglang_hooks._hook_profile("Manager", "_profile")(SimpleNamespace(Manager=Manager))
    request = SimpleNamespace() if lacks == "type" else SimpleNamespace(type=SimpleNamespace(name="START_PROFILE"))
    manager: Any = Manager()
    call = {"request": request} if lacks == "recv_req" else {"recv_req": request}
    assert [manager._profile(**call), manager._profile(**call)] == ["SGLang's own"] * 2
    assert armed == []
    (line,) = warnings(caplog)
    assert line.startswith("start_profile goes to SGLang's own profiler: ")
