"""What packing a raw trace costs, in seconds of the processor: with what is counted meanwhile, without, and compression
alone.

    python benchmarks/packing.py [--mb 60] [--rounds 5] [--against CLONE] [--json FILE]

The traces are made up, in the format of Kineto: of a CPU, of a GPU whose kernels are launched one by one, and of one
that replays CUDA graphs. All ways take turns on the same files, so that a busy machine disturbs all alike; figures are
the least over the rounds. `--against` names a folder with another version of this package, which takes its turns too,
in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

CLONE = Path(__file__).resolve().parent.parent
TRACES = {
    "cpu": {"operators": 4800, "kernels": 0},
    "gpu": {"operators": 2200, "kernels": 900, "copies": 30},
    "graphs": {"operators": 150, "kernels": 60, "graphs": 200, "copies": 12},
}
"""Name -> what an iteration does."""


class NoCounter:
    """Stands for the counter, and counts nothing."""

    def __init__(self, **_: object) -> None: ...

    def feed(self, *_: object, **__: object) -> None: ...

    def result(self) -> object:
        from verl_profiler_conf.capture.backends.iteration_counts import TraceCounts

        return TraceCounts()


def make(path: Path, name: str, mb: int) -> None:
    sys.path.insert(0, str(CLONE / "tests" / "support"))
    from made_trace import MadeTrace

    one = MadeTrace()
    one.iteration(0, **TRACES[name])
    trace = MadeTrace(name=str(path))
    for index in range(max(1, mb * 1_000_000 // len(one.text()))):
        trace.iteration(index, **TRACES[name])
    path.write_text(vary(trace.text()))


def vary(text: str) -> str:
    """Give operators and kernels names and durations that compress as badly as real ones."""
    chance = random.Random(0)
    names = [f"aten::{''.join(chance.choices('abcdefghilmnoprstu_', k=chance.randrange(3, 24)))}" for _ in range(60)]
    text = re.sub('"aten::add"', lambda _: f'"{chance.choice(names)}"', text)
    return re.sub(r'"dur": [123]\.000', lambda _: f'"dur": {chance.uniform(1, 40):.3f}', text)


def compress(path: Path) -> float:
    begin = time.process_time()
    packer = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    with path.open("rb") as raw:
        while chunk := raw.read(64 * 1024):
            packer.compress(chunk)
    packer.flush()
    return time.process_time() - begin


def pack(path: Path) -> float:
    from verl_profiler_conf.capture.backends import raw_trace, tracefile

    copy = path.with_name("copy.json")
    os.link(path, copy)  # the raw file goes with its object
    raw = raw_trace.RawFile(copy, str(path))
    target = path.with_name("packed.gz")
    begin = time.process_time()
    tracefile.pack(raw, target, {})
    spent = time.process_time() - begin
    target.unlink()
    raw.remove()
    return spent


def pack_without_counts(path: Path) -> float:
    with mock.patch("verl_profiler_conf.capture.backends.tracefile.EventCounter", NoCounter):
        return pack(path)


def pack_with(folder: Path) -> Callable[[Path], float]:
    """`pack` of another version."""

    def run(path: Path) -> float:
        command = [sys.executable, __file__, "--pack", str(path)]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)

    return run


def measure(ways: dict[str, Callable[[Path], float]], mb: int, rounds: int) -> dict[str, dict[str, float]]:
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in TRACES:
            path = Path(folder, f"{name}.json")
            make(path, name, mb)
            spent = [{way: run(path) for way, run in ways.items()} for _ in range(rounds)]
            size = path.stat().st_size / 1e6
            table[name] = {"mb": size} | {way: min(one[way] for one in spent) for way in ways}
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mb", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pack", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pack:
        print(pack(options.pack))
        return 0
    ways = {"compress": compress, "without counts": pack_without_counts, "this version": pack_with(CLONE)}
    if options.against:
        ways[str(options.against)] = pack_with(options.against.resolve())
    table = measure(ways, options.mb, options.rounds)
    for name, row in table.items():
        print(f"{name}, {row['mb']:.0f} MB")
        for way in ways:
            print(f"    {way:<16} {row[way]:5.2f} s   {row[way] / row['compress']:.2f} x the compression")
    if options.json:
        options.json.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
