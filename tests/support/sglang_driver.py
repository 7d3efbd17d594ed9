"""Runs the workloads on the real SGLang, in its own processes: engines are kept from test to test, one at a time."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import sglang_cpu_kernels  # on the environment's path
import sglang_spy
from oracle import Run
from packaging.version import Version
from tiny import prompts, tiny_model
from workloads import Build, Workload

from verl_profiler_conf.core.settings import ENV_NAME

NAME = "sglang"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1"}
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
"""SGLang's own switch for its tests: every seventh iteration retracts a request, with all that belongs to it."""

CLOSE = "verl_profiler_conf_close"

UNTIL_TOLD = json.dumps({"profile_token_start": 0, "arm": "request"})
"""In force while an engine starts: the hooks are installed, and nothing is captured."""


def options(build: Build, models: Path) -> dict[str, Any]:
    """Arguments of `sglang.Engine`; prefixes are always cached."""
    found: dict[str, Any] = {
        "model_path": tiny_model(models / "tiny"),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        "context_length": 1024,
        "max_total_tokens": build.kv_tokens or 4096,
        "max_running_requests": build.max_running or 8,
        "disable_overlap_schedule": not build.overlap,
        "log_level": "error",
        "sleep_on_idle": True,  # else the scheduler spins while nothing runs, on the cores that tests need
    }
    if build.token_budget is not None:
        # mixed batches with the overlap schedule, none without: both kinds of chunked prefill
        found.update(chunked_prefill_size=build.token_budget, enable_mixed_chunk=build.overlap)
    if build.kv_tokens is not None:
        # SGLang admits what it has room for, so tightness alone only makes it wait: see RETRACTING
        found.update(max_running_requests=4, max_total_tokens=4096)
    if build.by_priority:
        found.update(enable_priority_scheduling=True, schedule_low_priority_values_first=True)
        if Version(version("sglang")) >= Version("0.5.23"):
            found["retraction_policy"] = "priority"
    if build.speculation == "ngram":
        found.update(
            speculative_algorithm="NGRAM",
            speculative_num_draft_tokens=4,
            speculative_ngram_min_bfs_breadth=1,
            speculative_ngram_max_bfs_breadth=1,  # a chain: what the plain torch attention can verify
        )
    return found


def runs(workload: Workload) -> bool:
    """Whether the installed release runs it on a CPU."""
    if workload.build.speculation == "draft":
        return False  # no draft model without the native attention kernels
    newest = Version(version("sglang")) >= Version("0.5.23")
    # 0.5.12 drafts on CUDA only, and retracts whoever has the fewest tokens, which the lead never has
    return newest or (workload.build.speculation is None and workload.name != "preempted_lead")


class Driver:
    """Builds engines on demand.

    Args:
        models: folder for the made-up models.
    """

    def __init__(self, models: Path) -> None:
        os.environ.update(ENVIRONMENT)
        sglang_cpu_kernels.install()
        os.environ["PYTHONPATH"] = sglang_spy.spy_path(models / "spy")
        self._models = models
        self._options: dict[str, Any] | None = None
        self._engine: Any = None

    def engine(self, build: Build) -> Any:
        """The engine for `build`; another one is shut down for it."""
        wanted = options(build, self._models)
        if wanted != self._options:
            self.close()
            windowless = json.dumps({**json.loads(UNTIL_TOLD), "save_path": str(self._models / "profile")})
            extra = {ENV_NAME: windowless, **(RETRACTING if build.kv_tokens is not None else {})}
            os.environ.update(extra)
            try:
                from sglang.srt.entrypoints.engine import Engine

                self._engine = Engine(**wanted)
            finally:
                for name in extra:
                    del os.environ[name]
            self._options = wanted
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
        self._engine = self._options = None

    def begin(
        self, build: Build, folder: Path, settings: Mapping[str, Any], change: str = "", fault: str = "nothing"
    ) -> tuple[Any, Path]:
        """An engine with a window in force, captures of which go to `<folder>/profile`; and the spy's log.

        With a `change` out of `changed_outputs.SGLANG` the hook is shown batches of a release that nobody knows yet. A
        `fault` out of `faults` happens in the scheduler.
        """
        folder.mkdir(parents=True, exist_ok=True)
        spied = folder / "spy.jsonl"
        engine = self.engine(build)
        complete = {"save_path": str(folder / "profile"), "device": "cpu", "on_error": "raise", **settings}
        engine.collective_rpc("spy_begin", path=str(spied), settings=json.dumps(complete), change=change, fault=fault)
        return engine, spied

    def run(self, workload: Workload, folder: Path) -> Run:
        """Run it with its window in force, and have everything on disk when it returns."""
        by_request = workload.settings.get("arm") == "request"
        engine, spied = self.begin(workload.build, folder, workload.settings)
        ends, lengths = [0], []
        for number in range(workload.rounds):
            if by_request:
                engine.start_profile()
            lengths += generate(engine, workload, number)
            ends.append(sglang_spy.wait_until_idle(spied, beyond=ends[-1]))
            if by_request:
                engine.stop_profile()
        engine.collective_rpc(CLOSE)
        log = sglang_spy.read_log(spied)
        rounds = [log[begin:end] for begin, end in itertools.pairwise(ends)]
        return Run(rounds, folder / "profile", lengths)


def generate(engine: Any, workload: Workload, number: int) -> list[int]:
    """One round; lengths of the responses."""
    inputs = prompts(workload)
    outputs = engine.generate(
        input_ids=inputs,
        sampling_params=[
            {"max_new_tokens": length, "temperature": 0, "ignore_eos": True} for length in workload.responses
        ],
        rid=[
            sglang_spy.request_name(
                number,
                index,
                len(inputs),
                workload.arrivals[index] if workload.arrivals else 0,
                workload.priorities[index] if workload.priorities else 0,
            )
            for index in range(len(inputs))
        ],
    )
    if number:
        assert all(output["meta_info"]["cached_tokens"] >= workload.shared_prefix for output in outputs)
    return [len(output["output_ids"]) for output in outputs]
