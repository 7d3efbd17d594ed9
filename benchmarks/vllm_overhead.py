"""What the window costs a real vLLM engine while it waits and when it closes, beside vLLM's own profiler, in one run.

    python benchmarks/vllm_overhead.py [--layers 2] [--batches 1 32 256] [--rounds 3] [--json FILE]

Waiting: what `execute_model` and `sample_tokens` take as they are called less what vLLM's own take within, and what
vLLM's `annotate_profile` takes with a profiler armed, both as a share of the iteration, from the start of
`execute_model` to the end of `sample_tokens`. Timed inside the engine, where other work has emptied the CPU's caches
since the iteration before (in a loop of its own the same takes a tenth); what the timing itself takes there is measured
too and left out. Medians over the iterations of a full decode batch; the window is never reached. Each round runs every
way once, and a rank that is not asked for, whose hooks are taken out again: what is printed is the difference to that.

Closing: how long the engine stands still when a capture of 10 iterations ends, without stacks; and how much slower its
iterations are until the trace is on disk (vLLM writes it while the engine stands still).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from calls import ClassTimer, Nested, per_iteration, typical_us, with_spread
from tiny_vllm import engine_arguments, run_where_vllm_is, sampling, use_environment

from verl_profiler_conf.core.settings import ENV_NAME

WINDOW = (20, 30)
FAR = 1900
ARMED_FOREVER = 10**6
TOKENS = 120
"""Of each response while waiting..."""
FULL = slice(20, TOKENS - 10)
"""...and its iterations with all requests in the batch."""
WAYS = {"lead": {}, "any": {"track": "any"}}


class Bench:
    """One engine, its calls timed.

    Args:
        models: folder for the made-up model.
        layers: of the model.
        most: requests that run at once.
    """

    def __init__(self, models: Path, layers: int, most: int) -> None:
        use_environment()
        self.publish(models, FAR, FAR + 10)
        from vllm import LLM
        from vllm.v1.worker.gpu_worker import Worker

        from verl_profiler_conf.engines.vllm.plugin import register
        from verl_profiler_conf.engines.vllm.worker import WorkerHook

        self.iteration = [Nested(Worker, name) for name in ("execute_model", "sample_tokens")]
        self.plain = {name: vars(Worker)[name] for name in ("execute_model", "sample_tokens")}
        register()
        self.worker_class = Worker
        self.ends = ClassTimer(WorkerHook, "end")
        self.own = [ClassTimer(Worker, "annotate_profile") for _ in range(3)]
        profiler = {"profiler": "torch", "torch_profiler_dir": str(models / "own"), "torch_profiler_with_stack": False}
        self.llm = LLM(
            **engine_arguments(
                models,
                layers=layers,
                max_tokens=2048,
                max_num_seqs=most,
                kv_cache_memory_bytes=(layers * most * 160) << 10,
                profiler_config={**profiler, "ignore_frontend": True},
            )
        )
        worker = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        for method in self.iteration:
            method.around_calls_of(worker)

    def publish(self, folder: Path, start: int, end: int, **more: Any) -> None:
        raw = {"profile_token_start": start, "profile_token_end": end, "save_path": str(folder), "device": "cpu"}
        os.environ[ENV_NAME] = json.dumps({**raw, **more})

    def rollout(self, batch: int, tokens: int, name: str) -> None:
        engine = self.llm.llm_engine
        for timer in (*self.iteration, *self.own, self.ends):
            timer.clear() if isinstance(timer, Nested) else timer.took.clear()
        for number in range(batch):
            prompt = {"prompt_token_ids": [5 + number % 400, 6, 7, 8]}
            engine.add_request(f"{name}-{number}", prompt, sampling(tokens))
        with contextlib.redirect_stdout(io.StringIO()):  # vLLM prints a table when its profiler stops
            while engine.has_unfinished_requests():
                engine.step()
            for _ in range(3):
                engine.engine_core.get_output()

    def steps(self) -> list[int]:
        """Nanoseconds of each iteration; the empty one at the end of a generation samples nothing, and is left out."""
        return [sum(took) for took in zip(*(method.timers[1].took for method in self.iteration), strict=False)]

    def waiting(self, models: Path, batch: int, rounds: int) -> dict[str, list[float]]:
        """Microseconds of an iteration, for each way: medians of each round, less what a rank that is not asked for
        takes in the same round. Its hooks are taken out, so that this is the timing alone."""
        found: dict[str, list[float]] = {name: [] for name in ("iteration", "vllm", *WAYS)}
        self.llm.start_profile(delay_iterations=ARMED_FOREVER)
        for number in range(rounds):
            took = {}
            for way, settings in {"not asked": {"ranks": [7]}, **WAYS}.items():
                self.publish(models, FAR, FAR + 10, **settings)
                self.rollout(batch, TOKENS, f"waiting{batch}-{number}-{way}")
                took[way] = typical_us(per_iteration(self.iteration)[FULL])
                out = all(vars(self.worker_class)[name] is plain for name, plain in self.plain.items())
                assert out == (way == "not asked"), "the hooks of a rank that is not asked for are taken out"
            for way in WAYS:
                found[way].append(took[way] - took["not asked"])
            timing = [outer - inner for inner, outer in zip(self.own[1].took, self.own[2].took, strict=True)]
            own = [inner - lost for inner, lost in zip(self.own[1].took, timing, strict=True)]
            found["vllm"].append(typical_us(own[FULL]))
            found["iteration"].append(typical_us(self.steps()[FULL]))
        self.llm.stop_profile()
        return found

    def closing(self, folder: Path, batch: int, *, ours: bool, round_number: int) -> dict[str, float]:
        """Milliseconds; `slowdown`: iterations after the close, while the trace is written, to those before opening."""
        from verl_profiler_conf.capture.writer import default_writer

        start, end = WINDOW
        name = f"{'ours' if ours else 'own'}{round_number}"
        self.publish(folder / name, *((start, end) if ours else (FAR, FAR + 10)))
        if not ours:
            self.llm.start_profile(delay_iterations=start + 1, max_iterations=end - start)
        self.rollout(batch, 150, name)
        steps = self.steps()
        usual = statistics.median(steps[5 : start - 1])
        if ours:
            stall = max(self.ends.took)
            default_writer().flush()
            written = max(path.stat().st_mtime for path in (folder / name).glob("*.gz"))
            assert written
        else:
            self.llm.stop_profile()
            stall = max(self.own[0].took[start : end + 2])
        after = steps[end + 2 : end + 32]
        return {"stall_ms": stall / 1e6, "slowdown": statistics.median(after) / usual, "iteration_ms": usual / 1e6}


def main() -> None:
    run_where_vllm_is()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        bench = Bench(folder, given.layers, max(given.batches))
        bench.rollout(max(given.batches), 30, "warm")
        waiting = {batch: bench.waiting(folder, batch, given.rounds) for batch in given.batches}
        closing: dict[str, list[dict[str, float]]] = {"vllm": [], "this package": []}
        for number in range(given.rounds):
            closing["vllm"].append(bench.closing(folder, 8, ours=False, round_number=number))
            closing["this package"].append(bench.closing(folder, 8, ours=True, round_number=number))
    print(f"\nwaiting for the window, microseconds an iteration ({given.layers} layers; smallest to largest round)")
    print("| batch | iteration | `track: lead` | `any` | vLLM's armed profiler |")
    print("| --- | --- | --- | --- | --- |")
    for batch, found in waiting.items():
        cells = [with_spread(found[way]) for way in (*WAYS, "vllm")]
        print(f"| {batch} | {statistics.median(found['iteration']):.0f} | {' | '.join(cells)} |")
    print("\nclosing a capture of 10 iterations, batch 8, medians")
    print("| | the engine stands still | iterations after it, as a multiple of those before |")
    print("| --- | --- | --- |")
    for way, rounds in closing.items():
        stall, slowdown = (statistics.median(r[key] for r in rounds) for key in ("stall_ms", "slowdown"))
        print(f"| {way} | {stall:.1f} ms | {slowdown:.2f} |")
    if given.json is not None:
        given.json.write_text(json.dumps({"waiting": waiting, "closing": closing}, indent=2))


if __name__ == "__main__":
    main()
