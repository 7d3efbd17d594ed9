"""Trainers that make rollouts with transformers, or with a vLLM in their own process, each as a Hydra app: the first
rollout is a sanity check, or cold, and `skip_captures` lets it go by. The apps are `tests/support/apps/*_app.py`; each
mark of theirs names its rollout.

Weights, tokens, log probabilities, losses and all other metrics are held against those of the app without the option,
to the last bit: with a capture, and with a window that stays closed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from hydra_app import app  # noqa: F401 - a fixture
from trace_files import load

App = Callable[..., Any]

CLOSED = ("+profiler=torch_window", "profiler.profile_token_start=90")
WINDOW = ("+profiler=torch_window", "profiler.profile_token_start=4", "profiler.profile_token_end=9")
RESPONSE_TOKENS = 12
ROWS = 4


def result(folder: Path) -> Any:
    """What an app left, which the next run has to leave anew."""
    file = folder / "result.json"
    text = file.read_text()
    file.unlink()
    return json.loads(text)


def test_seq2seq_trainer_that_evaluates_before_training(app: App) -> None:  # noqa: F811
    pytest.importorskip("accelerate")
    result = second_rollout_is_captured(app, "seq2seq_app.py")
    assert {"loss", "eval_loss", "eval_tokens", "grad_norm"} <= names_of(result["metrics"])


def test_lightning_app_with_a_sanity_check(app: App) -> None:  # noqa: F811
    pytest.importorskip("lightning")
    result = second_rollout_is_captured(app, "lightning_app.py")
    assert len(result["losses"]) == 4
    assert len(result["responses"]) == 3


def test_grpo_trainer_whose_first_step_is_cold(app: App) -> None:  # noqa: F811
    pytest.importorskip("trl")
    result = second_rollout_is_captured(app, "grpo_app.py")
    assert {"loss", "reward", "entropy", "grad_norm"} <= names_of(result["metrics"])
    assert len(result["responses"]) == len(result["log_probabilities"]) > 0


@pytest.mark.engine_trl
def test_grpo_trainer_with_vllm_in_its_process(app: App) -> None:  # noqa: F811
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    second_rollout_is_captured(app, "grpo_app.py", "rollout=vllm", engine="vllm", env=env)


def names_of(metrics: list[dict[str, Any]]) -> set[str]:
    return {name for entry in metrics for name in entry}


def second_rollout_is_captured(
    app: App,  # noqa: F811
    file: str,
    *arguments: str,
    engine: str = "transformers",
    env: dict[str, str] | None = None,
) -> Any:
    """Assert that the capture holds the window of the second rollout, and that the training went as without it.

    Returns:
        What the app left, with a window and without one.
    """
    plain = app(*arguments, file=file, env=env)
    assert plain.code == 0, plain.err
    expected = result(plain.folder)
    closed = app(*arguments, *CLOSED, file=file, env=env)
    assert (closed.code, closed.manifests()[0]["trace"]) == (0, None), closed.err
    assert result(closed.folder) == expected
    for left in closed.folder.rglob("*.manifest.json"):
        left.unlink()
    run = app(*arguments, *WINDOW, "profiler.skip_captures=1", file=file, env=env)
    assert run.code == 0, run.err
    assert result(run.folder) == expected
    (manifest,) = run.manifests()
    assert (manifest["skip_captures"], manifest["skipped"], manifest["closed_by"]) == (1, 1, "window")
    (lead,) = manifest["tracked"]
    assert lead == "generate2.row0" if engine == "transformers" else lead.startswith("4-"), "of the second rollout"
    rows = [(row["index"], row["lo"], row["hi"], row["requests"]) for row in manifest["rows"]]
    assert rows == [(RESPONSE_TOKENS + token, token, token + 1, ROWS) for token in range(4, 9)]
    (trace,) = run.folder.rglob("*.pt.trace.json.gz")
    marks = Counter(
        event["name"] for event in load(trace)["traceEvents"] if event.get("name", "").startswith("rollout#")
    )
    assert marks == {"rollout#2": 5}
    (line,) = (line for line in run.ours if f"iterations of {engine}" in line)
    assert line.endswith("; 1 time passed by uncaptured, as asked")
    assert not any("WARNING" in line for line in run.ours), run.ours
    return expected
