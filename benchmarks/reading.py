"""Reading a large trace: how fast, in how much memory, and whether HolisticTraceAnalysis says the same of it.

    .venv/bin/python benchmarks/reading.py --traces ../shared/traces --mb 1000 --hta-python HTA/bin/python

`HTA` is a virtual environment with the package HolisticTraceAnalysis; without one its row is left out. The trace is a
real one, its events again and again, each copy later, with correlations, arrows and steps of its own; the slice is a
fifth of it. Each row is a process of its own: seconds and megabytes (10^6 bytes) of JSON a second by the clock on the
wall and by the processor's time, which a busy machine changes less, and the largest resident memory. Exit status 1 if
figures differ by more than rounding.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
BASE = "cuda_nccl_with_config.json.gz"
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
TOP = 20
SIZE = "READING_BYTES"
"""Environment variable that tells a row how large the trace is, uncompressed."""

STEPS_PER_GB = 300

_NUMBERS = re.compile(
    r'("ts": )(\d+(?:\.\d+)?)|("(?:correlation|External id|Ev Idx|Record function id|id)": )(\d+)|(ProfilerStep#)(\d+)'
)


def by_reader(path: Path) -> dict[str, Any]:
    from verl_profiler_conf.tools.trace.reader import TraceReader

    return {"events": sum(map(len, TraceReader(path).events()))}


def by_analysis(path: Path) -> dict[str, Any]:
    from verl_profiler_conf.tools.trace.analysis import analyse

    found = analyse(path)
    device = found.device
    assert device is not None
    return {
        "kernel time": device.busy_us + device.idle_us,
        "idle": device.idle_us,
        "compute": device.compute_us,
        "hidden share": device.hidden_share,
        "kernels": {k.name: k.total_us for k in found.kernels},
    }


def by_slice(path: Path) -> dict[str, Any]:
    from verl_profiler_conf.tools.trace.select import Selection
    from verl_profiler_conf.tools.trace.slicing import slice_trace

    with tempfile.TemporaryDirectory() as folder:
        fifth = round(int(os.environ[SIZE]) / 1e9 * STEPS_PER_GB / 5)
        selection = Selection(start=fifth, end=2 * fifth + 1)
        done = slice_trace(path, Path(folder, "slice.json.gz"), selection)
        return {"events": done.events, "iterations": done.iterations}


def by_standard_library(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"events": len(json.load(file)["traceEvents"])}


def by_hta(path: Path) -> dict[str, Any]:
    """The same figures, of the same events: all steps, and of the device's timeline what is work."""
    import logging

    os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
    logging.disable(logging.CRITICAL)
    from hta.common.trace import Trace
    from hta.trace_analysis import TraceAnalysis

    Trace._filter_irrelevant_gpu_kernels = lambda *_: None
    analysis = TraceAnalysis(trace_files={0: str(path)}, trace_dir="/")
    frame = analysis.t.traces[0]
    symbols = analysis.t.symbol_table.get_sym_table()
    work = [number for number, symbol in enumerate(symbols) if symbol in DEVICE]
    analysis.t.traces[0] = frame[frame["cat"].isin(work)]
    times = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    _, kernels = analysis.get_gpu_kernel_breakdown(
        visualize=False, num_kernels=10_000, duration_ratio=1.0, include_memory_kernels=True
    )
    overlap = float(analysis.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"])
    return {
        "kernel time": float(times["kernel_time(us)"]),
        "idle": float(times["idle_time(us)"]),
        "compute": float(times["compute_time(us)"]),
        "hidden share": overlap / 100 if overlap == overlap else None,
        "kernels": dict(zip(kernels["name"], map(float, kernels["sum (us)"]), strict=True)),
    }


READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "reader": by_reader,
    "analysis": by_analysis,
    "slice": by_slice,
    "json.load": by_standard_library,
    "hta": by_hta,
}


def run_here(name: str, path: Path) -> None:
    begin = time.perf_counter()
    found = READERS[name](path)
    wall = time.perf_counter() - begin
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"wall": wall, "cpu": usage.ru_utime + usage.ru_stime, "kib": peak_kib(), "found": found}))


def peak_kib() -> int:
    """Largest resident memory of this program; getrusage also counts that of the process it was forked from."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run(name: str, path: Path, size: int, python: str = sys.executable) -> dict[str, Any]:
    """One row, in a process of its own."""
    command = [python, str(HERE), "--run", name, str(path)]
    environment = {**os.environ, SIZE: str(size)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    label = f"{name}{' .gz' if path.suffix == '.gz' else ''}"
    wall, cpu = (f"{row[key]:7.2f} s {size / row[key] / 1e6:6.1f} MB/s" for key in ("wall", "cpu"))
    print(f"{label:14} {wall} by the wall {cpu} by the processor {row['kib'] / 1024:6.0f} MiB", flush=True)
    return row


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Figures that differ by more than rounding: times of single events are kept to 1/1000 of a microsecond."""
    pairs = {key: (ours[key], theirs[key], 1e-6) for key in ("kernel time", "idle", "compute")}
    if theirs["hidden share"] is not None:
        pairs["hidden share"] = (ours["hidden share"], theirs["hidden share"], 2e-4)
    longest = sorted(theirs["kernels"], key=lambda name: -theirs["kernels"][name])[:TOP]
    pairs |= {name: (ours["kernels"].get(name, 0.0), theirs["kernels"][name], 1e-6) for name in longest}
    mine = sorted(ours["kernels"], key=lambda name: -ours["kernels"][name])[:TOP]
    wrong = [f"{key[:60]}: {a} and {b}" for key, (a, b, slack) in pairs.items() if abs(a - b) > slack * max(abs(b), 1)]
    return wrong + ([] if set(mine) == set(longest) else ["the longest kernels are others"])


def make_trace(source: Path, target: Path, megabytes: int) -> None:
    """Write `target`, of `megabytes` (10^6 bytes) or a little more, pretty-printed as `source` is.

    Args:
        source: a real trace, `.json.gz`.
        target: where to, `.json`.
        megabytes: size wanted.
    """
    with gzip.open(source) as file:
        text = file.read().decode()
    begin = text.index("[", text.index('"traceEvents"'))
    events, end = json.JSONDecoder().raw_decode(text, begin)
    body = text[begin + 1 : end - 1].strip()
    with target.open("w") as out:
        written = out.write(text[: begin + 1] + "\n")
        for number, copy in enumerate(_copies(body, events)):
            written += out.write(("" if number == 0 else ",\n") + copy)
            if written >= megabytes * 1_000_000:
                break
        out.write("\n" + text[end - 1 :])


def _copies(body: str, events: list[dict[str, Any]]) -> Iterator[str]:
    timed = [e for e in events if e.get("ph") == "X" and isinstance(e.get("pid"), int)]
    first = min(e["ts"] for e in timed)
    span = max(e["ts"] + e.get("dur", 0) for e in timed) - first + 1000
    ids = 1 + max(
        max(int(e.get("args", {}).get(key, 0) or 0) for key in ("correlation", "External id", "Ev Idx")) for e in timed
    )
    steps = [int(e["name"].split("#")[1]) for e in events if str(e.get("name", "")).startswith("ProfilerStep#")]
    each = max(steps, default=0) - min(steps, default=0) + 1
    number = 0
    while True:
        later, more, step = number * round(span), number * ids, number * each

        def moved(match: re.Match[str], later: int = later, more: int = more, step: int = step) -> str:
            if match[1]:
                whole, dot, part = match[2].partition(".")
                return f"{match[1]}{int(whole) + later}{dot}{part}"
            return f"{match[3]}{int(match[4]) + more}" if match[3] else f"{match[5]}{int(match[6]) + step}"

        yield _NUMBERS.sub(moved, body) if number else body
        number += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=HERE.parents[2] / "shared" / "traces", help="real traces")
    parser.add_argument("--mb", type=int, default=1000, help="size of the large one")
    parser.add_argument("--large", type=Path, help="a trace made before, instead of making one")
    parser.add_argument("--hta-python", help="interpreter of an environment with HolisticTraceAnalysis")
    parser.add_argument("--json-load", action="store_true", help="a row for json.load as well: much memory")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run_here(arguments.run[0], Path(arguments.run[1]))
        return 0
    if not (arguments.traces / BASE).exists():
        print(f"{arguments.traces} has no {BASE}: nothing to measure")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        large = arguments.large or Path(folder, "large.json")
        if arguments.large is None:
            make_trace(arguments.traces / BASE, large, arguments.mb)
        size = large.stat().st_size
        packed = Path(folder, "large.json.gz")
        with large.open("rb") as source, gzip.open(packed, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        print(f"{size / 1e6:.0f} MB of JSON, {packed.stat().st_size / 1e6:.0f} MB compressed")
        run("reader", large, size)
        ours = run("analysis", large, size)
        run("analysis", packed, size)
        run("slice", large, size)
        run("slice", packed, size)
        if arguments.json_load:
            run("json.load", large, size)
        if not arguments.hta_python:
            return 0
        theirs = run("hta", large, size, arguments.hta_python)
        print(
            f"the analysis is {theirs['wall'] / ours['wall']:.0f} times as fast as HolisticTraceAnalysis by the wall, "
            f"{theirs['cpu'] / ours['cpu']:.0f} times by the processor"
        )
        wrong = differences(ours["found"], theirs["found"])
        print("\n".join(wrong) if wrong else f"the same figures, and the same {TOP} longest kernels")
        return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
