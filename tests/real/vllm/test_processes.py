"""vLLM as servers run it: nothing of ours in the job's own process, engine and workers elsewhere."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("no vLLM in this environment", allow_module_level=True)

import vllm_spy
from oracle import check, expect_lead, read_trace
from vllm_async_job import PROMPTS, RESPONSE, run_script

from verl_profiler_conf.core.settings import ENV_NAME

pytestmark = pytest.mark.engine_vllm


def run_job(
    folder: Path, calls: list[str], *, tensor_parallel: int = 1, log_level: str = "WARNING", **settings: Any
) -> tuple[list[dict[str, Any]], str]:
    """Run the job with a window in its environment and nothing else; the manifests of what it captured, and its log."""
    raw = {"profile_token_start": 10, "profile_token_end": 16, "save_path": str(folder / "profile"), "device": "cpu"}
    environment = {
        "PYTHONPATH": vllm_spy.spy_path(folder / "spy"),
        "VLLM_LOGGING_LEVEL": log_level,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        vllm_spy.ENV: str(folder / "spy.jsonl"),
        ENV_NAME: json.dumps({**raw, **settings}),
    }
    done = run_script(folder, calls, environment, tensor_parallel)
    assert json.loads(done.stdout.splitlines()[-1]) == [RESPONSE] * PROMPTS * calls.count("generate")
    found = [json.loads(path.read_text()) for path in (folder / "profile").glob("*.manifest.json")]
    captures = sorted((m for m in found if m["trace"]), key=lambda m: (m["rank"], m["rows"][0]["index"]))
    return captures, done.stdout + done.stderr


@pytest.mark.every_version
def test_start_and_stop_calls_in_any_order_on_an_engine_without_a_profiler(tmp_path: Path) -> None:
    """And of the two ranks, the one that was asked for writes."""
    calls = ["stop", "start", "stop", "generate", "start", "start", "generate", "stop", "stop", "generate"]
    calls += ["start", "generate", "stop"]
    (first, second), text = run_job(tmp_path, calls, tensor_parallel=2, ranks=[1], arm="request")
    assert "waits for" not in text  # the engine was told to log warnings only
    log = vllm_spy.read_log(tmp_path / "spy.jsonl", first["pid"])
    rounds = [[it for it in log if next(iter(it.made)).startswith(f"round{number}")] for number in (6, 11)]
    for manifest, round_log in zip((first, second), rounds, strict=True):
        assert manifest["rank"] == 1
        (expected,) = expect_lead(round_log, [(10, 16)])
        check(read_trace(tmp_path / "profile" / manifest["trace"]), expected, log)


def test_ranks_of_tensor_parallelism_decide_alike(tmp_path: Path) -> None:
    manifests, text = run_job(tmp_path, ["generate"], tensor_parallel=2, log_level="INFO", all_ranks=True)
    assert [m["rank"] for m in manifests] == [0, 1]
    assert len({m["pid"] for m in manifests}) == 2
    told = [[(row["index"], row["lo"], row["hi"], row["requests"]) for row in m["rows"]] for m in manifests]
    assert told[0] == told[1]
    for manifest in manifests:
        log = vllm_spy.read_log(tmp_path / "spy.jsonl", manifest["pid"])
        (expected,) = expect_lead(log, [(10, 16)])
        check(read_trace(tmp_path / "profile" / manifest["trace"]), expected, log)
        # each engine process says once that it is armed, and once what it captured
        rank, folder = manifest["rank"], tmp_path / "profile"
        assert (
            text.count(f"armed: rank {rank} of vllm waits for response tokens [10, 16); captures go to {folder}") == 1
        )
        assert text.count(f"tokens [10, 16): 6 iterations of vllm, rank {rank} -> {folder / manifest['trace']} (") == 1


@pytest.mark.every_version
def test_the_http_routes_of_the_real_server(monkeypatch: pytest.MonkeyPatch) -> None:
    fastapi = pytest.importorskip("fastapi")
    from fastapi.testclient import TestClient
    from vllm.entrypoints.serve.profile import api_router

    from verl_profiler_conf.engines.vllm.plugin import register

    calls: list[str] = []

    class Client:
        async def start_profile(self, *_: Any, **__: Any) -> None:
            calls.append("start")

        async def stop_profile(self) -> None:
            calls.append("stop")

    def served(arm: str) -> Any:
        monkeypatch.setenv(ENV_NAME, json.dumps({"arm": arm}))
        register()
        app = fastapi.FastAPI()
        app.state.args = SimpleNamespace(profiler_config=None)
        app.state.engine_client = Client()
        api_router.attach_router(app)
        return TestClient(app)

    assert served("job").post("/start_profile").status_code == 404
    client = served("request")
    assert [client.post(f"/{call}_profile").status_code for call in ("start", "start", "stop", "stop")] == [200] * 4
    assert calls == ["start", "start", "stop", "stop"]
