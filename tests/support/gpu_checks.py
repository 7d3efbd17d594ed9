"""What the tests on a real GPU are made of: work with a known number of kernels, windows over it, and traces read back.

All of it also runs on the CPU, where an operator takes the place of a kernel, so that the checks themselves are tested.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_profiler_conf.capture.manifest import IterationRecord, Manifest, gather
from verl_profiler_conf.capture.ranges import RANGE
from verl_profiler_conf.capture.session import Session
from verl_profiler_conf.capture.writer import Writer
from verl_profiler_conf.core.settings import Settings

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
DRY_RUN = "VERL_PROFILER_CONF_GPU_DRY_RUN"
"""Environment variable. With it the tests that can do so run on the CPU."""


@dataclass
class Machine:
    """The device under test, and small work on it."""

    device: str

    def __post_init__(self) -> None:
        import torch

        self.torch = torch
        self.values: Any = torch.zeros(64, device=self.device)

    @property
    def is_dry_run(self) -> bool:
        return self.device == "cpu"

    def launch(self, count: int) -> None:
        """Exactly so many kernels; on the CPU, so many operators."""
        for _ in range(count):
            self.values.neg_()

    def synchronize(self) -> None:
        if not self.is_dry_run:
            self.torch.cuda.synchronize()

    def launched(self, row: IterationRecord) -> int | None:
        """Kernels, or on the CPU operators, that the trace holds of an iteration."""
        return row.operators if self.is_dry_run else row.kernels


class Windowed:
    """A session over a loop of one request, and what it leaves."""

    def __init__(self, machine: Machine, folder: Path, start: int, end: int | None, **fields: Any) -> None:
        raw = {
            "device": machine.device,
            "profile_token_start": start,
            "profile_token_end": end,
            "save_path": str(folder),
            "run_id": "gpu",
            **fields,
        }
        self.folder = folder
        self.writer = Writer()
        self.session = Session(Settings.from_mapping(raw), engine="toy", version="1", writer=self.writer)

    def run(self, tokens: int, work: Callable[[int], object], *, name: str = "r") -> None:
        """One response: `work(token)` is the forward that makes the token."""
        for token in range(tokens):
            self.session.begin({name: range(token, token + 1)})
            work(token)
            self.session.end()
        self.session.idle({name: tokens})

    def manifests(self) -> list[Manifest]:
        """What is left once everything is written, in the order of its making."""
        self.session.close()
        assert self.writer.flush(600)
        return gather(self.folder, "gpu")

    def capture(self) -> Manifest:
        """The only capture, whole."""
        (manifest,) = self.manifests()
        assert manifest.trace is not None, manifest.notes
        return manifest


class Trace:
    """The events of a trace, read from its JSON alone: none of the package's own reading is used."""

    def __init__(self, path: Path) -> None:
        with gzip.open(path) as file:
            self.events: list[dict[str, Any]] = json.load(file)["traceEvents"]
        complete = [event for event in self.events if event.get("ph") == "X"]
        self.device_work = [event for event in complete if event.get("cat") in DEVICE_WORK]
        self.operators = [event for event in complete if event.get("cat") == "cpu_op"]
        self.calls = [event for event in complete if event.get("cat") in ("cuda_runtime", "cuda_driver")]
        self.device_ranges = [event for event in complete if event.get("cat") == "gpu_user_annotation"]
        self.ranges = sorted(
            (event for event in complete if event.get("cat") == "user_annotation" and RANGE.match(event["name"])),
            key=lambda event: float(event["ts"]),
        )

    @property
    def window(self) -> tuple[float, float]:
        """When the recording began and ended, in microseconds."""
        begins = [float(event["ts"]) for event in self.events if event.get("name") == "process_name"]
        ends = [float(event["ts"]) for event in self.events if event.get("name") == "Record Window End"]
        return min(begins), max(ends)

    def outside(self) -> list[dict[str, Any]]:
        """Device work that does not lie within the recording."""
        first, last = self.window
        return [
            event
            for event in self.device_work
            if float(event["ts"]) < first - 1 or float(event["ts"]) + float(event["dur"]) > last + 1
        ]

    def named(self, part: str) -> list[dict[str, Any]]:
        """Device work whose name holds a text, whatever its case."""
        return [event for event in self.device_work if part.lower() in event["name"].lower()]


def trace_of(folder: Path, manifest: Manifest) -> Trace:
    assert manifest.trace is not None
    return Trace(folder / manifest.trace)
