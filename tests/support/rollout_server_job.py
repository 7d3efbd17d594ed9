"""verl's own server and client, without trainer and actors: what a rollout does, in one process and its engine's.

    python rollout_server_job.py FOLDER OVERRIDE ...

Three steps, each profiled: prompts in chunks; a weight update that cuts responses short, which go on afterwards; a
conversation of two turns. Prints for each how long its responses became, and how many iterations there were by its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import traceback
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import psutil
from real_trainer import launch
from waiting import wait_until_async

from verl_profiler_conf import activate

RESPONSE = 80
FIRST_TURN = 10
TOOL = 30
"""Tokens that the tool between the turns answers with."""


def prompt(number: int, length: int) -> list[int]:
    draw = random.Random(number)
    return [draw.randrange(3, 512) for _ in range(length)]


def standing_alone(config: Any) -> dict[str, Any]:
    """What both servers are told: the only replica, on the only node, without a trainer beside it."""
    from verl.workers.rollout.replica import RolloutMode

    return {
        "config": config.actor_rollout_ref.rollout,
        "model_config": config.actor_rollout_ref.model,
        "rollout_mode": RolloutMode.STANDALONE,
        "workers": [],
        "replica_rank": 0,
        "node_rank": 0,
        "nnodes": 1,
    }


async def vllm_server(config: Any) -> Any:
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    ranks = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    devices = ",".join(map(str, range(ranks)))
    server = vLLMHttpServer(**standing_alone(config), gpus_per_node=ranks, cuda_visible_devices=devices)
    await server.launch_server()
    pause = server.engine.pause_generation
    # vLLM 0.32 has another word for it than the release that verl 0.9.1 was made for
    server.engine.pause_generation = lambda wait_for_inflight_requests, clear_cache: pause(
        mode="wait" if wait_for_inflight_requests else "abort", clear_cache=clear_cache
    )
    return server


async def sglang_server(config: Any) -> Any:
    import sglang  # noqa: F401 - before verl, so that its stand-ins decide about Triton
    import sglang_cpu_kernels  # on the environment's path

    sglang_cpu_kernels.install()
    from verl.workers.rollout.replica import get_rollout_replica_class

    get_rollout_replica_class("sglang")  # takes the variable away that SGLang's own processes need here
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

    server = SGLangHttpServer(**standing_alone(config), cuda_visible_devices="0", base_gpu_id=0)
    await server.launch_server()
    return server


SERVERS = {"vllm": vllm_server, "sglang": sglang_server}


def make_client(config: Any, server: Any) -> Any:
    """The client that resumes what was aborted, with the server at hand in place of a Ray actor."""
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

    class Client(FullyAsyncLLMServerClient):
        async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
            # as by Ray, which pickles: a server changes what it gets
            return "0", SimpleNamespace(
                generate=SimpleNamespace(remote=lambda **call: server.generate(**deepcopy(call)))
            )

        def _release_server(self, server_id: str, request_id: str | None = None) -> None:
            pass

    return Client(config=config)


async def respond(client: Any, name: str, tokens: list[int], most: int = RESPONSE) -> list[int]:
    params = {"max_tokens": most, "temperature": 0.0}
    output = await client.generate(name, prompt_ids=tokens, sampling_params=params)
    return list(output.token_ids)


def all_have_begun(server: Any) -> bool:
    if hasattr(server, "engine"):
        made = [s.detokenizer.num_output_tokens() for s in server.engine.output_processor.request_states.values()]
    else:
        made = [len(state.output_ids) for state in server.tokenizer_manager.rid_to_state.values()]
    return bool(made) and min(made) >= 5


async def cut_short(server: Any) -> None:
    """As a weight update does, once every response has begun."""
    await wait_until_async(lambda: all_have_begun(server), "every response has begun")
    await server.abort_all_requests()
    await server.resume_generation()


async def chunked(client: Any, server: Any) -> list[list[int]]:
    return await asyncio.gather(*(respond(client, f"a{n}", prompt(n, 90 + n)) for n in range(4)))


async def updated(client: Any, server: Any) -> list[list[int]]:
    *responses, _ = await asyncio.gather(
        *(respond(client, f"b{n}", prompt(n, 20 + n)) for n in range(3)), cut_short(server)
    )
    return responses


async def conversation(client: Any, server: Any) -> list[list[int]]:
    asked = prompt(1, 30)
    said = await respond(client, "c", asked, FIRST_TURN)
    answered = await respond(client, "c", [*asked, *said, *prompt(2, TOOL)], RESPONSE)
    return [said, answered]


async def job(config: Any, folder: Path) -> list[dict[str, Any]]:
    server = await SERVERS[config.actor_rollout_ref.rollout.name](config)
    client = make_client(config, server)
    told = []
    for version, step in enumerate((chunked, updated, conversation)):
        await server.set_global_steps(version)
        await server.start_profile()
        lengths = [len(tokens) for tokens in await step(client, server)]
        await server.stop_profile()
        told.append({"lengths": lengths, "iterations": iterations_so_far()})
    # A trainer has other things to do now, while the captures are being written.
    await wait_until_async(lambda: len(written(folder)) == len(told), "a trace of each step is written")
    if hasattr(server, "engine"):
        server.engine.shutdown()
    return told


def written(folder: Path) -> list[Path]:
    """Traces that are whole: their manifests name them."""
    manifests = [json.loads(path.read_text()) for path in (folder / "profile").glob("*.manifest.json")]
    return [folder / "profile" / manifest["trace"] for manifest in manifests if manifest["trace"]]


def iterations_so_far() -> int:
    """As the spy has it, where there is one."""
    spied = Path(os.environ.get("VLLM_SPY", os.devnull))
    return sum('"made"' in line for line in spied.read_text().splitlines())


def main(folder: Path, overrides: list[str]) -> None:
    (place,) = find_spec("verl").submodule_search_locations  # type: ignore[union-attr]
    with hydra.initialize_config_dir(f"{place}/trainer/config", version_base=None):
        config = hydra.compose("ppo_trainer", [f"{k}={v}" for k, v in launch(folder).items()] + overrides)
    with activate(config, run_dir=folder):
        import ray

        ray.init(address="local", num_cpus=1, include_dashboard=False)
        print(json.dumps(asyncio.run(job(config, folder))), flush=True)
        ray.shutdown()


def _end(status: int) -> None:
    """As the actor ends that verl's server is: with all that it has started, of which SGLang's would live on."""
    sys.stdout.flush()
    sys.stderr.flush()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    os._exit(status)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2:])
    except BaseException:
        traceback.print_exc()
        _end(1)
    _end(0)
