"""What the window costs a real vLLM engine while it waits and when it closes, beside vLLM's own profiler, in one run.

    python benchmarks/vllm_overhead.py [--layers 2] [--batches 1 32 256] [--rounds 3] [--json FILE]

Waiting: time that the hook takes per iteration (its two calls timed where they happen, the cost of being called through
a wrapper measured apart and added), and that vLLM's `annotate_profile` takes with a profiler armed, both as a share of
the iteration, from the start of `execute_model` to the end of `sample_tokens`. Medians over the iterations of a full
decode batch; the window is never reached.

Closing: how long the engine stands still when a capture of 10 iterations ends, without stacks; and how much slower its
iterations are until the trace is on disk (vLLM writes it while the engine stands still).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "engines"))

from tiny import tiny_model

from verl_profiler_conf.settings import ENV_NAME

PYTHON = Path(__file__).resolve().parent.parent / ".venvs" / "vllm" / "bin" / "python"
WINDOW = (20, 30)
FAR = 1900
ARMED_FOREVER = 10**6


class Timer:
    """Durations of the calls of a method, in nanoseconds."""

    def __init__(self, owner: Any, name: str) -> None:
        self.took: list[int] = []
        plain = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter_ns()
            try:
                return plain(*args, **kwargs)
            finally:
                self.took.append(time.perf_counter_ns() - began)

        setattr(owner, name, timed)


def call_cost(calls: int = 200_000) -> float:
    """Nanoseconds that being called through the two wrappers of an iteration costs, without what they do."""
    import wrapt

    class Worker:
        def execute_model(self, _: Any) -> None:
            return None

        sample_tokens = execute_model

    def through(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    def loop(worker: Any) -> float:
        began = time.perf_counter_ns()
        for _ in range(calls):
            worker.execute_model(None)
            worker.sample_tokens(None)
        return (time.perf_counter_ns() - began) / calls

    plain = min(loop(Worker()) for _ in range(3))
    for name in ("execute_model", "sample_tokens"):
        wrapt.wrap_function_wrapper(Worker, name, through)
    return min(loop(Worker()) for _ in range(3)) - plain


class Bench:
    """One engine, its calls timed.

    Args:
        models: folder for the made-up model.
        layers: of the model.
        most: requests that run at once.
    """

    def __init__(self, models: Path, layers: int, most: int) -> None:
        from vllm_driver import ENVIRONMENT

        os.environ.update(ENVIRONMENT)
        self.publish(models, FAR, FAR + 10)
        from verl_profiler_conf.engines.vllm import register

        register()
        from vllm import LLM
        from vllm.v1.worker.gpu_worker import Worker

        from verl_profiler_conf.engines.vllm_worker import WorkerHook

        self.hook = [Timer(WorkerHook, "begin"), Timer(WorkerHook, "end")]
        self.own = Timer(Worker, "annotate_profile")
        self.iteration = [Timer(Worker, "execute_model"), Timer(Worker, "sample_tokens")]
        profiler = {"profiler": "torch", "torch_profiler_dir": str(models / "own"), "torch_profiler_with_stack": False}
        self.llm = LLM(
            model=tiny_model(models / "tiny", num_hidden_layers=layers),
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            max_model_len=2048,
            max_num_seqs=most,
            kv_cache_memory_bytes=(layers * most * 160) << 10,
            profiler_config={**profiler, "ignore_frontend": True},
        )

    def publish(self, folder: Path, start: int, end: int) -> None:
        raw = {"profile_token_start": start, "profile_token_end": end, "save_path": str(folder), "device": "cpu"}
        os.environ[ENV_NAME] = json.dumps(raw)

    def rollout(self, batch: int, tokens: int, name: str) -> None:
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        for timer in (*self.hook, self.own, *self.iteration):
            timer.took.clear()
        for number in range(batch):
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, temperature=0)
            engine.add_request(f"{name}-{number}", {"prompt_token_ids": [5 + number % 400, 6, 7, 8]}, params)
        with contextlib.redirect_stdout(io.StringIO()):  # vLLM prints a table when its profiler stops
            while engine.has_unfinished_requests():
                engine.step()
            for _ in range(3):
                engine.engine_core.get_output()

    def waiting(self, models: Path, batch: int, calls: float) -> dict[str, float]:
        """Medians per iteration, in microseconds."""
        self.publish(models, FAR, FAR + 10)
        self.llm.start_profile(delay_iterations=ARMED_FOREVER)
        self.rollout(batch, 160, f"waiting{batch}")
        self.llm.stop_profile()
        full = slice(20, 150)
        begins, ends = (timer.took[full] for timer in self.hook)
        executes, samples = (timer.took[full] for timer in self.iteration)
        hook = statistics.median(b + e for b, e in zip(begins, ends, strict=True)) + calls
        iteration = statistics.median(e + s for e, s in zip(executes, samples, strict=True))
        own = statistics.median(self.own.took[full])
        return {"iteration_us": iteration / 1e3, "hook_us": hook / 1e3, "vllm_us": own / 1e3}

    def closing(self, folder: Path, batch: int, *, ours: bool, round_number: int) -> dict[str, float]:
        """Milliseconds; `slowdown`: iterations after the close, while the trace is written, to those before opening."""
        from verl_profiler_conf.writer import default_writer

        start, end = WINDOW
        name = f"{'ours' if ours else 'own'}{round_number}"
        self.publish(folder / name, *((start, end) if ours else (FAR, FAR + 10)))
        if not ours:
            self.llm.start_profile(delay_iterations=start + 1, max_iterations=end - start)
        self.rollout(batch, 150, name)
        steps = [e + s for e, s in zip(*(t.took for t in self.iteration), strict=False)]
        usual = statistics.median(steps[5 : start - 1])
        if ours:
            stall = max(self.hook[1].took[start:end])
            default_writer().flush()
            written = max(path.stat().st_mtime for path in (folder / name).glob("*.gz"))
            assert written
        else:
            self.llm.stop_profile()
            stall = max(self.own.took[start : end + 2])
        after = steps[end + 2 : end + 32]
        return {"stall_ms": stall / 1e6, "slowdown": statistics.median(after) / usual, "iteration_ms": usual / 1e6}


def main() -> None:
    if importlib.util.find_spec("vllm") is None:
        os.execv(PYTHON, [str(PYTHON), *sys.argv])  # noqa: S606 - the environment that has the engine
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        calls = call_cost()
        bench = Bench(folder, given.layers, max(given.batches))
        bench.rollout(max(given.batches), 30, "warm")
        waiting = {batch: bench.waiting(folder, batch, calls) for batch in given.batches}
        closing: dict[str, list[dict[str, float]]] = {"vllm": [], "this package": []}
        for number in range(given.rounds):
            closing["vllm"].append(bench.closing(folder, 8, ours=False, round_number=number))
            closing["this package"].append(bench.closing(folder, 8, ours=True, round_number=number))
    print(f"\nwaiting for the window, per iteration ({given.layers} layers)")
    print("| batch | iteration | this package | share | vLLM's armed profiler | share |")
    print("| --- | --- | --- | --- | --- | --- |")
    for batch, cost in waiting.items():
        share, own = (100 * cost[key] / cost["iteration_us"] for key in ("hook_us", "vllm_us"))
        print(
            f"| {batch} | {cost['iteration_us'] / 1e3:.2f} ms | {cost['hook_us']:.1f} us | {share:.3f} % "
            f"| {cost['vllm_us']:.1f} us | {own:.3f} % |"
        )
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
