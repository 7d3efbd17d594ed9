"""A stand-in for a vLLM worker, with just the members that are read, and a class of it that has been hooked."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl_profiler_conf.engines.vllm import hooks


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


def hooked_class() -> type[Worker]:
    """A class of its own, hooked; `plain` and `plain_sample` are what it had before."""
    kind = type("Worker", (Worker,), dict(vars(Worker)))
    kind.plain, kind.plain_sample = kind.execute_model, kind.sample_tokens  # type: ignore[attr-defined]
    hooks._hook_worker("Worker")(SimpleNamespace(__name__="module", Worker=kind))
    return kind


def is_hooked(kind: Any) -> bool:
    """Whether any method of an iteration is not the plain one."""
    return vars(kind)["execute_model"] is not kind.plain or vars(kind)["sample_tokens"] is not kind.plain_sample


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
