"""What closing a capture costs the rollout: how long it stands still, and how slow it is while the trace is written.

    python benchmarks/close_stall.py [--iterations 10] [--layers 24] [--rounds 3] [--stack] [--json FILE]

Decodes with a small Llama, records some iterations and closes the capture in several ways, all in one run on the same
model, alternating, so that a busy machine disturbs all alike. Figures are medians over the rounds:

- stall: from the moment the last captured iteration ends until the next iteration can begin, on the rollout's thread.
  A thread that takes Python's lock as soon as it is started and keeps it makes the stall longer, too.
- export: until the trace is whole on disk.
- slow-down: duration of the iterations that ran meanwhile, as a multiple of those before any profiling.

The first way is what vLLM's worker does when its profiler stops (stop, export to .json.gz, table of averages, all in
the step); the last is this package's.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from verl_profiler_conf.capture.backends.torch_profiler import TorchProfiler
from verl_profiler_conf.capture.writer import Writer


@dataclass
class Cost:
    """Of one close, in seconds; `slowdown` is None when no iteration ran before the trace was written."""

    stall: float
    export: float
    slowdown: float | None


class Rollout:
    """Greedy decoding, an iteration at a time; a new batch of prompts every 100 iterations."""

    def __init__(self, layers: int) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=512,
            max_position_embeddings=256,
        )
        self._model = LlamaForCausalLM(config).eval()
        self._steps = self._decode()

    def run(self, iterations: int = 1) -> list[float]:
        """Durations in seconds."""
        durations = []
        for _ in range(iterations):
            begin = time.perf_counter()
            next(self._steps)
            durations.append(time.perf_counter() - begin)
        return durations

    def _decode(self) -> Iterator[None]:
        prompts = torch.randint(0, 512, (4, 16))
        while True:
            with torch.no_grad():
                out = self._model(prompts, use_cache=True)
            for _ in range(100):
                yield
                tokens = out.logits[:, -1:].argmax(-1)
                with torch.no_grad():
                    out = self._model(tokens, past_key_values=out.past_key_values, use_cache=True)


def _profile(stack: bool, handler: Callable[[Any], None] | None = None) -> Any:
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], with_stack=stack, on_trace_ready=handler
    )


def as_vllm_does(rollout: Rollout, iterations: int, stack: bool, folder: Path) -> Cost:
    """Everything within the step."""
    profile = _profile(stack, lambda p: p.export_chrome_trace(str(folder / "trace.pt.trace.json.gz")))
    profile.start()
    rollout.run(iterations)
    begin = time.perf_counter()
    profile.stop()
    with contextlib.redirect_stdout(io.StringIO()):
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=50))
    stall = time.perf_counter() - begin
    return Cost(stall, stall, None)


def in_a_thread(rollout: Rollout, iterations: int, stack: bool, folder: Path) -> Cost:
    """torch's export on another thread: it keeps Python's lock."""

    def export(profile: Any) -> None:
        profile.profiler.kineto_results.save(str(folder / "raw.json"))
        with (folder / "raw.json").open("rb") as raw, gzip.open(folder / "trace.gz", "wb", 1) as packed:
            shutil.copyfileobj(raw, packed, 1 << 20)

    return _close_beside(rollout, iterations, stack, export)


def in_a_fork(rollout: Rollout, iterations: int, stack: bool, folder: Path) -> Cost:
    """torch's export in a forked child."""

    def export(profile: Any) -> None:
        child = os.fork()
        if child == 0:
            try:
                profile.profiler.kineto_results.save(str(folder / "raw.json"))
                with (folder / "raw.json").open("rb") as raw, gzip.open(folder / "trace.gz", "wb", 1) as packed:
                    shutil.copyfileobj(raw, packed, 1 << 20)
            finally:
                os._exit(0)
        os.waitpid(child, 0)

    return _close_beside(rollout, iterations, stack, export)


def _close_beside(rollout: Rollout, iterations: int, stack: bool, export: Callable[[Any], None]) -> Cost:
    profile = _profile(stack)
    profile.start()
    rollout.run(iterations)
    done = threading.Event()

    def work() -> None:
        export(profile)
        done.set()

    begin = time.perf_counter()
    profile.stop()
    threading.Thread(target=work).start()
    return _meanwhile(rollout, begin, done)


def this_package(rollout: Rollout, iterations: int, stack: bool, folder: Path) -> Cost:
    """Stop, and hand the recording to the writer."""
    profiler = TorchProfiler("cpu", ["cpu", "stack"] if stack else [])
    writer, done = Writer(), threading.Event()
    profiler.start()
    for index in range(iterations):
        with profiler.annotate(f"response_tokens[{index}:{index + 1}) iter={index} reqs=4"):
            rollout.run()

    def report(_: object, error: BaseException | None) -> None:
        assert error is None, error
        done.set()

    begin = time.perf_counter()
    writer.submit(profiler.stop(), folder / "trace", {}, report)
    cost = _meanwhile(rollout, begin, done)
    writer.flush()
    return cost


def _meanwhile(rollout: Rollout, begin: float, done: threading.Event) -> Cost:
    stall = time.perf_counter() - begin
    durations: list[float] = []
    while not done.is_set():
        durations += rollout.run()
    export = time.perf_counter() - begin
    return Cost(stall, export, statistics.mean(durations) if durations else None)


WAYS: dict[str, Callable[[Rollout, int, bool, Path], Cost]] = {
    "as vLLM does, in the step": as_vllm_does,
    "torch's export in a thread": in_a_thread,
    "torch's export in a fork": in_a_fork,
    "this package": this_package,
}


def measure(layers: int, iterations: int, rounds: int, stack: bool) -> dict[str, dict[str, float | None]]:
    """Way -> medians: stall, stall relative to the first way's, export, slow-down."""
    rollout = Rollout(layers)
    rollout.run(20)
    costs: dict[str, list[Cost]] = {name: [] for name in WAYS}
    plain: list[float] = []
    for round_ in range(rounds + 1):
        for name, way in WAYS.items():
            before = rollout.run(20)
            with tempfile.TemporaryDirectory() as folder:
                cost = way(rollout, iterations, stack, Path(folder))
            if round_:  # the first round warms up
                plain += before
                usual = statistics.median(before)
                costs[name].append(Cost(cost.stall, cost.export, cost.slowdown and cost.slowdown / usual))
    reference = statistics.median(cost.stall for cost in costs["as vLLM does, in the step"])
    table: dict[str, dict[str, float | None]] = {}
    for name, found in costs.items():
        stall = statistics.median(cost.stall for cost in found)
        slow = [cost.slowdown for cost in found if cost.slowdown is not None]
        table[name] = {
            "stall_ms": 1e3 * stall,
            "stall_in_iterations": stall / statistics.median(plain),
            "stall_relative": stall / reference,
            "export_ms": 1e3 * statistics.median(cost.export for cost in found),
            "slowdown": statistics.median(slow) if slow else None,
        }
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of torch, for the model; leave cores for the writer")
    parser.add_argument("--stack", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = measure(options.layers, options.iterations, options.rounds, options.stack)
    print(
        f"{options.iterations} iterations of {options.layers} layers, stacks {'on' if options.stack else 'off'}, "
        f"torch {torch.__version__}, {options.threads} of {os.cpu_count()} cores for the model\n"
    )
    heads = ("stall", "in iterations", "of vLLM", "export", "iterations meanwhile")
    print(f"{'closing a capture':<28} {heads[0]:>9} {heads[1]:>14} {heads[2]:>8} {heads[3]:>9} {heads[4]:>21}")
    for name, row in table.items():
        slow = row["slowdown"]
        meanwhile = "none ran" if slow is None else f"{slow:.2f} x as long"
        print(
            f"{name:<28} {row['stall_ms']:>6.0f} ms {row['stall_in_iterations']:>14.1f} {row['stall_relative']:>8.3f} "
            f"{row['export_ms']:>6.0f} ms {meanwhile:>21}"
        )
    if options.json:
        options.json.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
