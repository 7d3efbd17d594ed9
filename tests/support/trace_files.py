"""Traces for tests: real ones, and ones made by hand."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

Json = dict[str, Any]

NAMES = (
    "cpu_only_rank34.pt.trace",
    "cuda_alexnet_training",
    "cuda_cupti_counters",
    "cuda_event_sync_two_streams",
    "cuda_nccl_sampled_rank0",
    "cuda_nccl_sampled_rank1",
    "cuda_nccl_with_config",
    "cuda_simple_add",
    "cuda_triton",
    "rocm_mi250_training",
)
"""Traces of real accelerators, without `.json.gz`. They are no part of the project."""


def real_trace(name: str) -> Path:
    """One of `NAMES`, from the folder `REAL_TRACES` or `../shared/traces`; skips the test where it is not there."""
    folder = Path(os.environ.get("REAL_TRACES") or Path(__file__).resolve().parents[3] / "shared" / "traces")
    path = folder / f"{name}.json.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not in {folder}: set REAL_TRACES to a folder that has it")
    return path


def load(path: Path) -> Any:
    """The whole file, by the standard library."""
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data)


def complete(category: str, name: str, begin: float, dur: float, **args: Any) -> Json:
    """A complete event; `pid` and `tid` may be among the arguments."""
    pid, tid = args.pop("pid", 1), args.pop("tid", 1)
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": dur, "args": args}


def launched(
    correlation: int, name: str, at: float, begin: float, dur: float, *, stream: int = 7, call: float = 2
) -> list[Json]:
    """A launch on the host, what it started on the device, and the arrow between them."""
    return [
        complete("cuda_runtime", "cudaLaunchKernel", at, call, correlation=correlation),
        {"ph": "s", "id": correlation, "pid": 1, "tid": 1, "ts": at, "cat": "ac2g", "name": "ac2g"},
        complete("kernel", name, begin, dur, pid=0, tid=stream, correlation=correlation, stream=stream),
        {"ph": "f", "id": correlation, "pid": 0, "tid": stream, "ts": begin, "cat": "ac2g", "name": "ac2g", "bp": "e"},
    ]


def tokens(lo: int, hi: int, iteration: int, begin: float, dur: float, requests: int = 2) -> Json:
    """An iteration as this package names it."""
    return complete("user_annotation", f"response_tokens[{lo}:{hi}) iter={iteration} reqs={requests}", begin, dur)


def write(path: Path, events: list[Any], **members: Any) -> Path:
    """A trace file; compressed where its name ends with `.gz`."""
    data = json.dumps({"schemaVersion": 1, **members, "traceEvents": events, "traceName": "t"}).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
