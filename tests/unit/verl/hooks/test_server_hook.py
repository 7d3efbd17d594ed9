"""What is added to the calls of verl's servers and client. Those here are stand-ins with what matters of them; the
real ones are in test_trainer.py and test_rollout_server.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from verl_profiler_conf.core.logs import forget_logged_texts
from verl_profiler_conf.core.settings import ENV_NAME, TOKENS_BEFORE
from verl_profiler_conf.verl.hooks.client import hook_client
from verl_profiler_conf.verl.hooks.server import hook_server

REQUEST = {"profile_token_start": 20, "profile_token_end": 30, "arm": "request"}


@pytest.fixture(autouse=True)
def _in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_NAME, json.dumps(REQUEST))


class Engine:
    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    async def start_profile(self, profile_prefix: str | None = None, **more: Any) -> None:
        self.calls.append({"profile_prefix": profile_prefix, **more})


class OldEngine(Engine):
    async def start_profile(self) -> None:  # type: ignore[override]
        self.calls.append({})


async def launch_server(server: Any) -> None: ...


def start(engine: Engine, version: int | None, *, sglang: bool = False, **call: Any) -> list[dict[str, Any]]:
    class Server:
        replica_rank = 2
        global_steps = version
        launch_server = launch_server

        async def start_profile(self, **kwargs: Any) -> None:
            if sglang:
                await self.tokenizer_manager.start_profile(output_dir="/d")  # type: ignore[attr-defined]
            else:
                await self.engine.start_profile(**kwargs)  # type: ignore[attr-defined]

    attribute = "tokenizer_manager" if sglang else "engine"
    hook_server("Server", attribute)(SimpleNamespace(Server=Server))
    server = Server()
    setattr(server, attribute, engine)
    asyncio.run(server.start_profile(**call))
    return engine.calls


def test_the_step_is_the_one_after_the_weights() -> None:
    assert start(Engine(), 0) == [{"profile_prefix": "step1_replica2"}]
    assert start(Engine(), 7) == [{"profile_prefix": "step8_replica2"}]


def test_a_step_that_is_told_prevails_and_does_not_reach_the_engine() -> None:
    assert start(Engine(), 7, global_step=3) == [{"profile_prefix": "step3_replica2"}]


def test_a_prefix_that_is_there_stays() -> None:
    assert start(Engine(), 7, profile_prefix="mine") == [{"profile_prefix": "mine"}]


class TestVerlHasChanged:
    """Each attribute of verl's that the hooks touch, taken away: verl runs on, and the log says what is lost."""

    @pytest.fixture(autouse=True)
    def _not_said_yet(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forget_logged_texts()

    @pytest.mark.parametrize("missing", ["global_steps", "replica_rank"])
    def test_a_server_without_it(self, missing: str, caplog: pytest.LogCaptureFixture) -> None:
        engine = Engine()

        class Server:
            replica_rank = 2
            global_steps = 7
            launch_server = launch_server

            async def start_profile(self, **kwargs: Any) -> None:
                await engine.start_profile(**kwargs)

        Server.engine = engine  # type: ignore[attr-defined]
        delattr(Server, missing)
        hook_server("Server", "engine")(SimpleNamespace(Server=Server))
        asyncio.run(Server().start_profile())
        assert engine.calls == [{"profile_prefix": None}]
        (line,) = caplog.messages
        assert line.startswith("captures do not bear the RL step and the replica: AttributeError")
        assert missing in line

    @pytest.mark.parametrize(("node_rank", "lines"), [(0, 1), (1, 0)], ids=["first node", "second node of a replica"])
    def test_a_server_without_an_engine(self, node_rank: int, lines: int, caplog: pytest.LogCaptureFixture) -> None:
        calls = []

        class Server:
            replica_rank = 2
            global_steps = 7
            launch_server = launch_server

            async def start_profile(self, **kwargs: Any) -> None:
                calls.append(kwargs)

        Server.node_rank = node_rank  # type: ignore[attr-defined]
        hook_server("Server", "engine")(SimpleNamespace(Server=Server))
        asyncio.run(Server().start_profile())
        assert calls == [{}]
        assert [line.endswith("Server has no engine") for line in caplog.messages] == [True] * lines

    @pytest.mark.parametrize("module", [SimpleNamespace(__name__="m"), SimpleNamespace(__name__="m", Server=object)])
    def test_a_module_without_the_server(self, module: Any, caplog: pytest.LogCaptureFixture) -> None:
        hook_server("Server", "engine")(module)
        assert caplog.messages == [
            f"captures do not bear the RL step and the replica: m.Server has no coroutine {method}"
            for method in ("launch_server", "start_profile")
        ]

    @pytest.mark.parametrize("module", [SimpleNamespace(), SimpleNamespace(LLMServerClient=object)])
    def test_a_module_without_the_client(self, module: Any, caplog: pytest.LogCaptureFixture) -> None:
        hook_client(module)
        (line,) = caplog.messages
        assert "has no LLMServerClient.generate" in line

    def test_an_engine_that_takes_no_prefix(self, caplog: pytest.LogCaptureFixture) -> None:
        start(OldEngine(), 7)
        assert caplog.messages == [
            "captures do not bear the RL step and the replica: start_profile of OldEngine takes no profile_prefix"
        ]


def test_before_any_weights_there_is_no_step() -> None:
    assert start(Engine(), None) == [{"profile_prefix": None}]


def test_an_engine_that_takes_no_prefix_gets_none() -> None:
    assert start(OldEngine(), 7) == [{}]


def test_sglang_gets_it_for_that_call_only() -> None:
    engine = Engine()
    assert start(engine, 7, sglang=True) == [{"profile_prefix": "step8_replica2", "output_dir": "/d"}]
    assert "start_profile" not in vars(engine)


def test_verls_own_profiler_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_NAME, json.dumps({**REQUEST, "arm": "job"}))
    assert start(Engine(), 7) == [{"profile_prefix": None}]


class TestClient:
    @pytest.fixture
    def sent(self) -> Callable[..., list[dict[str, Any]]]:
        def send(name: str, *prompts: Any, **params: Any) -> list[dict[str, Any]]:
            calls: list[dict[str, Any]] = []

            class LLMServerClient:
                config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(name=name)))

                async def generate(self, request_id: str, **kwargs: Any) -> None:
                    calls.append(kwargs["sampling_params"])

            hook_client(SimpleNamespace(LLMServerClient=LLMServerClient))
            client = LLMServerClient()
            own = dict(params)
            for prompt in prompts:
                asyncio.run(client.generate("a", prompt_ids=prompt, sampling_params=own))
            assert own == params, "the caller's own are used again"
            return calls

        return send

    @pytest.mark.parametrize(("name", "carrier"), [("vllm", "extra_args"), ("sglang", "custom_params")])
    def test_continuations_say_what_lies_behind(
        self, name: str, carrier: str, sent: Callable[..., list[dict[str, Any]]]
    ) -> None:
        first, second = sent(name, [5, 6], [5, 6, 7, 8, 9], **{"top_k": 1, carrier: {"mine": 1}})
        assert first == {"top_k": 1, carrier: {"mine": 1}}, "the first request is as it would be"
        assert second == {"top_k": 1, carrier: {"mine": 1, TOKENS_BEFORE: 3}}

    def test_engines_that_cannot_be_told_are_not(self, sent: Callable[..., list[dict[str, Any]]]) -> None:
        assert sent("trtllm", [5, 6], [5, 6, 7]) == [{}, {}]

    def test_what_is_not_understood_goes_through(self, sent: Callable[..., list[dict[str, Any]]]) -> None:
        assert sent("vllm", None, [5]) == [{}, {}]
