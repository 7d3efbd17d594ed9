"""A rollout to which something happens, in a process of its own: with a window in force, or as it is without one.

    python fault_job.py transformers|vllm FAULT      one job
    python fault_job.py transformers|vllm serve      jobs in forks of a process that has what they need

What happens is in `faults`. The engine runs in the job's own process. The window's settings are in `$FAULT_WINDOW`;
without them the package is not imported. Prints the tokens of each response.
"""

from __future__ import annotations

import contextlib
import gc
import gzip
import json
import logging
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import AT, PREPARED, at_the_token, failed, keep_process_groups, listening
from tiny import SMALL_LLAMA
from waiting import when_logged

LENGTH = 16
ROWS = 4
OWN_PROFILER = "engines_own_profiler"


# -- the job -----------------------------------------------------------------------------------------------------------


Rollout = Callable[[str, bool], list[list[int]]]
"""The fault, and whether tokens are sampled -> the tokens of each response. Prints a digest of their scores."""


def load_transformers() -> Rollout:
    import torch
    import transformers
    from transformers.models.llama import modeling_llama  # noqa: F401 - takes its time

    return lambda fault, sampled: transformers_rollout(torch, transformers, fault, sampled)


def transformers_rollout(torch: Any, transformers: Any, fault: str, sampled: bool) -> list[list[int]]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL_LLAMA)
    model = transformers.LlamaForCausalLM(config).eval()
    happen = at_the_token(fault)

    def within(_: Any, scores: Any) -> Any:
        happen()
        return scores

    ids = torch.arange(3, 3 + ROWS * 8).reshape(ROWS, 8)
    generated: Any = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=LENGTH,
        min_new_tokens=LENGTH,
        do_sample=sampled,
        logits_processor=transformers.LogitsProcessorList([within]),
        return_dict_in_generate=True,
        output_scores=True,
    )
    print("scores:", hash(tuple(float(step.sum().nan_to_num()) for step in generated.scores)), flush=True)
    return generated.sequences[:, 8:].tolist()  # type: ignore[no-any-return]


def load_vllm() -> Rollout:
    from vllm_driver import ENVIRONMENT, options
    from workloads import Build

    os.environ.update(ENVIRONMENT | {"VLLM_LOGGING_STREAM": "ext://sys.stderr"})
    from vllm import LLM

    with tempfile.TemporaryDirectory() as models:
        own = {"profiler": "torch", "torch_profiler_dir": models, "ignore_frontend": True}
        llm = LLM(**options(Build(overlap=False), Path(models)), profiler_config=own)
    keep_process_groups()
    return lambda fault, sampled: vllm_rollout(llm, fault, sampled)


def vllm_rollout(llm: Any, fault: str, sampled: bool) -> list[list[int]]:
    """With the engine in this process, which was made before a window was put in force."""
    from vllm import SamplingParams
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if "FAULT_WINDOW" in os.environ:
        from verl_profiler_conf.engines.vllm.plugin import register

        register()
    plain = GPUModelRunner.execute_model
    happen = vllms_own_profiler(llm) if fault == OWN_PROFILER else at_the_token(fault)

    def execute_model(runner: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        if output.total_num_scheduled_tokens:
            happen()
        return plain(runner, output, *args, **kwargs)

    GPUModelRunner.execute_model = execute_model
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 1} if sampled else {"temperature": 0}
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, detokenize=False, logprobs=1, **sampling)
    prompts = [{"prompt_token_ids": [5 + number, 17, 250 - number, 9]} for number in range(ROWS)]
    responses = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    for trace in Path.cwd().glob("own/*.json.gz"):
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        print("own profiler:", sum(event.get("name", "").startswith("aten::") for event in events), flush=True)
    print("scores:", [response.cumulative_logprob for response in responses], flush=True)
    return [list(response.token_ids) for response in responses]


def vllms_own_profiler(llm: Any) -> Callable[[], None]:
    """To be called in each forward: `start_profile` at the token that faults happen at, `stop_profile` two later."""
    llm.llm_engine.vllm_config.profiler_config.torch_profiler_dir = str(Path.cwd() / "own")
    made = 0

    def within() -> None:
        nonlocal made
        made += 1
        if made == AT + 1:
            llm.start_profile()
        elif made == AT + 3:
            llm.stop_profile()

    return within


ENGINES: dict[str, Callable[[], Rollout]] = {"transformers": load_transformers, "vllm": load_vllm}


def serve(rollout: Rollout) -> None:
    """Fork a job for each line of JSON on stdin: the fault, its environment and its files. Prints exit codes.

    What an engine needs takes most of a run's time, and is done once, before.
    """
    gc.freeze()  # else each job looks through all that the engine has imported, several times at its end
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.environ.clear()
            os.environ.update(order["env"])
            os.chdir(order["cwd"])
            for number, name in ((0, os.devnull), (1, "out"), (2, "err")):
                os.dup2(os.open(name, os.O_CREAT | os.O_RDWR, 0o644), number)
            run(rollout, order["fault"])
            return
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def run(rollout: Rollout, fault: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts its background jobs without it
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
    limits = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)}
    with contextlib.ExitStack() as stack:
        raw = os.environ.get("FAULT_WINDOW")
        if raw is not None:
            from verl_profiler_conf import Settings, activate

            job = activate(Settings.from_mapping(json.loads(raw)))
            PREPARED.get(fault, lambda: None)()
            listening.enter_context(when_logged("could not be written", failed.set))
            stack.enter_context(job)
        tokens = rollout(fault, fault == "sampled")
        print("tokens:", json.dumps(tokens), flush=True)
        if raw is not None and fault.endswith("for_a_while"):
            assert failed.wait(60)
            for kind, limit in limits.items():
                resource.setrlimit(kind, limit)
    print("ended", flush=True)


def main(engine: str, fault: str) -> None:
    for number in (signal.SIGHUP, signal.SIGQUIT):  # ignored in what `nohup` or a shell's `&` has started
        signal.signal(number, signal.SIG_DFL)
    # a result of the server goes to where its tests read, whatever an engine prints while it is made
    results = os.dup(1)
    os.dup2(2, 1)
    rollout = ENGINES[engine]()
    if fault == "serve":
        rollout("nothing", False)  # what an engine imports when it first runs, each job would import again
    sys.stdout.flush()
    os.dup2(results, 1)
    if fault == "serve":
        serve(rollout)
    else:
        run(rollout, fault)


if __name__ == "__main__":
    main(*sys.argv[1:])
