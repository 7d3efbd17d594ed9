"""What goes wrong on a GPU inside the window: the job gets its own error, and the profiler is off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gpu_checks import Machine, Windowed, trace_of

torch = pytest.importorskip("torch")

from verl_profiler_conf.capture.backends.torch_profiler import running_profiler  # noqa: E402


def test_out_of_memory(gpu: Machine, tmp_path: Path) -> None:
    """The job catches it and goes on. What was recorded until then is kept, and the next capture is whole."""
    windowed = Windowed(gpu, tmp_path, 2, 6, max_captures=2)

    def too_much(token: int) -> None:
        gpu.launch(10)
        if token == 4:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        windowed.run(8, too_much)
    windowed.session.idle(reason="error")
    assert running_profiler() is None
    windowed.run(8, lambda _: gpu.launch(10), name="s")
    first, second = windowed.manifests()
    assert first.closed_by == "error"
    assert [row.kernels for row in first.rows[:2]] == [10, 10]
    assert [row.kernels for row in second.rows] == [10] * 4
    assert not trace_of(tmp_path, second).outside()


def test_an_asynchronous_error(in_fresh_process: Callable[..., str], gpu: Machine, tmp_path: Path) -> None:
    """A kernel fails some time after its launch, and the context is lost. The job sees its own error, and ends."""
    script = """
import torch
table, bad = torch.zeros(4, device="cuda"), torch.tensor([1 << 20], device="cuda")
windowed = Windowed(machine, folder, 2, 6)
def work(token):
    machine.launch(10)
    if token == 4:
        table[bad]
try:
    windowed.run(8, work)
    torch.cuda.synchronize()
    print("no error")
except Exception as error:
    print("the job's own error:", type(error).__name__)
windowed.session.close()
windowed.writer.flush(60)
from verl_profiler_conf.capture.backends.torch_profiler import running_profiler
print("profiler:", running_profiler())
"""
    printed = in_fresh_process(script, tmp_path)
    assert "the job's own error:" in printed
    assert "profiler: None" in printed
    assert list(tmp_path.glob("*.manifest.json")), "nothing says what became of the window"


def test_a_memory_snapshot(gpu: Machine, tmp_path: Path) -> None:
    """Allocations bear the name of their iteration; what was allocated outside the window bears none of ours."""
    import pickle

    kept = []

    def allocate(token: int) -> None:
        kept.append(torch.empty((token + 1) << 20, dtype=torch.uint8, device="cuda"))

    windowed = Windowed(gpu, tmp_path, 2, 5, profiler="torch_memory")
    windowed.run(8, allocate)
    manifest = windowed.capture()
    assert manifest.trace is not None
    snapshot = pickle.loads((tmp_path / manifest.trace).read_bytes())  # noqa: S301  (our own)
    entries = [entry for trace in snapshot["device_traces"] for entry in trace if entry["action"] == "alloc"]
    named = [entry for entry in entries if entry.get("user_metadata", "").startswith("response_tokens[")]
    assert {entry["user_metadata"].split(")")[0] for entry in named} == {
        f"response_tokens[{token}:{token + 1}" for token in (2, 3, 4)
    }
    assert sorted(entry["size"] >> 20 for entry in named) == [3, 4, 5]
