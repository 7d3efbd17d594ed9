"""A small Llama whose every forward marks itself in the trace: traces can be checked without our own records."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import SMALL_LLAMA

from verl_profiler_conf import engines
from verl_profiler_conf.capture.manifest import Manifest, gather
from verl_profiler_conf.capture.session import close_all
from verl_profiler_conf.core.settings import Settings

RANGE = re.compile(r"response_tokens\[(\d+):(\d+)\) iter=(\d+) reqs=(\d+)")


@dataclass
class Trace:
    """What a trace file holds, read from its events alone."""

    events: list[dict[str, Any]]

    @property
    def forwards(self) -> list[int]:
        """Numbers of the forwards whose marker is in the trace, in order."""
        marks = [e for e in self.events if e.get("name", "").startswith("forward#")]
        return [int(e["name"].split("#")[1]) for e in sorted(marks, key=lambda e: float(e["ts"]))]

    @property
    def ranges(self) -> list[tuple[int, int, int, int]]:
        """(lo, hi, iteration, requests) of the named ranges, in order."""
        found = [(RANGE.fullmatch(e.get("name", "")), float(e.get("ts", 0))) for e in self.events]
        hits = sorted(((m, ts) for m, ts in found if m), key=lambda item: item[1])
        return [tuple(int(group) for group in m.groups()) for m, _ in hits]  # type: ignore[misc]

    def spans(self, prefix: str) -> list[tuple[float, float]]:
        return sorted(
            (float(e["ts"]), float(e["ts"]) + float(e.get("dur", 0)))
            for e in self.events
            if e.get("name", "").startswith(prefix) and e.get("cat") != "gpu_user_annotation"
        )


@dataclass
class Outcome:
    manifests: list[Manifest]
    traces: list[Trace] = field(default_factory=list)
    result: Any = None

    @property
    def captured(self) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest.trace]


def read_trace(path: Path) -> Trace:
    with gzip.open(path, "rt") as file:
        return Trace(json.load(file)["traceEvents"])


@pytest.fixture
def model() -> Any:
    """A Llama of two layers. `model.forwards` counts its forwards; each bears its number in the trace."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL_LLAMA)
    llama = transformers.LlamaForCausalLM(config).eval()
    plain = llama.forward
    llama.forwards = 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        number, llama.forwards = llama.forwards, llama.forwards + 1
        with torch.profiler.record_function(f"forward#{number}"):
            return plain(*args, **kwargs)

    forward.__signature__ = __import__("inspect").signature(plain)  # type: ignore[attr-defined]
    llama.forward = forward
    return llama


@pytest.fixture
def windowed(tmp_path: Path) -> Iterator[Callable[..., Outcome]]:
    """Run something with a window in force, and read back what it left."""

    def run(work: Callable[[], Any], **fields: Any) -> Outcome:
        folder = tmp_path / "profile"
        settings = Settings.from_mapping({"device": "cpu", "save_path": str(folder), **fields})
        engines.install_in_process_hooks(settings)
        try:
            result = work()
        finally:
            close_all()
            engines.remove_in_process_hooks()
        manifests = gather(folder, settings.run_id) if folder.exists() else []
        traces = [read_trace(folder / manifest.trace) for manifest in manifests if manifest.trace]
        return Outcome(manifests, traces, result)

    yield run
    close_all()
    engines.remove_in_process_hooks()


@pytest.fixture
def ids() -> Any:
    return torch.arange(3, 3 + 8 * 12).reshape(8, 12) % 120 + 3
