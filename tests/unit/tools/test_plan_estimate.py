"""What a plan says that captures would take: from a table, whose numbers it names, or from an earlier run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verl_profiler_conf.tools.plan.estimate import EVENT_BYTES, MORE_BYTES, OPERATORS, add_estimate, assumed

VLLM = {"engine": "vllm", "how": "hook"}
TRANSFORMERS = {"engine": "transformers", "how": "hook"}


def job(folder: Path, **more: Any) -> dict[str, Any]:
    given = {
        "enable": True,
        "windows": [[20, 30]],
        "max_iterations": None,
        "captures": 1,
        "fields": [],
        "device": "cpu",
    }
    return {**given, "save_path": str(folder), "problems": [], "warnings": [], "engines": [VLLM], **more}


def test_operators_of_the_engine_and_the_layers(tmp_path: Path) -> None:
    each, beside = OPERATORS["vllm"]
    cost = assumed(job(tmp_path), 28)
    assert cost.trace_bytes == (28 * each + beside) * EVENT_BYTES
    assert "as of vllm on a CPU with 28 layers" in cost.source
    assert "guess" not in cost.source


def test_layers_that_nobody_has_told_are_called_a_guess(tmp_path: Path) -> None:
    assert "32 layers; a guess: --layers says how many" in assumed(job(tmp_path), None).source


@pytest.mark.parametrize(
    ("more", "engine"),
    [
        ({"engines": [VLLM, TRANSFORMERS]}, "transformers"),
        ({"engines": [VLLM, TRANSFORMERS], "engine": "vllm"}, "vllm"),
        ({"engines": [VLLM, TRANSFORMERS], "engine": "auto"}, "transformers"),
        ({"engines": [VLLM, TRANSFORMERS], "rollout": "vllm"}, "vllm"),
        ({"engines": [VLLM, TRANSFORMERS], "rollout": "sglang"}, "transformers"),
        ({"engines": [{**TRANSFORMERS, "how": "none"}, VLLM]}, "vllm"),
        ({"engines": []}, "transformers"),
    ],
)
def test_the_largest_of_what_may_run(more: dict[str, Any], engine: str, tmp_path: Path) -> None:
    assert f"as of {engine} on a CPU" in assumed(job(tmp_path, **more), 2).source


def test_contents_and_a_device_add_to_it(tmp_path: Path) -> None:
    plain = assumed(job(tmp_path), 2)
    more = assumed(job(tmp_path, contents=["cpu", "shapes", "stack"]), 2)
    added = MORE_BYTES["shapes"] + MORE_BYTES["stack"]
    assert more.trace_bytes / plain.trace_bytes == pytest.approx((EVENT_BYTES + added) / EVENT_BYTES)
    on_gpu = assumed(job(tmp_path, device="cuda"), 2)
    assert on_gpu.trace_bytes > plain.trace_bytes
    assert "launches and kernels, assumed from traces of others" in on_gpu.source
    assert "launches" not in plain.source


def test_a_folder_without_captures_is_said_and_the_table_used(tmp_path: Path) -> None:
    planned = job(tmp_path)
    add_estimate(planned, like=tmp_path, layers=2)
    assert planned["warnings"] == [f"--like {tmp_path}: no manifest with a trace there; the table is used"]
    assert planned["estimate"]["trace_bytes"] == round(10 * assumed(planned, 2).trace_bytes)


def test_a_part_is_what_has_to_fit_into_memory(tmp_path: Path) -> None:
    part = {"key": "profiler.part_iterations", "value": 4, "from": ""}
    planned = job(tmp_path, fields=[part])
    add_estimate(planned, layers=2)
    assert planned["estimate"]["memory_bytes"] == round(4 * assumed(planned, 2).memory_bytes)
