"""A rollout on an engine in processes of its own, in one of which something happens: with a window or without one.

    python engine_fault_job.py vllm|sglang MODELS_FOLDER

`$ENGINE_FAULT` says what happens within the forward that makes token `AT`; `$FAULT_RANKS`, how many ranks of tensor
parallelism there are. The window's settings are in
`$FAULT_WINDOW`. Prints tokens and log probabilities: two responses are greedy, two sampled with a seed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from waiting import wait_until

AT = 6
LENGTH = 16
SHORT_CLOSE_S = 8.0
PROMPTS = [[5 + number, 17, 250 - number, 3 * number + 9] * 4 for number in range(4)]


# -- in the engine's process -------------------------------------------------------------------------------------------


def install() -> None:
    """Called by a `sitecustomize` in every process."""
    import wrapt

    wrapt.register_post_import_hook(let_fork, "vllm.platforms.cpu")
    fault = os.environ.get("ENGINE_FAULT", "nothing")
    if fault == "nothing":
        return
    made = 0

    def around(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
        nonlocal made
        made += getattr(args[0], "total_num_scheduled_tokens", 1) > 0
        if made == AT + 1:
            if fault == "kill_rank_1" and runner.vllm_config.parallel_config.rank == 1:
                wait_for_earlier_captures(ranks=2)
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "raise":
                raise LookupError("the engine's own error")
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        return wrapped(*args, **kwargs)

    def hook(name: str) -> Any:
        return lambda module: wrapt.wrap_function_wrapper(module, name, around)

    if fault == "never_writes_rank_1":
        wrapt.register_post_import_hook(close_soon, "verl_profiler_conf.engines.vllm.release")
        wrapt.register_post_import_hook(never_write, "verl_profiler_conf.capture.backends.torch_profiler")
        return
    wrapt.register_post_import_hook(hook("GPUModelRunner.execute_model"), "vllm.v1.worker.gpu_model_runner")
    wrapt.register_post_import_hook(hook("TpModelWorker.forward_batch_generation"), "sglang.srt.managers.tp_worker")


def wait_for_earlier_captures(*, ranks: int) -> None:
    """Each rank has a trace on disk. Only what is complete survives the kill, and a trace is written meanwhile."""
    from verl_profiler_conf.core.settings import ENV_NAME

    if ENV_NAME in os.environ:
        folder = Path(json.loads(os.environ[ENV_NAME])["save_path"])
        wait_until(
            lambda: (
                sum(json.loads(path.read_text())["trace"] is not None for path in folder.glob("*.manifest.json"))
                == ranks
            ),
            "the earlier captures to be on disk",
        )


def let_fork(module: Any) -> None:
    """On the CPU vLLM starts its processes anew, each with half a minute of imports. On CUDA it forks them."""
    platform = module.CpuPlatform
    plain = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, config: Any) -> None:
        plain(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = classmethod(check_and_update_config)


def close_soon(module: Any) -> None:
    """vLLM's end does not wait a minute for a trace."""
    module.CLOSE_SECONDS = SHORT_CLOSE_S


def never_write(module: Any) -> None:
    """The trace of the second rank never gets done."""
    plain = module.TorchRecording.write

    def write(*args: Any) -> Any:
        from vllm.distributed import get_tensor_model_parallel_rank

        if get_tensor_model_parallel_rank() == 1:
            threading.Event().wait()
        return plain(*args)

    module.TorchRecording.write = write


def site(folder: Path, engine: str) -> Path:
    """A folder for PYTHONPATH that does so."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["import engine_fault_job", "engine_fault_job.install()"]
    if engine == "sglang":
        lines += ["import sglang_cpu_kernels", "sglang_cpu_kernels.install()"]
    (folder / "sitecustomize.py").write_text("\n".join(lines) + "\n")
    return folder


# -- in the job's ------------------------------------------------------------------------------------------------------


def vllm_rollout(models: Path) -> list[Any]:
    from vllm import LLM, SamplingParams
    from vllm_driver import options
    from workloads import PLAIN

    llm = LLM(**options(PLAIN, models), tensor_parallel_size=int(os.environ["FAULT_RANKS"]))
    sampling: list[dict[str, Any]] = [{"temperature": 0}] * 2 + [{"temperature": 1.0, "seed": seed} for seed in (1, 2)]
    params = [
        SamplingParams(max_tokens=LENGTH, ignore_eos=True, detokenize=False, logprobs=1, **each) for each in sampling
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    responses = [output.outputs[0] for output in outputs]
    return [
        [list(each.token_ids), [{token: found.logprob for token, found in at.items()} for at in each.logprobs or ()]]
        for each in responses
    ]


def sglang_rollout(models: Path) -> list[Any]:
    from sglang.srt.entrypoints.engine import Engine
    from sglang_driver import options
    from workloads import Build

    engine = Engine(**options(Build(), models), random_seed=7)
    sampling = [{"temperature": 0}] * 2 + [{"temperature": 1.0}] * 2
    outputs = engine.generate(
        input_ids=PROMPTS,
        sampling_params=[{"max_new_tokens": LENGTH, "ignore_eos": True, **each} for each in sampling],
        return_logprob=True,
    )
    responses = [[output["output_ids"], output["meta_info"]["output_token_logprobs"]] for output in outputs]
    engine.shutdown()
    return responses


def main(engine: str, models: str) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(name)s %(levelname)s %(message)s")
    logging.getLogger("verl_profiler_conf").setLevel(logging.INFO)
    raw = os.environ.get("FAULT_WINDOW")
    with contextlib.ExitStack() as stack:
        if raw is not None:
            from verl_profiler_conf import Settings, activate

            stack.enter_context(activate(Settings.from_mapping(json.loads(raw))))
        try:
            responses = {"vllm": vllm_rollout, "sglang": sglang_rollout}[engine](Path(models))
        except BaseException as error:
            print("error:", type(error).__name__, flush=True)
            raise
        print("responses:", json.dumps(responses), flush=True)
    print("ended", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
