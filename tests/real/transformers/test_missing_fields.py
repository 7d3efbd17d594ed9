"""Continuous batching on the real library, with a field taken away that is read of its objects: `generate_batch`
returns what it always returns, and one line says what is missing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from continuous_batching import batching_api, generate_batch
from tiny import endless_llama

from verl_profiler_conf.core.logs import forget_logged_texts
from verl_profiler_conf.engines.transformers import continuous

api = batching_api()


@pytest.fixture
def model() -> Any:
    return endless_llama()


class Without:
    """An object as another release may have it: without one attribute."""

    def __init__(self, thing: Any, lacks: str) -> None:
        self._thing = thing
        self._lacks = lacks

    def __getattr__(self, name: str) -> Any:
        if name == self._lacks:
            raise AttributeError(f"{type(self._thing).__name__!r} object has no attribute {name!r}")
        return getattr(self._thing, name)


def without_requests(plain: Callable[[Any], Any], lacks: str) -> Callable[[Any], Any]:
    return lambda inputs: plain(Without(inputs, lacks))


def without_scheduled(plain: Callable[[Any], Any], lacks: str) -> Callable[[Any], Any]:
    return lambda inputs: [Without(scheduled, lacks) for scheduled in plain(inputs)]


def without_state(plain: Callable[[Any], Any], lacks: str) -> Callable[[Any], Any]:
    class Scheduled:
        def __init__(self, scheduled: Any) -> None:
            self.state = Without(scheduled.state, lacks)
            self.has_new_token = scheduled.has_new_token

    return lambda inputs: [Scheduled(scheduled) for scheduled in plain(inputs)]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = (record for record in caplog.records if record.name.startswith("verl_profiler_conf"))
    return [record.getMessage() for record in found if record.levelno >= logging.WARNING]


def check_told(windowed: Any, model: Any, plain: Any, lacks: str, caplog: pytest.LogCaptureFixture) -> None:
    """Assert that a window changes no response, and that one line says what is missing."""
    outcome = windowed(lambda: generate_batch(model), profile_token_start=5, profile_token_end=9)
    assert outcome.result == plain
    assert [manifest.closed_by for manifest in outcome.manifests] == ["error"]
    (line,) = lines(caplog)
    assert f"no attribute '{lacks}'" in line


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        (without_requests, "requests_in_batch"),
        (without_scheduled, "state"),
        (without_scheduled, "has_new_token"),
        (without_state, "request_id"),
        (without_state, "initial_tokens"),
        (without_state, "_true_initial_tokens"),
        (without_state, "generated_tokens"),
    ],
)
def test_batch_without_a_field(
    change: Any,
    lacks: str,
    windowed: Any,
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    forget_logged_texts()
    plain = generate_batch(model)
    if lacks == "initial_tokens":  # read of a request that was moved out of the cache
        made = continuous._tokens_made
        monkeypatch.setattr(continuous, "_tokens_made", lambda state: (state.initial_tokens, made(state))[1])
    monkeypatch.setattr(continuous, "_scheduled", change(continuous._scheduled, lacks))
    check_told(windowed, model, plain, lacks, caplog)


@pytest.mark.parametrize("lacks", ["inputs_and_outputs", "scheduler", "active_requests", "waiting_requests"])
def test_processor_without_a_field(
    lacks: str,
    windowed: Any,
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    forget_logged_texts()
    plain = generate_batch(model)
    begin = continuous.ContinuousLoop.begin

    class Processor(Without):
        @property
        def scheduler(self) -> Any:
            if lacks == "scheduler":
                raise AttributeError("'ContinuousBatchProcessor' object has no attribute 'scheduler'")
            return Without(self._thing.scheduler, lacks)

    monkeypatch.setattr(
        continuous.ContinuousLoop, "begin", lambda loop, processor: begin(loop, Processor(processor, lacks))
    )
    check_told(windowed, model, plain, lacks, caplog)


def test_request_that_can_no_longer_be_read_when_nothing_is_left(
    windowed: Any,
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    forget_logged_texts()
    plain = generate_batch(model)

    def fail(*_: Any) -> Any:
        raise AttributeError("'RequestState' object has no attribute 'generated_tokens'")

    monkeypatch.setattr(continuous.ContinuousLoop, "_take_finished", lambda loop, names: fail() if names else {})
    outcome = windowed(lambda: generate_batch(model), profile_token_start=50, profile_token_end=60)
    assert outcome.result == plain
    (line,) = lines(caplog)
    assert "no attribute 'generated_tokens'" in line


def test_manager_without_its_processor(windowed: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture then ends with its window, or with the job."""
    plain = generate_batch(model)
    run = api.ContinuousBatchingManager._run_generation_loop

    def then_without(manager: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(run, "__wrapped__", run)(manager, *args, **kwargs)
        finally:
            vars(manager).pop("batch_processor", None)

    monkeypatch.setattr(api.ContinuousBatchingManager, "_run_generation_loop", then_without)
    outcome = windowed(lambda: generate_batch(model), profile_token_start=5, profile_token_end=9)
    assert outcome.result == plain
    assert [row.lo for row in outcome.captured[0].rows] == [5, 6, 7, 8]
