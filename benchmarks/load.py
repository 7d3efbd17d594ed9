"""What captures cost an engine under load: how much of that is the device profiler, and how much this package.

    python benchmarks/load.py [--clients 64] [--seconds 1.5] [--rounds 12] [--json FILE]

AsyncLLM, its engine and its worker in processes of their own, serves clients that ask again as soon as they are
answered. Meanwhile start_profile and stop_profile are called ten times a second, and each call asks for a capture of
three tokens. The phases of a round differ in what becomes of the calls. Each round begins with another phase:

- off: no calls.
- calls: the calls reach the worker, and nothing is recorded.
- profiler: each window is recorded with torch's profiler, and the recording is thrown away: no file, no export.
- exported: torch's own `export_chrome_trace` writes each recording when it ends, as engines' own profilers do. No
  compression, no manifest.
- package: each window becomes a compressed trace and a manifest. The phase ends when all of them are on disk.

Printed are tokens a second, the 99th percentile of a request's duration, and the processor time that the engine's
processes take for a token, as multiples of those of `off` in the same round: medians over the rounds, and their
middle half. Machines are shared, and processor time is not what others take. Then where the package's own processor
time goes in the worker's process, for a capture.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_vllm import SUPPORT, engine_arguments, run_where_vllm_is, sampling, use_environment

PHASES = ("off", "calls", "profiler", "exported", "package")
RECORDING = PHASES[2:]
TOKENS = 32
FEWEST = 100
"""Requests of a phase: a percentile is of so many at least."""
FIGURES = ("throughput", "p99", "cpu_us")

# -- in the worker's process -------------------------------------------------------------------------------------------

STAGES = {
    "opening and closing": ("capture.capturer", "Capturer", ("before_iteration", "after_iteration")),
    "export": ("capture.backends.torch_recording", "TorchRecording", ("_save",)),
    "the writer's thread, export included": ("capture.writer", "Writer", ("_work",)),
}
"""What is timed: the module, the class and its methods. The first runs on the engine's thread."""

_spent = dict.fromkeys(STAGES, 0.0)
_mode = "off"


def install() -> None:
    """Hook the worker and the package; `sitecustomize` calls this in every process of the engine."""
    import wrapt

    wrapt.register_post_import_hook(_add_calls, "vllm.v1.worker.gpu_worker")
    wrapt.register_post_import_hook(_divert_outputs, "verl_profiler_conf.capture.outputs")
    wrapt.register_post_import_hook(_divert_placeholders, "verl_profiler_conf.capture.placeholders")
    wrapt.register_post_import_hook(_divert_calls, "verl_profiler_conf.engines.vllm.worker")
    for stage, (module, owner, methods) in STAGES.items():
        wrapt.register_post_import_hook(_timing(stage, owner, methods), f"verl_profiler_conf.{module}")


def _add_calls(module: Any) -> None:
    def bench_phase(_: Any, phase: str) -> dict[str, float]:
        """Another phase begins. Returns what the stages have taken so far, in seconds of processor time."""
        global _mode
        _mode = phase
        return dict(_spent)

    def bench_pending(_: Any) -> int:
        """Recordings that are not on disk yet."""
        from verl_profiler_conf.capture.writer import default_writer

        return default_writer().pending

    module.Worker.bench_phase, module.Worker.bench_pending = bench_phase, bench_pending


def _divert_outputs(module: Any) -> None:
    outputs = module.CaptureOutputs
    write = outputs.write

    def write_or_not(self: Any, capture: Any, recording: Any, *args: Any, **more: Any) -> None:
        if _mode == "package":
            write(self, capture, recording, *args, **more)
            return
        if _mode == "exported":
            path = self._form.folder.parent / "exported.json"
            recording._profiler.export_chrome_trace(str(path))
        recording.drop()

    outputs.write = write_or_not


def _divert_placeholders(module: Any) -> None:
    def only_with_package(report: Callable[..., None]) -> Callable[..., None]:
        def report_or_not(*args: Any, **more: Any) -> None:
            if _mode == "package":
                report(*args, **more)

        return report_or_not

    for name in ("report_waiting", "report_opening", "report_unreached", "report_discarded"):
        setattr(module.Placeholders, name, only_with_package(getattr(module.Placeholders, name)))


def _divert_calls(module: Any) -> None:
    profile = module.WorkerHook.profile

    def profile_or_not(self: Any, *args: Any) -> bool:
        return True if _mode == "calls" else profile(self, *args)

    module.WorkerHook.profile = profile_or_not


def _timing(stage: str, owner: str, methods: tuple[str, ...]) -> Callable[[Any], None]:
    def timed(plain: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **more: Any) -> Any:
            began = time.thread_time()
            try:
                return plain(*args, **more)
            finally:
                _spent[stage] += time.thread_time() - began

        return method

    def hook(module: Any) -> None:
        for name in methods:
            setattr(getattr(module, owner), name, timed(vars(getattr(module, owner))[name]))

    return hook


# -- the clients -------------------------------------------------------------------------------------------------------


class Load:
    """Clients that ask again as soon as they are answered."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.durations: list[float] = []
        self.failed = 0
        self.going_on = True

    async def client(self, number: int) -> None:
        from vllm.sampling_params import RequestOutputKind

        params = sampling(TOKENS, output_kind=RequestOutputKind.FINAL_ONLY)
        asked = 0
        while self.going_on:
            prompt = {"prompt_token_ids": [5 + number, 6, 7, 8 + asked % 200]}
            began = time.perf_counter()
            length = 0
            async for output in self._llm.generate(prompt, params, f"client{number}-{asked}"):
                length = len(output.outputs[0].token_ids)
            self.failed += length != TOKENS
            self.durations.append(time.perf_counter() - began)
            asked += 1

    async def phase(self, name: str, seconds: float) -> dict[str, float]:
        """Tokens a second, seconds of the slowest request but one in a hundred, processor time of a token; and what
        the stages took, in milliseconds for each pair of calls."""
        before = await self._in_worker("bench_phase", name)
        self.durations.clear()
        calls = 0
        began, cpu = time.perf_counter(), engine_seconds()
        while time.perf_counter() - began < seconds or len(self.durations) < FEWEST:
            if name != "off":
                await self._llm.start_profile()
                await asyncio.sleep(0.08)
                await self._llm.stop_profile()
                calls += 1
            await asyncio.sleep(0.02)
        while await self._in_worker("bench_pending"):
            await asyncio.sleep(0.02)
        took, durations, cpu = time.perf_counter() - began, list(self.durations), engine_seconds() - cpu
        after = await self._in_worker("bench_phase", "off")
        tokens = len(durations) * TOKENS
        stages = {stage: 1e3 * (after[stage] - before[stage]) / max(calls, 1) for stage in STAGES}
        p99 = statistics.quantiles(durations, n=100)[98]
        return {"throughput": tokens / took, "p99": p99, "cpu_us": 1e6 * cpu / tokens, "calls": calls, **stages}

    async def _in_worker(self, method: str, *args: Any) -> Any:
        (answer,) = await self._llm.collective_rpc(method, args=args)
        return answer


def engine_seconds() -> float:
    """Processor time that the processes below this one have taken so far."""
    fields = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            fields[int(path.parent.name)] = [int(text) for text in path.read_bytes().rpartition(b")")[2].split()[1:]]
    below, ticks = {os.getpid()}, 0
    for pid in sorted(fields):  # children are younger, and have higher numbers
        parent, used = fields[pid][0], fields[pid][10:14]
        if parent in below:
            below.add(pid)
            ticks += sum(used)
    return ticks / os.sysconf("SC_CLK_TCK")


async def measure(folder: Path, clients: int, seconds: float, rounds: int) -> dict[str, Any]:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_arguments(folder, max_num_seqs=clients, disable_log_stats=True)
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    load = Load(llm)
    asking = [asyncio.create_task(load.client(number)) for number in range(clients)]
    for phase in ("off", "package"):
        await load.phase(phase, seconds / 4)
    found: dict[str, list[dict[str, float]]] = {phase: [] for phase in PHASES}
    for number in range(rounds):
        first = number % len(PHASES)
        for phase in PHASES[first:] + PHASES[:first]:
            found[phase].append(await load.phase(phase, seconds))
    load.going_on = False
    await asyncio.gather(*asking)
    llm.shutdown()
    captures = len(list((folder / "profile").glob("*.gz")))
    return {"phases": found, "captures": captures, "failed": load.failed}


def ratios(found: dict[str, list[dict[str, float]]], phase: str, key: str) -> str:
    each = [one[key] / off[key] for one, off in zip(found[phase], found["off"], strict=True)]
    low, middle, high = statistics.quantiles(each, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    run_where_vllm_is()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "sitecustomize.py").write_text("import load\nload.install()\n")
        window = {"profile_token_start": 2, "profile_token_end": 5, "arm": "request", "device": "cpu"}
        use_environment(
            VLLM_ENABLE_V1_MULTIPROCESSING="1",
            PYTHONPATH=os.pathsep.join([str(folder), str(Path(__file__).resolve().parent), str(SUPPORT)]),
            OMP_NUM_THREADS="1",
            VERL_PROFILER_CONF=json.dumps({**window, "save_path": str(folder / "profile")}),
        )
        result = asyncio.run(measure(folder, given.clients, given.seconds, given.rounds))
    phases = result["phases"]
    print(f"\n{result['captures']} captures written, {result['failed']} requests failed; {given.clients} clients")
    print("| | tokens a second | 99th percentile of a request | processor time of a token |")
    print("| --- | --- | --- | --- |")
    throughput, p99, cpu_us = (statistics.median(each[key] for each in phases["off"]) for key in FIGURES)
    print(f"| off | {throughput:.0f} | {p99 * 1e3:.0f} ms | {cpu_us:.0f} us |")
    for phase in PHASES[1:]:
        print(f"| {phase} | {' | '.join(ratios(phases, phase, key) for key in FIGURES)} |")
    calls = statistics.median(each["calls"] / given.seconds for each in phases["package"])
    print(f"\nmilliseconds of processor time for a capture, {calls:.1f} of them asked for in a second")
    print(f"| | {' | '.join(RECORDING)} |")
    print("| --- | --- | --- | --- |")
    for stage in STAGES:
        took = [statistics.median(each[stage] for each in phases[phase]) for phase in RECORDING]
        print(f"| {stage} | {' | '.join(f'{each:.1f}' for each in took)} |")
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
