"""The oracle's spy inside vLLM: what each iteration really made, and when, in the engine's own words.

It sits beneath the package's hook, at the model runner, and at the scheduler where results are counted; it uses none of
our code. `install()` works in this process; in engine processes it is installed by a `sitecustomize` (see `spy_path`).
Each process appends JSON lines to `$VLLM_SPY`.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from clone import python_path
from oracle import Iteration, number_tokens

ENV = "VLLM_SPY"
_installed = False


def install() -> None:
    """Repeatable."""
    global _installed
    if _installed:
        return
    _installed = True
    import wrapt

    wrapt.register_post_import_hook(_let_overlap, "vllm.platforms.cpu")
    wrapt.register_post_import_hook(_spy_scheduler, "vllm.v1.core.sched.scheduler")
    wrapt.register_post_import_hook(_spy_runner, "vllm.v1.worker.gpu_model_runner")


def _let_overlap(module: Any) -> None:
    """On the CPU vLLM turns async scheduling off, since it gains nothing there. It works all the same, and is what
    accelerators run with: leave it as the engine's own defaults or the test set it."""
    platform = module.CpuPlatform
    plain = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, config: Any) -> None:
        overlap = config.scheduler_config.async_scheduling
        plain(cls, config)
        config.scheduler_config.async_scheduling = overlap

    platform.check_and_update_config = classmethod(check_and_update_config)


def _write(**line: Any) -> None:
    path = os.environ.get(ENV)
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps(line) + "\n")


def _spy_scheduler(module: Any) -> None:
    scheduler = module.Scheduler
    schedule, update = scheduler.schedule, scheduler.update_from_output
    state = {"next": 0, "path": None}

    def spied_schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        if output.total_num_scheduled_tokens:
            if state["path"] != os.environ.get(ENV):
                state.update(next=0, path=os.environ.get(ENV))
            output.spy_number = state["next"]
            output.spy_engine = os.getpid()  # several engines may write to one file, and each counts from 0
            output.spy_requests = list(output.num_scheduled_tokens)
            output.spy_prompts = {new.req_id: len(new.prompt_token_ids or ()) for new in output.scheduled_new_reqs}
            state["next"] += 1
        return output

    def spied_update(self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        handed_out = update(self, output, *args, **kwargs)
        number = getattr(output, "spy_number", None)
        if number is not None:
            made = dict.fromkeys(output.spy_requests, 0)
            for client in handed_out.values():
                for one in client.outputs:
                    if one.request_id in made:
                        made[one.request_id] += len(one.new_token_ids)
            _write(engine=os.getpid(), number=number, made=made, prompts=output.spy_prompts)
        return handed_out

    scheduler.schedule, scheduler.update_from_output = spied_schedule, spied_update


def _spy_runner(module: Any) -> None:
    import torch

    runner = module.GPUModelRunner
    execute, sample = runner.execute_model, runner.sample_tokens
    running: dict[int, tuple[int, int, int]] = {}
    """Runner -> engine, number and begin of its iteration."""

    def mark(which: str, number: int) -> None:
        with torch.profiler.record_function(f"spy {which} {number}"):
            pass

    def finish(self: Any) -> None:
        engine, number, begin = running.pop(id(self))
        mark("end", number)
        _write(engine=engine, number=number, begin=begin, end=time.time_ns(), pid=os.getpid())

    def spied_execute(self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        number = getattr(output, "spy_number", None)
        if number is None:
            return execute(self, output, *args, **kwargs)
        running[id(self)] = (output.spy_engine, number, time.time_ns())
        mark("begin", number)
        result = execute(self, output, *args, **kwargs)
        if result is not None:
            finish(self)
        return result

    def spied_sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = sample(self, *args, **kwargs)
        if id(self) in running:
            finish(self)
        return result

    runner.execute_model, runner.sample_tokens = spied_execute, spied_sample


def read_log(path: Path, pid: int | None = None) -> list[Iteration]:
    """Iterations in order, of the engine of one worker process; without `pid`, of the only worker there is."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    runs = [line for line in lines if "begin" in line and pid in (None, line["pid"])]
    made = {(line["engine"], line["number"]): line["made"] for line in lines if "made" in line}
    engines = {line["engine"] for line in runs} if pid is not None else {engine for engine, _ in made}
    assert len(engines) <= 1, f"several engines wrote to {path}: {engines}"
    made = {(engine, number): row for (engine, number), row in made.items() if engine in engines}
    times = {line["number"]: (line["begin"], line["end"]) for line in runs}
    numbers = sorted(number for _, number in made)
    assert numbers == sorted(times) == list(range(len(made))), "the spy saw every iteration"
    ranges = number_tokens(row for _, row in sorted(made.items()))
    return [Iteration(number, *times[number], made=row) for number, row in enumerate(ranges)]


def read_prompts(path: Path) -> dict[str, int]:
    """Request id -> tokens of its prompt."""
    lines = map(json.loads, path.read_text().splitlines())
    return {request: length for line in lines for request, length in line.get("prompts", {}).items()}


def spy_path(folder: Path) -> str:
    """A PYTHONPATH that installs the spy in every Python process started with it; `folder` is made for it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text("import vllm_spy\nvllm_spy.install()\n")
    return python_path(folder)
