"""Is the window that was asked for the window that was captured? This package beside the plain arithmetic, in one run.

    python benchmarks/fidelity.py [vllm] [sglang]

The plain arithmetic is what frameworks ship: the window handed to the engine's own profiler as counters (vLLM: delay =
start, max = end - start; SGLang: start_step = start, num_steps = end - start). For both, a spy beneath all hooks marks
every iteration in whatever trace is recorded and logs which tokens it really made; the figures come from the traces and
that log alone.

- asked: tokens of the window that requests made.
- recall: share of them whose iteration is in the trace.
- precision: share of the iterations in the trace that made a token of the window.

"first" is the first request scheduled, "all" every request of the workload (for which this package is run with `track:
any` and no limit on captures).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

CLONE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CLONE / "tests" / "support"))

PYTHONS = {"vllm": ".venvs/vllm-0.32.0/bin/python", "sglang": ".venvs/sglang-0.5.23/bin/python"}
NAMES = {
    "lockstep": "lockstep batch of 8",
    "chunked": "chunked prefill, 8 prompts of 50-120",
    "waves": "12 requests, 4 at a time",
    "long_prompt": "one 600-token prompt, 64 tokens an iteration",
    "ngram": "n-gram speculative decoding",
}
WINDOW = (20, 30)


@dataclass
class Figures:
    """Of one workload, one way to capture it, and one set of requests."""

    asked: int
    captured: int
    iterations: int
    hits: int

    @property
    def recall(self) -> float:
        return self.captured / self.asked

    @property
    def precision(self) -> float | None:
        return self.hits / self.iterations if self.iterations else None


def measure(run: Any, requests: set[str]) -> Figures:
    """Hold the iterations whose markers are in the run's traces against the spy's log."""
    from oracle import read_trace

    inside: set[int] = set()
    for path in run.folder.rglob("*.json*"):
        if path.name.endswith((".trace.json.gz", ".trace.json")):
            inside |= set(read_trace(path).markers["begin"])
    asked = captured = 0
    hits: set[int] = set()
    for it in run.log:
        for request, made in it.made.items():
            tokens = len(range(max(made.start, WINDOW[0]), min(made.stop, WINDOW[1])))
            if request in requests and tokens:
                asked += tokens
                if it.number in inside:
                    captured += tokens
                    hits.add(it.number)
    return Figures(asked, captured, len(inside), len(hits))


def child(engine: str, way: str, folder: Path) -> None:
    """Run all workloads of one engine in one way; one JSON line each on standard output."""
    from workloads import WORKLOADS

    known = {workload.name: workload for workload in WORKLOADS}
    if engine == "vllm":
        from fidelity_vllm import drivers
    else:
        from fidelity_sglang import drivers
    driver = drivers(folder / "models")[way]()
    for name in NAMES:  # n-gram last: what it imports keeps vLLM's CPU build from starting another engine
        workload = known[name]
        settings = {"profile_token_start": WINDOW[0], "profile_token_end": WINDOW[1]}
        if way == "any":
            settings |= {"track": "any", "max_captures": None}
        run = driver.run(replace(workload, settings=settings), folder / name)
        first = next(iter(run.log[0].made))
        everyone = {request for it in run.log for request in it.made}
        figures = measure(run, everyone if way == "any" else {first})
        line = {"name": name, "iterations": len(run.log), "first": vars(figures)}
        line["all"] = vars(measure(run, everyone))
        print("FIDELITY " + json.dumps(line), flush=True)
    driver.close()


def collect(engine: str, way: str) -> dict[str, Any]:
    """Run a child in the engine's environment, and read its lines."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(CLONE / PYTHONS[engine]), __file__, "--child", engine, way, folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr[-4000:])
        raise SystemExit(f"{engine}, {way}: exit status {done.returncode}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("FIDELITY ")]
    return {row["name"]: row for row in map(json.loads, (line.removeprefix("FIDELITY ") for line in lines))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="*", default=list(PYTHONS))
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        engine, way, folder = arguments.child
        child(engine, way, Path(folder))
        return
    for engine in arguments.engines:
        ways = {way: collect(engine, way) for way in ("plain", "lead", "any")}
        print(f"\n{engine}, window [{WINDOW[0]}, {WINDOW[1]}): recall / precision\n")
        print("| workload | iterations | first request: plain | here | all requests: plain | here (`any`) |")
        print("| --- | --- | --- | --- | --- | --- |")
        for name, row in ways["plain"].items():
            cells = [
                show(row["first"]),
                show(ways["lead"][name]["first"]),
                show(row["all"]),
                show(ways["any"][name]["all"]),
            ]
            print(f"| {NAMES[name]} | {row['iterations']} | {' | '.join(cells)} |")
    sys.stdout.flush()


def show(raw: dict[str, int]) -> str:
    figures = Figures(**raw)
    if figures.precision is None:
        return f"{figures.recall:.2f} (nothing)"
    return f"{figures.recall:.2f} / {figures.precision:.2f}"


if __name__ == "__main__":
    os.chdir(CLONE)
    main()
