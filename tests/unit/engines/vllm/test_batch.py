"""Scheduler output -> response tokens, with the classes of releases whose engines do not run here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm_schedule import DRAFTS, EVERYWHERE, RandomEngine, Release, Row, follow, load

from verl_profiler_conf.core.releases import VLLM
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.engines.vllm.batch import VllmBatch
from verl_profiler_conf.engines.vllm.requests import VllmRequests
from verl_profiler_conf.engines.vllm.results import sampled_tokens

RELEASES = VLLM.read
OVERLAPPED_SPECULATION = ("0.16.0", "0.24.0", "0.33.0")


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> Release:
    return load(request.param)


@pytest.fixture(scope="module")
def newest() -> Release:
    return load(RELEASES[-1])


def check_every_answer(engine: RandomEngine) -> tuple[int, dict[str, int | None]]:
    """Hold every answer for every request of every iteration against what really happens."""
    engine.outputs_before = {}
    requests = follow(engine)
    finals: dict[str, int | None] = {}
    certain = 0
    for step in engine:
        batch, ended = requests.advance(step.output)
        finals.update(ended)
        if batch is None:
            assert not step.made
        else:
            assert list(batch) == list(step.output.num_scheduled_tokens)
            for request, real in step.made.items():
                told = batch[request]
                if real.start >= engine.limit(request):
                    continue  # it has ended, which the engine did not know yet
                assert told.start == real.start, (request, told, real)
                assert bool(told) == bool(real)
                assert told.stop >= min(real.stop, engine.limit(request))
                certain += 1
            batch.result = step.result
        engine.outputs_before = dict(engine.outputs)
        requests.history.count_outputs = engine.outputs_before.get
    finals.update(requests.take_finished())
    return certain, finals


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("overlapped", "speculative"), [(False, False), (True, False), (False, True)])
def test_every_token_of_every_request(release: Release, overlapped: bool, speculative: bool, seed: int) -> None:
    engine = RandomEngine(release, seed, overlapped=overlapped, speculative=speculative)
    certain, finals = check_every_answer(engine)
    assert certain > 20
    assert finals == engine.finals


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("version", OVERLAPPED_SPECULATION)
def test_overlapped_speculation_is_corrected(version: str, seed: int) -> None:
    engine = RandomEngine(load(version), seed, overlapped=True, speculative=True)
    certain, finals = check_every_answer(engine)
    assert certain > 20
    assert finals == engine.finals


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("overlapped", "speculative"), [(False, False), (True, False), (True, True)])
def test_a_preempted_request_that_comes_back_as_a_new_one_goes_on_counting(
    newest: Release, overlapped: bool, speculative: bool, seed: int
) -> None:
    engine = RandomEngine(newest, seed, overlapped=overlapped, speculative=speculative, model_runner_v2=True)
    certain, finals = check_every_answer(engine)
    assert certain > 20
    assert finals == engine.finals


def test_the_device_is_asked_near_the_window_only(newest: Release) -> None:
    """Far from it a lower bound does, and costs no wait."""
    engine = RandomEngine(newest, 3, overlapped=True, speculative=True)
    window = TokenWindow(14, 16)
    requests = requests_near(engine, (window,))
    asked: list[int] = []
    for step in engine:
        batch, _ = requests.advance(step.output)
        if batch is None:
            continue
        for request, real in step.made.items():
            if real.start >= engine.limit(request):
                continue
            before = len(asked)
            told = batch[request]
            if len(asked) > before:
                assert window.start - 8 <= real.start <= window.end + 8
            assert told.start <= real.start
            if told.stop > window.start - 1 and real.start <= window.end:
                assert told.start == real.start
        step.result.async_copy_ready_event.synchronize = lambda: asked.append(1)
        batch.result = step.result
    assert asked


def requests_near(engine: RandomEngine, windows: tuple[TokenWindow, ...]) -> VllmRequests:
    return VllmRequests(windows, in_flight=int(engine.overlapped), max_drafts=DRAFTS)


# -- single facts ----------------------------------------------------------------------------------------------------


def new(name: str, prompt: int | None, **more: Any) -> SimpleNamespace:
    params = SimpleNamespace(max_tokens=more.pop("max_tokens", 20), all_stop_token_ids={2})
    tokens = None if prompt is None else [5] * prompt
    fields = {"req_id": name, "prompt_token_ids": tokens, "num_computed_tokens": 0, "sampling_params": params}
    return SimpleNamespace(**{**fields, **more})


def output(
    scheduled: dict[str, int],
    *,
    fresh: tuple[Any, ...] = (),
    computed: dict[str, int] | None = None,
    made: dict[str, int] | None = None,
    spec: dict[str, list[int]] | None = None,
    finished: tuple[str, ...] = (),
) -> SimpleNamespace:
    computed, made = computed or {}, made or {}
    cached = SimpleNamespace(
        req_ids=list(computed),
        num_computed_tokens=list(computed.values()),
        num_output_tokens=[made[name] for name in computed],
        resumed_req_ids=set(),
    )
    return SimpleNamespace(
        scheduled_new_reqs=list(fresh),
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens=spec or {},
        finished_req_ids=set(finished),
    )


def make_requests(**more: Any) -> VllmRequests:
    return VllmRequests(**{"windows": EVERYWHERE, "in_flight": 0, "max_drafts": 0, **more})


def batch_of(requests: VllmRequests, told: SimpleNamespace) -> VllmBatch:
    batch, _ = requests.advance(told)
    assert batch is not None
    return batch


def test_a_prompt_of_embeddings_has_a_length() -> None:
    embeds = SimpleNamespace(shape=(9, 64))
    batch = batch_of(make_requests(), output({"a": 9}, fresh=(new("a", None, prompt_embeds=embeds),)))
    assert batch["a"] == range(1)
    batch = batch_of(make_requests(), output({"a": 8}, fresh=(new("a", None, prompt_embeds=embeds),)))
    assert batch["a"] == range(0)


def test_a_cached_prefix_counts_as_computed() -> None:
    batch = batch_of(make_requests(), output({"a": 4}, fresh=(new("a", 20, num_computed_tokens=16),)))
    assert batch["a"] == range(1)


def test_a_pooling_request_has_no_response() -> None:
    batch = batch_of(make_requests(), output({"a": 9}, fresh=(new("a", 9, sampling_params=None),)))
    assert batch["a"] == range(0)


def test_no_token_beyond_what_the_request_may_have() -> None:
    requests = make_requests(max_drafts=3, max_model_len=12)
    batch_of(requests, output({"a": 9, "b": 2}, fresh=(new("a", 9), new("b", 2, max_tokens=3))))
    told = output({"a": 4, "b": 4}, computed={"a": 9, "b": 2}, made={"a": 1, "b": 1}, spec={"a": [1] * 3, "b": [1] * 3})
    batch = batch_of(requests, told)
    assert batch["a"] == range(1, 3), "9 + 3 tokens are all that the model takes"
    assert batch["b"] == range(1, 3), "max_tokens is 3"


def test_a_request_that_was_under_way_before_we_looked() -> None:
    told = output({"a": 1, "b": 30}, computed={"a": 40, "b": 20}, made={"a": 12, "b": 5})
    batch = batch_of(make_requests(), told)
    assert batch["a"] == range(12, 13)
    assert batch["b"] == range(5, 5), "30 tokens are a refill"


def test_an_iteration_that_an_overlapped_engine_ran_in_vain_made_nothing() -> None:
    """A stop token is known one iteration late."""
    requests = make_requests(in_flight=1)
    batch_of(requests, output({"a": 4}, fresh=(new("a", 4),)))
    batch_of(requests, output({"a": 1}, computed={"a": 4}, made={"a": 1}))
    _, ended = requests.advance(output({"b": 1}, fresh=(new("b", 1),), finished=("a",)))
    assert dict(ended) == {"a": 1}, "token 0 was a stop token; the iteration for token 1 was under way"


@pytest.mark.parametrize("window", [TokenWindow(1, 5), TokenWindow(0, 2)], ids=["open", "complete"])
@pytest.mark.parametrize(("token", "expected"), [(2, range(1, 1)), (7, range(1, 2))])
def test_nor_does_it_open_or_complete_a_capture(token: int, expected: range, window: TokenWindow) -> None:
    """Where it would, the result of the iteration before is looked at."""
    requests = make_requests(windows=(window,), in_flight=1)
    first = batch_of(requests, output({"a": 4}, fresh=(new("a", 4),)))
    first.result = SimpleNamespace(req_id_to_index={"a": 0}, sampled_token_ids=[[token]])
    second = batch_of(requests, output({"a": 1}, computed={"a": 4}, made={"a": 1}))
    assert second["a"] == expected


def test_requests_that_ended_wait_for_the_next_iteration() -> None:
    requests = make_requests()
    batch_of(requests, output({"a": 4, "b": 4}, fresh=(new("a", 4), new("b", 4))))
    assert requests.advance(output({}, finished=("a",))) == (None, {})
    assert list(requests.history.requests) == ["b"]
    _, ended = requests.advance(output({"b": 1}, computed={"b": 4}, made={"b": 1}))
    assert ended == {"a": 1}
    assert requests.take_finished() == {}


def test_a_name_used_again_is_another_request() -> None:
    requests = make_requests()
    batch_of(requests, output({"a": 4}, fresh=(new("a", 4),)))
    batch, ended = requests.advance(output({"a": 6}, fresh=(new("a", 6),), finished=("a",)))
    assert dict(ended) == {"a": 1}
    assert batch is not None
    assert batch["a"] == range(1)


class Counted(list):  # type: ignore[type-arg]
    """Counts how often it is looked into."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        type(self).looks += 1
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        raise AssertionError("walked through")

    def index(self, *where: Any) -> int:
        type(self).looks += len(self)
        return super().index(*where)


@pytest.mark.parametrize("size", [1, 32, 256, 4096])
def test_asking_about_one_request_costs_the_same_in_any_batch(size: int) -> None:
    names = [f"r{index}" for index in range(size)]
    requests = make_requests()
    batch_of(requests, output(dict.fromkeys(names, 4), fresh=tuple(new(name, 4) for name in names)))
    lead = names[size // 2]
    for made in (1, 2):
        told = output(dict.fromkeys(names, 1), computed=dict.fromkeys(names, 3 + made), made=dict.fromkeys(names, made))
        cached = told.scheduled_cached_reqs
        for key in ("req_ids", "num_computed_tokens", "num_output_tokens"):
            setattr(cached, key, Counted(getattr(cached, key)))
        Counted.looks = 0
        batch = batch_of(requests, told)
        assert batch.get(lead) == range(made, made + 1)
        assert lead in batch.keys()  # noqa: SIM118 - the view itself is what the gate takes
        assert len(batch) == size
    assert Counted.looks <= 5, "found where it was the last time"


def test_results_of_model_runner_v2_are_read() -> None:
    waited: list[int] = []
    result = SimpleNamespace(
        model_runner_output=SimpleNamespace(req_id_to_index={"a": 1}),
        copy_event=SimpleNamespace(synchronize=lambda: waited.append(1)),
        sampled_token_ids=[Row([9, 9, 9]), Row([7, 8, 9])],
        num_sampled_tokens_np=[3, 2],
    )
    assert sampled_tokens(result, "a") == [7, 8]
    assert waited
    assert sampled_tokens(result, "nobody") is None
    assert sampled_tokens(object(), "a") is None
