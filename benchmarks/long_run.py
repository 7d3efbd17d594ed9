"""What the thousandth capture costs, beside the first: names, memory, descriptors and threads of a run of many days.

    python benchmarks/long_run.py [--captures 10000] [--vllm 150] [--json FILE]

In one process, captures of three iterations with torch's profiler on the CPU, opened and closed by start and stop
calls; then on a real vLLM engine in this process (`--vllm 0` leaves it out). Printed for each tenth of the run: medians
of what the manifests say that the rollout waited (opening, closing), the largest of both, resident memory, descriptors
and threads. Then how long the job's end takes to read all manifests: in processor time too, since machines are busy.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # else a line for each capture

from tiny_vllm import PYTHON, engine_arguments, sampling, use_environment

from verl_profiler_conf.capture.manifest import Manifest, gather, manifest_names
from verl_profiler_conf.capture.writer import default_writer
from verl_profiler_conf.core.settings import ENV_NAME, Settings

WINDOW = (3, 6)
MOST_WAITING = 8
"""Traces that wait to be written before the next capture: the figures are of the engine's thread, not of a queue."""


def settings(folder: Path) -> Settings:
    raw = {"profile_token_start": WINDOW[0], "profile_token_end": WINDOW[1], "save_path": str(folder), "run_id": "long"}
    return Settings.from_mapping({**raw, "arm": "request", "device": "cpu"})


def machine() -> dict[str, float]:
    """Of this process now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "MiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
    }


def play(captures: int, capture: Callable[[], None], folder: Path) -> Iterator[dict[str, float]]:
    """Take captures; one row for each tenth of them."""
    begun = 0
    seen: set[str] = set()
    for tenth in range(10):
        while begun < captures * (tenth + 1) // 10:
            capture()
            begun += 1
            while default_writer().pending > MOST_WAITING:
                time.sleep(0.001)
        default_writer().drain()
        row = {"captures": begun, **machine()}
        new = [name for name in manifest_names(folder) if name not in seen]
        seen.update(new)
        manifests = [Manifest.from_json((folder / name).read_bytes()) for name in new]
        waits = {"opening ms": [m.opening_stall_ns for m in manifests], "closing ms": [m.stall_ns for m in manifests]}
        row |= {name: statistics.median(values) / 1e6 for name, values in waits.items()}
        yield {**row, "largest ms": max(map(max, waits.values())) / 1e6, "manifests": len(new)}


def with_torch(folder: Path) -> Callable[[], None]:
    import torch

    from verl_profiler_conf.capture.session import Session

    session = Session(settings(folder), engine="loop", version="1")
    value = torch.ones(8)

    def capture() -> None:
        session.start()
        for token in range(WINDOW[1] + 1):
            session.begin({"r": range(token, token + 1)})
            torch.cos(value)
            session.end()
        session.idle({"r": WINDOW[1] + 1})
        session.stop()

    return capture


def with_vllm(folder: Path) -> Callable[[], None]:
    use_environment()
    os.environ[ENV_NAME] = settings(folder).to_json()
    from vllm import LLM, TokensPrompt

    llm = LLM(**engine_arguments(folder))
    params = sampling(WINDOW[1] + 2)
    prompts = [TokensPrompt(prompt_token_ids=[5, 6, 7 + row]) for row in range(8)]

    def capture() -> None:
        llm.start_profile()
        llm.generate(prompts, params, use_tqdm=False)
        llm.stop_profile()

    return capture


def measure(engine: str, captures: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = []
        capture = {"torch": with_torch, "vllm": with_vllm}[engine](folder)
        for row in play(captures, capture, folder):
            rows.append(row)
            print(f"{engine:6}", "  ".join(f"{key} {value:9.2f}" for key, value in row.items()), flush=True)
        wall, cpu = time.perf_counter(), time.process_time()
        found = len(gather(folder, "long"))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(f"{engine:6} reading {found} manifests: {wall:.2f} s ({cpu:.2f} s of processor time)")
        return {"engine": engine, "rows": rows, "reading_s": wall, "reading_cpu_s": cpu, "manifests": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captures", type=int, default=10_000)
    parser.add_argument("--vllm", type=int, default=150)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", choices=("torch", "vllm"), help="only this one, in this process")
    args = parser.parse_args()
    if args.engine is not None:
        found = [measure(args.engine, args.vllm if args.engine == "vllm" else args.captures)]
    else:
        found = [measure("torch", args.captures)] if args.captures else []
        if args.vllm and PYTHON.exists():
            command = [PYTHON, __file__, "--engine", "vllm", "--vllm", str(args.vllm)]
            subprocess.run(command, check=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
