"""What captures cost an engine under load, and how much of that is the device profiler being on.

    python benchmarks/load.py [--clients 64] [--seconds 4] [--rounds 3] [--json FILE]

AsyncLLM, its engine in a process of its own, serves clients that ask again as soon as they are answered. Meanwhile
start_profile and stop_profile are called ten times a second, for windows of three tokens. Phases alternate in one run:

- off: the hooks are there, and nothing is armed.
- profiler: each window is recorded with torch's profiler, and the recording is thrown away: no file, no export.
- package: each window becomes a trace and a manifest.

Printed are tokens a second and the 99th percentile of a request's duration, as multiples of those of `off` in the same
round: medians over the rounds, and the smallest to the largest.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CLONE = Path(__file__).resolve().parent.parent
SUPPORT = CLONE / "tests" / "support"
sys.path.insert(0, str(SUPPORT))

PYTHON = CLONE / ".venvs" / "vllm" / "bin" / "python"
PHASES = ("off", "profiler", "package")
TOKENS = 32
SWITCH = "LOAD_SWITCH"
"""Environment variable: a file that is there while recordings are thrown away."""

SITE = f"""
import os
import wrapt

def hook(module):
    outputs = module.CaptureOutputs
    write, opening = outputs.write, outputs.report_opening

    def write_or_drop(self, capture, recording, *args, **more):
        if os.path.exists(os.environ["{SWITCH}"]):
            recording.drop()
        else:
            write(self, capture, recording, *args, **more)

    def report_or_not(self, *args, **more):
        if not os.path.exists(os.environ["{SWITCH}"]):
            opening(self, *args, **more)

    outputs.write, outputs.report_opening = write_or_drop, report_or_not

wrapt.register_post_import_hook(hook, "verl_profiler_conf.capture.outputs")
"""


class Load:
    """Clients that ask again as soon as they are answered."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.durations: list[float] = []
        self.failed = 0
        self.going_on = True

    async def client(self, number: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=TOKENS,
            ignore_eos=True,
            detokenize=False,
            temperature=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
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

    async def phase(self, seconds: float, *, calls: bool) -> dict[str, float]:
        """Tokens a second, and seconds of the slowest request but one in a hundred."""
        self.durations.clear()
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            if calls:
                await self._llm.start_profile()
                await asyncio.sleep(0.08)
                await self._llm.stop_profile()
            await asyncio.sleep(0.02)
        took, durations = time.perf_counter() - began, list(self.durations)
        return {"throughput": len(durations) * TOKENS / took, "p99": statistics.quantiles(durations, n=100)[98]}


async def measure(folder: Path, clients: int, seconds: float, rounds: int) -> dict[str, Any]:
    from tiny import tiny_model
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=tiny_model(folder / "tiny"),
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            max_model_len=256,
            max_num_seqs=clients,
            kv_cache_memory_bytes=64 << 20,
            disable_log_stats=True,
        )
    )
    load, switch = Load(llm), Path(os.environ[SWITCH])
    asking = [asyncio.create_task(load.client(number)) for number in range(clients)]
    await load.phase(seconds / 2, calls=False)
    found: dict[str, list[dict[str, float]]] = {phase: [] for phase in PHASES}
    for _ in range(rounds):
        for phase in PHASES:
            switch.touch() if phase == "profiler" else switch.unlink(missing_ok=True)
            found[phase].append(await load.phase(seconds, calls=phase != "off"))
    load.going_on = False
    await asyncio.gather(*asking)
    llm.shutdown()
    captures = len(list((folder / "profile").glob("*.gz")))
    return {"phases": found, "captures": captures, "failed": load.failed}


def ratios(found: dict[str, list[dict[str, float]]], phase: str, key: str) -> str:
    each = [one[key] / off[key] for one, off in zip(found[phase], found["off"], strict=True)]
    return f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"


def main() -> None:
    if importlib.util.find_spec("vllm") is None:
        os.execv(PYTHON, [str(PYTHON), *sys.argv])  # noqa: S606 - the environment that has the engine
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "sitecustomize.py").write_text(SITE)
        window = {"profile_token_start": 2, "profile_token_end": 5, "arm": "request", "device": "cpu"}
        os.environ |= {
            "PYTHONPATH": os.pathsep.join([str(folder), str(SUPPORT)]),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
            SWITCH: str(folder / "thrown_away"),
            "VERL_PROFILER_CONF": json.dumps({**window, "save_path": str(folder / "profile")}),
        }
        result = asyncio.run(measure(folder, given.clients, given.seconds, given.rounds))
    print(f"\n{result['captures']} captures written, {result['failed']} requests failed; {given.clients} clients")
    print("| | tokens a second | 99th percentile of a request |")
    print("| --- | --- | --- |")
    off = result["phases"]["off"]
    absolute = [statistics.median(each[key] for each in off) for key in ("throughput", "p99")]
    print(f"| off | {absolute[0]:.0f} | {absolute[1] * 1e3:.0f} ms |")
    for phase in PHASES[1:]:
        print(f"| {phase} | {' | '.join(ratios(result['phases'], phase, key) for key in ('throughput', 'p99'))} |")
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
