"""Continuous batching (`generate_batch`) on the real library: its scheduler says which request makes a token."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from continuous_batching import PROMPTS, batching_api, generate_batch
from tiny import endless_llama

from verl_profiler_conf.core.logs import forget_logged_texts
from verl_profiler_conf.engines.transformers import continuous

api = batching_api()


@pytest.fixture
def model() -> Any:
    return endless_llama()


def mark(model: Any) -> None:
    """Each forward bears its number in the trace."""
    plain, count = model.forward, iter(range(10**9))

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(f"step#{next(count)}"):
            return plain(*args, **kwargs)

    forward.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
    model.forward = forward


def marks(trace: Any) -> list[list[int]]:
    """Numbers of the forwards within each range."""
    steps = [(float(e["ts"]), int(e["name"].split("#")[1])) for e in trace.events if e["name"].startswith("step#")]
    spans = sorted(trace.spans("response_tokens["))
    return [[number for ts, number in sorted(steps) if begin <= ts <= end] for begin, end in spans]


def test_the_window_asked_for_is_the_window_captured(windowed: Any, model: Any) -> None:
    """The prompts fit into one step, so step k makes token k of each response."""
    plain = generate_batch(model)
    mark(model)
    outcome = windowed(lambda: generate_batch(model), profile_token_start=8, profile_token_end=12)
    assert outcome.result == plain
    (manifest,) = outcome.captured
    assert [row.index for row in manifest.rows] == [8, 9, 10, 11]
    assert [(row.lo, row.hi) for row in manifest.rows] == [(token, token + 1) for token in range(8, 12)]
    assert (manifest.closed_by, manifest.rows[0].requests, len(manifest.tracked)) == ("window", 3, 1)
    assert marks(outcome.traces[0]) == [[8], [9], [10], [11]]


def test_a_request_that_waits_for_a_place_is_counted_from_its_own_first_token(windowed: Any, model: Any) -> None:
    outcome = windowed(
        lambda: generate_batch(model, PROMPTS * 4, 12, max_requests_per_batch=3, num_blocks=8),
        profile_token_start=5,
        profile_token_end=7,
        track="any",
        max_captures=None,
    )
    assert len(outcome.captured) > 1
    assert all(row.lo < 7 and row.hi > 5 for manifest in outcome.captured for row in manifest.rows if not row.gap)


def test_prompts_in_chunks_make_no_token(windowed: Any, model: Any) -> None:
    long = [list(range(3, 90))]
    outcome = windowed(
        lambda: generate_batch(model, long, 6, max_batch_tokens=16), profile_token_start=0, profile_token_end=1
    )
    (manifest,) = outcome.captured
    assert [(row.lo, row.hi) for row in manifest.rows] == [(0, 1)]
    assert manifest.rows[0].index > 0  # chunks of the prompt ran before


def test_a_window_that_is_not_reached_is_said(windowed: Any, model: Any) -> None:
    outcome = windowed(lambda: generate_batch(model), profile_token_start=50, profile_token_end=60)
    (manifest,) = outcome.manifests
    assert manifest.furthest_token == 19
    assert manifest.trace is None


def test_objects_of_another_release_end_the_session_not_the_job(
    windowed: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = generate_batch(model)

    def fail(_: Any) -> Any:
        raise AttributeError("no such attribute in this release")

    monkeypatch.setattr(continuous, "_scheduled", fail)
    outcome = windowed(lambda: generate_batch(model), profile_token_start=5, profile_token_end=9)
    assert outcome.result == plain
    assert [manifest.closed_by for manifest in outcome.manifests] == ["error"]


def test_a_scheduler_that_cannot_be_read_is_told(
    windowed: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forget_logged_texts()

    class Manager:
        def start(self) -> str:
            return "started"

    class Module:
        ContinuousBatchingManager = Manager

    continuous.hook_continuous(Module)
    outcome = windowed(lambda: [Manager().start() for _ in range(2)], profile_token_start=5, profile_token_end=9)
    assert outcome.result == ["started"] * 2
    assert sum("no capture of continuous batching" in message for message in caplog.messages) == 1
    assert "its scheduler does not tell" in outcome.manifests[0].notes[0]


def test_generate_with_a_paged_cache_is_no_unknown_loop(
    windowed: Any, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    forget_logged_texts()
    config = transformers.generation.configuration_utils.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    outcome = windowed(
        lambda: model.generate(
            torch.tensor([[3, 4, 5]]),
            max_new_tokens=20,
            do_sample=False,
            cache_implementation="paged",
            continuous_batching_config=config,
            eos_token_id=-1,
        ),
        profile_token_start=5,
        profile_token_end=9,
    )
    assert [row.lo for row in outcome.captured[0].rows] == [5, 6, 7, 8]
    assert "not hooked" not in caplog.text
