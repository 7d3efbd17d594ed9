"""The oracle's spy inside SGLang's scheduler: what each iteration really made, and when, in the engine's own words.

It sits beneath the package's hook, at the scheduler's run of a batch, and where results are processed; it uses none of
our code to find out. It also lets requests in before the iteration that they are meant to arrive at, whenever they
really came, so that a workload is the same in every run. `install()` is called by a `sitecustomize` (see `spy_path`)
in every process of the engine; a driver reaches it through `Engine.collective_rpc`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clone import python_path
from oracle import Iteration, number_tokens
from waiting import wait_until

NAME = re.compile(r"round(\d+)-(\d+)of(\d+)@(\d+)p(-?\d+)")


def request_name(number: int, index: int, of: int, arrival: int, priority: int) -> str:
    """A request's id, which tells the spy all about it."""
    return f"round{number}-{index}of{of}@{arrival}p{priority}"


def install() -> None:
    import wrapt

    wrapt.register_post_import_hook(_spy_scheduler, "sglang.srt.managers.scheduler")


class Spy:
    """The state of the spy in one scheduler."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.next = 0
        self.step = 0
        """Iterations run in this round."""
        self.busy = False
        self.held: list[tuple[int, int, Any]] = []
        self.round = ""
        self.missing = 0
        self.happen: Callable[[], None] = lambda: None
        """Called within each iteration: see `faults`."""

    def write(self, **line: Any) -> None:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def hold(self, request: Any) -> bool:
        """Whether a request has to wait; True takes it."""
        found = NAME.fullmatch(request.rid or "")
        if found is None:
            return False
        number, index, of, arrival, priority = map(int, found.groups())
        if self.round != str(number):
            self.round, self.missing, self.step = str(number), of, 0
        self.missing -= 1
        request.priority = priority
        self.held.append((arrival, index, request))
        self.held.sort(key=lambda one: one[:2])
        return True

    def due(self) -> list[Any]:
        """Those that arrive before the next iteration; none before all have really come."""
        if self.missing:
            return []
        found = [request for arrival, _, request in self.held if arrival <= self.step]
        self.held = self.held[len(found) :]
        return found


def visible(req: Any) -> int:
    return len(req.output_ids) if req.finished_len is None else req.finished_len


def _spy_scheduler(module: Any) -> None:
    import torch

    scheduler = module.Scheduler
    spy = Spy()
    run, process = scheduler.run_batch, scheduler.process_batch_result
    plain_begin: dict[str, Any] = {}
    handle, plan, idle = scheduler.handle_generate_request, scheduler.get_next_batch_to_run, scheduler.on_idle

    def mark(which: str, number: int) -> None:
        with torch.profiler.record_function(f"spy {which} {number}"):
            pass

    def spied_run(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        number, spy.next, spy.step, spy.busy = spy.next, spy.next + 1, spy.step + 1, True
        begin = time.time_ns()
        mark("begin", number)
        spy.happen()
        result = run(self, batch, *args, **kwargs)
        mark("end", number)
        result.spy_number = number
        spy.write(number=number, begin=begin, end=time.time_ns())
        return result

    def spied_process(self: Any, batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
        before = {req.rid: visible(req) for req in batch.reqs}
        done = process(self, batch, result, *args, **kwargs)
        made = {req.rid: visible(req) - before[req.rid] for req in batch.reqs}
        spy.write(number=result.spy_number, made=made)
        return done

    def spied_handle(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        return None if spy.hold(request) else handle(self, request, *args, **kwargs)

    def spied_plan(self: Any, *args: Any, **kwargs: Any) -> Any:
        for request in spy.due():
            handle(self, request)
        return plan(self, *args, **kwargs)

    def spied_idle(self: Any) -> Any:
        done = idle(self)
        if spy.busy and self.is_fully_idle():
            spy.busy = False
            spy.write(idle=spy.next, profiling=torch._C._autograd._profiler_enabled())
        return done

    def spy_begin(self: Any, path: str, settings: str, change: str = "", fault: str = "nothing") -> None:
        """A workload begins: from here on to `path`, with the window of `settings` in force. The hook is shown batches
        with a `change` out of `changed_outputs.SGLANG`, and a fault out of `faults` happens."""
        from changed_outputs import SGLANG
        from faults import PREPARED, at_the_token, keep_process_groups

        from verl_profiler_conf.core.settings import ENV_NAME
        from verl_profiler_conf.engines.sglang import hooks as plugin
        from verl_profiler_conf.engines.sglang.worker import SchedulerHook

        begin = plain_begin.setdefault("begin", SchedulerHook.begin)
        changed = SGLANG.get(change, lambda batch: batch)
        SchedulerHook.begin = lambda hook, batch: begin(hook, changed(batch))
        spy.path, spy.next, spy.round = Path(path), 0, ""
        os.environ[ENV_NAME] = settings
        plugin.attach(self)
        logging.getLogger("verl_profiler_conf").setLevel(logging.INFO)  # the engine logs errors only
        if fault.startswith("fork"):
            keep_process_groups()
        spy.happen = at_the_token(fault)
        if json.loads(settings).get("enable", True):  # else nobody would run into it, and it would stay
            PREPARED.get(fault, lambda: None)()

    scheduler.run_batch, scheduler.process_batch_result = spied_run, spied_process
    scheduler.handle_generate_request, scheduler.get_next_batch_to_run = spied_handle, spied_plan
    scheduler.on_idle, scheduler.spy_begin = spied_idle, spy_begin


def read_log(path: Path) -> list[Iteration]:
    """Iterations in order."""
    made: dict[int, dict[str, int]] = {}
    times: dict[int, tuple[int, int]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        if "made" in line:
            made[line["number"]] = line["made"]
        elif "begin" in line:
            times[line["number"]] = (line["begin"], line["end"])
    assert sorted(made) == sorted(times) == list(range(len(made))), "the spy saw every iteration"
    ranges = number_tokens(made[number] for number in sorted(made))
    return [Iteration(number, *times[number], made=row) for number, row in enumerate(ranges)]


def wait_until_idle(path: Path, beyond: int = 0, seconds: float = 120.0) -> int:
    """Until the scheduler has run more than `beyond` iterations and has nothing left to do; how many it ran."""

    def ran() -> int:
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        most = max((line["idle"] for line in lines if "idle" in line), default=0)
        return most if most > beyond else 0

    return wait_until(ran, "the scheduler is idle", seconds)


def spy_path(folder: Path) -> str:
    """A PYTHONPATH that installs the spy in every Python process started with it; `folder` is made for it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(
        "import sglang_spy, sglang_cpu_kernels\nsglang_spy.install()\nsglang_cpu_kernels.install()\n"
    )
    return python_path(folder)
