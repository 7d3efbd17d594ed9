"""What a capture costs on a GPU. The figures are printed (`make test-gpu` shows them); none of them fails a test."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest
from gpu_checks import Machine, Windowed

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("kernels", [100_000, 1_000_000])
def test_opening_and_closing(machine: Machine, tmp_path: Path, kernels: int) -> None:
    """How long the engine stands still when a capture of so many kernels begins and ends."""
    if machine.is_dry_run:
        kernels //= 100
    windowed = Windowed(machine, tmp_path, 5, 15)
    windowed.run(20, lambda _: machine.launch(kernels // 10))
    manifest = windowed.capture()
    is_full = any("device buffer" in note for note in manifest.notes)  # Kineto holds some 400,000 kernels
    assert is_full or [machine.launched(row) for row in manifest.rows] == [kernels // 10] * 10
    print(
        f"\n{kernels} kernels: opening {manifest.opening_stall_ns / 1e6:.0f} ms, closing "
        f"{manifest.stall_ns / 1e6:.0f} ms, trace {manifest.trace_bytes / 2**20:.1f} MiB, buffer full: {is_full}"
    )


def test_iterations_before_during_and_after(machine: Machine, tmp_path: Path) -> None:
    """CUPTI stays attached after a capture, so that iterations may stay slower until the process ends."""
    took: list[float] = []

    def iteration(_: int) -> None:
        begin = time.perf_counter()
        machine.launch(1000)
        machine.synchronize()
        took.append(time.perf_counter() - begin)

    windowed = Windowed(machine, tmp_path, 200, 300)
    windowed.run(600, iteration)
    manifest = windowed.capture()
    assert [machine.launched(row) for row in manifest.rows] == [1000] * 100
    before, during, after = (statistics.median(part) * 1e3 for part in (took[50:190], took[200:300], took[350:]))
    print(
        f"\niterations of 1,000 kernels: {before:.2f} ms before, {during:.2f} ms during, {after:.2f} ms after "
        f"({during / before:.2f} and {after / before:.2f} times)"
    )
