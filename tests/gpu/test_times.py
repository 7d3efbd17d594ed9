"""Times of device events: right also when another profiler is prepared before a trace is exported."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from gpu_checks import Machine, Trace, Windowed, trace_of

torch = pytest.importorskip("torch")

from verl_profiler_conf.capture.backends.torch_profiler import TorchProfiler  # noqa: E402
from verl_profiler_conf.capture.writer import Writer  # noqa: E402

CAPTURES = 200
KERNELS = 50


def test_a_second_capture_begins_before_the_first_is_written(machine: Machine, tmp_path: Path) -> None:
    """200 times: every kernel lies within the recording of its own capture, and none is missing."""
    profiler, writer = TorchProfiler(machine.device, save_path=str(tmp_path)), Writer()
    failures: list[BaseException] = []

    def note(_: object, error: BaseException | None) -> None:
        if error is not None:
            failures.append(error)

    for index in range(CAPTURES):
        profiler.start()
        with profiler.annotate(f"response_tokens[0:1) iter={index} reqs=1"):
            machine.launch(KERNELS)
        writer.submit(profiler.stop(), tmp_path / f"t{index}", {}, note)
    assert writer.flush(600)
    assert not failures
    for index in range(CAPTURES):
        trace = Trace(tmp_path / f"t{index}.pt.trace.json.gz")
        assert not trace.outside(), index
        work = trace.operators if machine.is_dry_run else trace.device_work
        assert len(work) == KERNELS, index
        (span,) = trace.ranges
        begin = float(span["ts"])
        assert all(float(event["ts"]) >= begin for event in work), index


def test_a_profiler_of_the_job_is_prepared_during_the_export(machine: Machine, tmp_path: Path) -> None:
    """The export of a large trace takes a while. Meanwhile other code profiles, again and again."""
    windowed = Windowed(machine, tmp_path, 2, 6)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not machine.is_dry_run:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    windowed.run(8, lambda _: machine.launch(20_000))
    profiled = 0
    while windowed.writer.pending or not profiled:
        with torch.profiler.profile(activities=activities):
            machine.launch(10)
        profiled += 1
    manifest = windowed.capture()
    trace = trace_of(tmp_path, manifest)
    assert not trace.outside()
    assert [machine.launched(row) for row in manifest.rows] == [20_000] * 4
    assert not any("outside the time" in note for note in manifest.notes)


def test_kernels_that_run_late_are_bracketed_by_the_device_range(gpu: Machine, tmp_path: Path) -> None:
    """The host leaves its range long before the kernel that it launched has run."""
    cycles = 200_000_000  # about a tenth of a second

    def late(_: int) -> None:
        torch.cuda._sleep(cycles)
        gpu.launch(1)

    windowed = Windowed(gpu, tmp_path, 2, 5)
    windowed.run(6, late)
    manifest = windowed.capture()
    trace = trace_of(tmp_path, manifest)
    assert [row.kernels for row in manifest.rows] == [2, 2, 2]
    for span in trace.ranges:
        name, end = span["name"], float(span["ts"]) + float(span["dur"])
        (device_range,) = (event for event in trace.device_ranges if event["name"] == name)
        inside = (float(device_range["ts"]), float(device_range["ts"]) + float(device_range["dur"]))
        assert inside[1] > end, "the device works on after the host has left"
        kernels = [e for e in trace.device_work if inside[0] <= float(e["ts"]) and float(e["ts"]) < inside[1]]
        assert len(kernels) == 2


def test_markers_on_three_streams(gpu: Machine, tmp_path: Path) -> None:
    """Kernels queued before the window and launched after it are not in the trace; those of the window all are."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    values = torch.rand(1 << 20, device="cuda")
    torch.cuda.synchronize()

    def on_all(mark: Any, times: int) -> None:
        for stream in streams:
            with torch.cuda.stream(stream):
                for _ in range(times):
                    mark(values)

    windowed = Windowed(gpu, tmp_path, 3, 6)
    marks = {2: torch.erfinv, 3: torch.lgamma, 4: torch.lgamma, 5: torch.lgamma, 6: torch.digamma}
    windowed.run(8, lambda token: on_all(marks[token], 20) if token in marks else None)
    trace = trace_of(tmp_path, windowed.capture())
    assert not trace.named("erfinv")
    assert not trace.named("digamma")
    inside = trace.named("lgamma")
    per_stream = {stream: sum(event["tid"] == stream for event in inside) for stream in {e["tid"] for e in inside}}
    assert sorted(per_stream.values()) == [60, 60, 60]
    assert not trace.outside()


def test_a_window_on_another_thread_than_the_devices(gpu: Machine, tmp_path: Path) -> None:
    """As under Ray: the iterations run on a thread that has not chosen its device."""
    windowed = Windowed(gpu, tmp_path, 2, 5)
    thread = threading.Thread(target=lambda: windowed.run(6, lambda _: gpu.launch(100)))
    thread.start()
    thread.join()
    assert [row.kernels for row in windowed.capture().rows] == [100] * 3
