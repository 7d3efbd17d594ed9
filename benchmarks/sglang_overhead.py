"""What the window costs a real SGLang scheduler while it waits, beside SGLang's own profiler, in one run.

    python benchmarks/sglang_overhead.py [--batches 1 32 256] [--rounds 3] [--tokens 120] [--json FILE]

What `run_batch` and `launch_batch_sample_if_needed` take as they are called less what SGLang's own take within, and
what its `_profile_batch_predicate` takes with its profiler armed. Timed inside the scheduler's process, where other
work has emptied the CPU's caches since the iteration before; what the timing itself takes is measured too and left out.
Medians over the iterations of a full decode batch under the overlap schedule; the window is never reached. Each round
runs every way once, and a rank that is not asked for, whose hooks are taken out again: what is printed is the
difference to that.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from calls import ClassTimer, Nested, per_iteration, typical_us, with_spread

from verl_profiler_conf.core.settings import ENV_NAME

HERE = Path(__file__).resolve().parent
PYTHON = HERE.parent / ".venvs" / "sglang" / "bin" / "python"
METHODS = ("run_batch", "launch_batch_sample_if_needed")
PROFILER = "sglang.srt.managers.scheduler_components.profiler_manager"
FAR = 900
BEGIN, END = 20, 20
"""Iterations at the begin and the end of a generation that are left out: its batch is not full in all of them."""
WAYS = {"lead": {}, "any": {"track": "any"}}


# -- inside the scheduler's process ------------------------------------------------------------------------------------


def install() -> None:
    """Time the scheduler, as soon as it is imported; `sitecustomize` calls this in every process of the engine."""
    import wrapt

    wrapt.register_post_import_hook(_time_scheduler, "sglang.srt.managers.scheduler")
    wrapt.register_post_import_hook(_time_profiler, PROFILER)


_own: list[ClassTimer] = []


def _time_profiler(module: Any) -> None:
    _own.extend(ClassTimer(module.SchedulerProfilerManager, "_profile_batch_predicate") for _ in range(3))


def _time_scheduler(module: Any) -> None:
    scheduler = module.Scheduler
    plain = {name: vars(scheduler)[name] for name in METHODS}
    methods = [Nested(scheduler, name) for name in METHODS]
    timed = {name: vars(scheduler)[name] for name in METHODS}
    assert plain != timed

    def bench_begin(self: Any, settings: str) -> None:
        """Another way begins: its settings are in force from here on."""
        from verl_profiler_conf.engines.sglang import hooks

        os.environ[ENV_NAME] = settings
        hooks.attach(self)
        if methods[0].around is None:
            for method in methods:
                method.around_calls_of(self)
        for method in methods:
            method.clear()
        for timer in _own:
            timer.took.clear()

    def bench_end(self: Any, path: str, tokens: int) -> None:
        """Write what it took."""
        full = slice(BEGIN, tokens - END)
        hook = per_iteration(methods)[full]
        timing = [outer - inner for inner, outer in zip(_own[1].took, _own[2].took, strict=True)]
        own = [inner - lost for inner, lost in zip(_own[1].took, timing, strict=True)][full]
        steps = [sum(took) for took in zip(*(method.timers[1].took for method in methods), strict=False)][full]
        figures = {
            "hook": typical_us(hook),
            "sglang": typical_us(own),
            "iteration": typical_us(steps),
            "iterations": len(methods[0].timers[1].took),
            "out": all(vars(type(self))[name] is function for name, function in timed.items()),
        }
        Path(path).write_text(json.dumps(figures))

    scheduler.bench_begin, scheduler.bench_end = bench_begin, bench_end


# -- the client --------------------------------------------------------------------------------------------------------


class Bench:
    """One engine, its scheduler timed."""

    def __init__(self, models: Path, most: int, tokens: int) -> None:
        import sglang_cpu_kernels  # on the environment's path
        from clone import python_path
        from sglang_driver import ENVIRONMENT, UNTIL_TOLD, options
        from workloads import Build

        os.environ.update(ENVIRONMENT)
        sglang_cpu_kernels.install()
        site = models / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(
            "import sglang_overhead, sglang_cpu_kernels\nsglang_overhead.install()\nsglang_cpu_kernels.install()\n"
        )
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), python_path(site)])
        os.environ[ENV_NAME] = UNTIL_TOLD
        from sglang.srt.entrypoints.engine import Engine

        room = most * (tokens + 64)
        wanted = {**options(Build(), models), "max_running_requests": most, "max_total_tokens": room}
        self.engine = Engine(**wanted)
        self.tokens = tokens
        self._folder = models

    def rollout(self, batch: int, tokens: int) -> None:
        self.engine.generate(
            input_ids=[[5 + number % 400, 6 + number // 400, 7, 8] for number in range(batch)],
            sampling_params={"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        )

    def run(self, batch: int, **settings: Any) -> dict[str, float]:
        raw = {"profile_token_start": FAR, "profile_token_end": FAR + 10, "device": "cpu"}
        told = json.dumps({**raw, "save_path": str(self._folder / "profile"), **settings})
        self.engine.collective_rpc("bench_begin", settings=told)
        self.rollout(batch, self.tokens)
        path = self._folder / "figures.json"
        self.engine.collective_rpc("bench_end", path=str(path), tokens=self.tokens)
        figures: dict[str, float] = json.loads(path.read_text())
        return figures

    def waiting(self, batch: int, rounds: int) -> dict[str, list[float]]:
        """Microseconds of an iteration, for each way: medians of each round, less what a rank that is not asked for
        takes in the same round. Its hooks are taken out, so that this is the timing alone."""
        found: dict[str, list[float]] = {name: [] for name in ("iteration", "sglang", *WAYS)}
        for _ in range(rounds):
            out = self.run(batch, ranks=[7])
            assert out["out"], "the hooks of a rank that is not asked for are taken out"
            for way, settings in WAYS.items():
                figures = self.run(batch, **settings)
                assert not figures["out"]
                found[way].append(figures["hook"] - out["hook"])
            found["sglang"].append(figures["sglang"])
            found["iteration"].append(figures["iteration"])
        return found


def main() -> None:
    if importlib.util.find_spec("sglang") is None:
        os.execv(PYTHON, [str(PYTHON), *sys.argv])  # noqa: S606 - the environment that has the engine
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=120, help="of a response; large batches take long here")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch), max(given.batches), given.tokens)
        bench.rollout(max(given.batches), 30)
        bench.engine.start_profile(output_dir=scratch, start_step=10**9, num_steps=1, activities=["CPU"])
        print("\nwaiting for the window, microseconds an iteration (smallest to largest round)")
        print("| batch | iteration | `track: lead` | `any` | SGLang's armed profiler |")
        print("| --- | --- | --- | --- | --- |")
        waiting = {}
        try:
            for batch in given.batches:
                found = waiting[batch] = bench.waiting(batch, given.rounds)
                cells = [with_spread(found[way]) for way in (*WAYS, "sglang")]
                print(f"| {batch} | {statistics.median(found['iteration']):.0f} | {' | '.join(cells)} |", flush=True)
        finally:
            bench.engine.shutdown()
    if given.json is not None:
        given.json.write_text(json.dumps(waiting, indent=2))


if __name__ == "__main__":
    main()
