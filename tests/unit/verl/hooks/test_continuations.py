"""A request that continues a response is counted from the response's own first token."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
from sglang_schedule import WIDEST, Rollout
from vllm_schedule import RandomEngine, Release, follow, load

from verl_profiler_conf.core.settings import TOKENS_BEFORE
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.engines.sglang.requests import SglangRequests
from verl_profiler_conf.verl.hooks.client import Responses


class TestResponses:
    def test_the_first_request_of_a_response_has_nothing_before_it(self) -> None:
        responses = Responses()
        assert responses.tokens_before("a", [5, 6, 7]) == 0
        assert responses.tokens_before("b", [5, 6, 7, 8]) == 0

    def test_each_turn_goes_on_from_the_first_prompt(self) -> None:
        responses = Responses()
        turns = [[5, 6, 7], [5, 6, 7, 1, 2], [5, 6, 7, 1, 2, 9, 9, 9]]
        assert [responses.tokens_before("a", turn) for turn in turns] == [0, 2, 5]

    def test_an_aborted_request_that_made_nothing_starts_again_at_0(self) -> None:
        responses = Responses()
        assert [responses.tokens_before("a", [5, 6]) for _ in range(2)] == [0, 0]

    @pytest.mark.parametrize("other", [[5, 6], [5, 6, 8, 9]])
    def test_an_id_that_is_used_again_is_a_new_response(self, other: list[int]) -> None:
        responses = Responses()
        responses.tokens_before("det-0", [5, 6, 7])
        assert responses.tokens_before("det-0", other) == 0
        assert responses.tokens_before("det-0", [*other, 1]) == 1

    def test_the_oldest_is_forgotten_first(self) -> None:
        responses = Responses(max_responses=2)
        for response in ("a", "b", "a", "c"):
            responses.tokens_before(response, [5])
        assert responses.tokens_before("a", [5, 1]) == 1
        assert responses.tokens_before("b", [5, 1]) == 0


@pytest.fixture(scope="module")
def newest() -> Release:
    return load("0.33.0")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("model_runner_v2", [False, True])
def test_vllm_counts_on(newest: Release, seed: int, overlapped: bool, speculative: bool, model_runner_v2: bool) -> None:
    """The same random schedule with and without word of what lies behind: every answer differs by that, and by
    nothing else."""
    plain, continued = (
        RandomEngine(newest, seed, overlapped=overlapped, speculative=speculative, model_runner_v2=model_runner_v2)
        for _ in range(2)
    )
    plain_requests, continued_requests = follow(plain), follow(continued)
    before: dict[str, int] = {}
    certain = 0
    for step, same in zip(plain, continued, strict=True):
        for new in same.output.scheduled_new_reqs:
            before.setdefault(new.req_id, (7 * seed + len(before)) % len(new.prompt_token_ids))
            params = copy.copy(vars(new.sampling_params))
            new.sampling_params = SimpleNamespace(**params, extra_args={TOKENS_BEFORE: before[new.req_id]})
        batch, ended = plain_requests.advance(step.output)
        batch_on, ended_on = continued_requests.advance(same.output)
        assert {name: None if n is None else n + before[name] for name, n in ended.items()} == dict(ended_on)
        assert (batch is None) == (batch_on is None)
        if batch is None or batch_on is None:
            continue
        for name, made in batch.items():
            assert batch_on[name] == range(made.start + before[name], made.stop + before[name])
            certain += bool(before[name]) and bool(made)
        batch.result, batch_on.result = step.result, same.result
    assert certain > 20


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("speculative", [False, True])
def test_sglang_counts_on(seed: int, overlap: bool, speculative: bool) -> None:
    plain, continued = (Rollout(seed, overlap=overlap, speculative=speculative) for _ in range(2))
    before = {req.rid: (7 * seed + n) % len(req.origin_input_ids) for n, req in enumerate(continued.waiting)}
    for req in continued.waiting:
        req.sampling_params.custom_params = {TOKENS_BEFORE: before[req.rid]}
    plain_requests, continued_requests = (
        SglangRequests(
            (TokenWindow(0, None),),
            tokens_per_iteration=WIDEST if speculative else 1,
            speculative=speculative,
            follow_all=True,
            in_flight=lambda rollout=rollout: rollout.in_flight,
        )
        for rollout in (plain, continued)
    )
    certain = 0
    while (step := plain.step(plain_requests)) is not None:
        same = continued.step(continued_requests)
        assert same is not None
        assert {r: None if n is None else n + before[r] for r, n in step[2].items()} == same[2]
        assert {r: range(m.start + before[r], m.stop + before[r]) for r, m in step[0].items()} == same[0]
        certain += sum(bool(made) and bool(before[request]) for request, made in same[0].items())
    assert certain > 20


@pytest.mark.parametrize("word", [True, "7", -1, 0, 3, 4])
def test_a_word_that_cannot_be_is_none(word: object) -> None:
    from verl_profiler_conf.engines.vllm.request import Request

    params = SimpleNamespace(max_tokens=9, extra_args={TOKENS_BEFORE: word}, all_stop_token_ids=None)
    new = SimpleNamespace(prompt_token_ids=[5, 6, 7], sampling_params=params)
    known = Request.of(new, 64)
    assert (known.prompt, known.max_tokens, known.resumed_tokens) == (3, 9, 0)
