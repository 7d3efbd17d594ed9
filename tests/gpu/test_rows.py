"""Kernels of each iteration: complete from the first row on, whatever the process has done before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_checks import Machine, Windowed, trace_of

torch = pytest.importorskip("torch")

KERNELS = 500
FRESH = f"""
windowed = Windowed(machine, folder, START, START + 8)
windowed.run(START + 10, lambda _: machine.launch({KERNELS}))
manifest = windowed.capture()
print([machine.launched(row) for row in manifest.rows] == [{KERNELS}] * 8, manifest.notes)
"""


@pytest.mark.parametrize("start", [0, 20])
def test_in_a_fresh_process(in_fresh_process: Callable[..., str], tmp_path: Path, start: int) -> None:
    """From token 0 there is no time to prepare; from token 20 the profiler is prepared four tokens ahead."""
    assert "True []" in in_fresh_process(FRESH.replace("START", str(start)), tmp_path)


def test_after_idling(in_fresh_process: Callable[..., str], tmp_path: Path) -> None:
    """An idle GPU lowers its clocks, and torch had corrupt first records after it."""
    idle = "machine.launch(10)\nmachine.synchronize()\nimport threading\nthreading.Event().wait(20)\n"
    assert "True []" in in_fresh_process(idle + FRESH.replace("START", "0"), tmp_path)


def test_after_a_profile_of_the_cpu_alone(in_fresh_process: Callable[..., str], tmp_path: Path) -> None:
    """torch 2.13 can leave a process without device events then: the manifest has to say so."""
    before = """
import torch
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
    machine.launch(10)
"""
    printed = in_fresh_process(before + FRESH.replace("START", "4"), tmp_path)
    assert "True []" in printed or "a profiler of the CPU alone that ran first" in printed


def test_a_cuda_graph_that_was_captured_before(gpu: Machine, tmp_path: Path) -> None:
    """Captured before the profiler was attached; its replays are in the trace kernel by kernel."""
    values = torch.zeros(64, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            values.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(KERNELS):
            values.add_(1)
    windowed = Windowed(gpu, tmp_path, 2, 6)
    windowed.run(8, lambda _: graph.replay())
    assert [row.kernels for row in windowed.capture().rows] == [KERNELS] * 4


def test_a_long_window_in_parts(machine: Machine, tmp_path: Path) -> None:
    windowed = Windowed(machine, tmp_path, 4, 1028)
    windowed.run(1030, lambda _: machine.launch(10))
    parts = sorted(windowed.manifests(), key=lambda manifest: manifest.part)
    assert [manifest.part for manifest in parts] == [1, 2, 3, 4]
    rows = [row for manifest in parts for row in manifest.rows]
    assert [row.lo for row in rows] == list(range(4, 1028))
    assert [machine.launched(row) for row in rows] == [10] * 1024
    assert not any(trace_of(tmp_path, manifest).outside() for manifest in parts)


def test_generate_with_a_static_cache_compiled(gpu: Machine, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("wrapt")
    from verl_profiler_conf import engines
    from verl_profiler_conf.capture.manifest import gather
    from verl_profiler_conf.capture.session import close_all
    from verl_profiler_conf.core.settings import Settings

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=1,
    )
    model: Any = transformers.LlamaForCausalLM(config).eval().to("cuda", torch.bfloat16)
    ids = torch.randint(3, 512, (4, 16), device="cuda")
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "cache_implementation": "static"}
    model.generate(ids, max_new_tokens=32, min_new_tokens=32, **options)  # compiles
    settings = Settings.from_mapping(
        {"device": "cuda", "profile_token_start": 10, "profile_token_end": 20, "save_path": str(tmp_path)}
    )
    engines.install_in_process_hooks(settings)
    try:
        model.generate(ids, max_new_tokens=32, min_new_tokens=32, **options)
    finally:
        close_all()
        engines.remove_in_process_hooks()
    (manifest,) = gather(tmp_path, "")
    assert [row.lo for row in manifest.rows] == list(range(10, 20))
    kernels = [row.kernels for row in manifest.rows]
    assert all(kernels)
    assert len(set(kernels)) <= 2, kernels  # the same graph every time, but for what the sampling adds now and then
