"""How fast iterations are before, during and after a capture on a GPU, where CUPTI stays attached to the process.

    python benchmarks/attached.py [--kernels 1000] [--iterations 300] [--rounds 3] [--json FILE]

Each round is a process of its own, since CUPTI is attached once in a process. An iteration launches small kernels and
waits for them. Medians over the iterations, then over the rounds. Needs a CUDA GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from gpu_checks import Machine, Windowed


def one_round(kernels: int, iterations: int) -> dict[str, float]:
    """Milliseconds an iteration: before, during and after a capture of a third as many iterations."""
    machine, took = Machine("cuda"), list[float]()

    def iteration(_: int) -> None:
        begin = time.perf_counter()
        machine.launch(kernels)
        machine.synchronize()
        took.append(time.perf_counter() - begin)

    start, end = iterations, iterations + iterations // 3
    with tempfile.TemporaryDirectory() as folder:
        windowed = Windowed(machine, Path(folder), start, end)
        windowed.run(end + iterations, iteration)
        manifest = windowed.capture()
    # the profiler is prepared four tokens ahead, and the trace is written beside the first iterations after the window
    parts = {"before": took[iterations // 3 : start - 10], "during": took[start:end], "after": took[-iterations // 2 :]}
    figures = {name: statistics.median(part) * 1e3 for name, part in parts.items()}
    return figures | {"opening": manifest.opening_stall_ns / 1e6, "closing": manifest.stall_ns / 1e6}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernels", type=int, default=1000)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one-round", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA GPU here: nothing to measure")
        return 0
    if options.one_round:
        print(json.dumps(one_round(options.kernels, options.iterations)))
        return 0
    command = [sys.executable, __file__, "--one-round", f"--kernels={options.kernels}"]
    command.append(f"--iterations={options.iterations}")
    rounds = []
    for _ in range(options.rounds):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rounds.append(json.loads(done.stdout.splitlines()[-1]))
    table = {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}
    print(f"iterations of {options.kernels} kernels, torch {torch.__version__}, {torch.cuda.get_device_name()}\n")
    for name in ("before", "during", "after"):
        print(f"{name:<8} {table[name]:>8.3f} ms   {table[name] / table['before']:.3f} x")
    print(f"\nstanding still: {table['opening']:.1f} ms to open, {table['closing']:.1f} ms to close")
    if options.json:
        options.json.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
