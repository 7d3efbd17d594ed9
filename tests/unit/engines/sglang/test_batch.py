"""What SGLang's batches say of the tokens ahead, on schedules that keep its books as its scheduler does: results are
processed one iteration late under overlap, speculation accepts what it likes, requests are retracted and refilled.

The books are SGLang's (`output_ids`, `seq_lens_cpu`, `accept_lens`, ...), the objects that hold them are plain ones, so
that thousands of iterations run in a second. The real scheduler is in test_end_to_end.py and test_sglang.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang_schedule import EOS, WIDEST, Rollout, make_batch, make_request, make_result

from verl_profiler_conf.core.gate import LeadGate
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.engines.sglang.batch import SglangBatch
from verl_profiler_conf.engines.sglang.request import HEALTH_CHECK, WARM_UP, final_count, stop_tokens
from verl_profiler_conf.engines.sglang.requests import SglangRequests


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("speculative", [False, True])
def test_every_token_of_random_rollouts_is_told(overlap: bool, speculative: bool) -> None:
    everywhere = (TokenWindow(0, None),)  # all iterations are near it, so that every start has to be exact
    iterations = 0
    for seed in range(60):
        rollout = Rollout(seed, overlap=overlap, speculative=speculative)
        requests = SglangRequests(
            everywhere,
            speculative=speculative,
            tokens_per_iteration=WIDEST if speculative else 1,
            follow_all=True,
            in_flight=lambda rollout=rollout: rollout.in_flight,
        )
        ended: dict[str, int | None] = {}
        while (step := rollout.step(requests)) is not None:
            said, made, gone = step
            ended.update(gone)
            assert list(said) == [request for request in made if request in said], "in scheduling order"
            for request, tokens in made.items():
                if request not in said:
                    assert not tokens, "runs once too often"
                    assert gone[request] == tokens.start
                    continue
                told = said[request]
                assert told.start == tokens.start, f"seed {seed}: {request} told {told}, made {tokens}"
                assert bool(told) == bool(tokens), f"seed {seed}: {request} told {told}, made {tokens}"
                assert tokens.stop <= told.stop <= tokens.start + (WIDEST if speculative else 1)
            iterations += bool(made)
        ended.update(requests.on_idle())
        assert ended == {f"r{i}": rollout.truth[f"r{i}"] for i in range(9)}
    assert iterations > 1000


def test_speculation_waits_for_the_device_near_the_window_only() -> None:
    req = make_request("lead", 10, most=1000)
    req.output_ids = [7] * 100
    result = make_result([7] * WIDEST, [3])
    flying = make_batch("DECODE", [req], None)
    for start, waits in ((0, False), (90, False), (105, True), (107, True), (108, False)):
        result.waited.clear()
        requests = SglangRequests(
            (TokenWindow(start, start + 5),),
            speculative=True,
            tokens_per_iteration=WIDEST,
            in_flight=lambda: [(flying, result)],
        )
        running, _ = requests.advance(make_batch("DECODE", [req], None))
        assert running is not None
        assert running["lead"] == (range(103, 107) if waits else range(101, 108))
        assert bool(result.waited) == waits


def test_one_request_is_followed_at_a_constant_cost() -> None:
    looks = 0

    class Watched(list[Any]):
        def __iter__(self) -> Any:
            nonlocal looks
            looks += 1
            return super().__iter__()

    reqs = Watched(make_request(f"r{i}", 10) for i in range(256))
    requests = SglangRequests((TokenWindow(50, 60),))
    for token in range(40):
        running, ended = requests.advance(make_batch("DECODE", reqs, [10 + token] * 256))
        assert running is not None
        assert running.get("r200") == range(token, token + 1)
        assert running.get("elsewhere") is None
        assert not ended
    assert looks == 2, "the batch is gone through once for each name"

    reqs[200].finished_reason = "stop"
    reqs[200].output_ids = [7] * 40
    _, ended = requests.advance(make_batch("DECODE", Watched(reqs[:200] + reqs[201:]), [50] * 255))
    assert ended == {"r200": 40}


def test_end_of_a_request_that_nobody_follows_is_not_looked_for() -> None:
    reqs = [make_request("lead", 4), make_request("other", 4)]
    requests = SglangRequests((TokenWindow(50, 60),))
    for _ in range(3):
        running, _ = requests.advance(make_batch("DECODE", reqs, [5, 5]))
        assert running is not None
        assert running["lead"] == range(1, 2)
    for req in reqs:
        req.finished_reason = "abort"
    assert requests.on_idle() == {"lead": 0}


def test_members_that_change_in_place_are_noticed() -> None:
    reqs = [make_request("a", 4), make_request("b", 4)]
    requests = SglangRequests((TokenWindow(50, 60),))
    running, _ = requests.advance(make_batch("DECODE", reqs, [5, 6]))
    assert running is not None
    assert (running.get("c"), running["b"]) == (None, range(2, 3))
    reqs.pop(0)
    reqs.append(make_request("c", 4))
    running, _ = requests.advance(make_batch("DECODE", reqs, [7, 8]))
    assert running is not None
    assert dict(running) == {"b": range(3, 4), "c": range(4, 5)}


@pytest.mark.parametrize("dropped", [True, False])
def test_a_lead_that_is_aborted_while_it_waits_gives_way(dropped: bool) -> None:
    window = TokenWindow(50, 54)
    gate = LeadGate([window])
    first, second = make_request("a", 4, 200), make_request("b", 4, 200)
    waiting: list[Any] = []
    requests = SglangRequests([window], is_known=lambda req: any(one is req for one in waiting))
    rows = []
    for iteration in range(200):
        if iteration == 20:  # retracted
            waiting.append(first)
        if iteration == 25 and dropped:
            waiting.clear()  # aborted: no reason is written down anywhere
        reqs = [second] if iteration >= 20 else [first, second]
        running, ended = requests.advance(
            make_batch("DECODE", reqs, [len(req.origin_input_ids) + len(req.output_ids) for req in reqs])
        )
        assert running is not None
        row = gate.step(running, ended).iteration
        if row is not None:
            rows.append((row.request, row.lo))
        for req in reqs:
            req.output_ids.append(7)
    assert rows == ([("b", token) for token in range(50, 54)] if dropped else [])


def test_health_checks_and_warm_up_are_no_requests() -> None:
    artificial = [make_request(f"{HEALTH_CHECK}_17", 1), make_request(f"{WARM_UP}ab", 3)]
    requests = SglangRequests((TokenWindow(0, None),))
    assert requests.advance(make_batch("EXTEND", artificial, [1, 3])) == (None, {})
    running, _ = requests.advance(make_batch("EXTEND", [*artificial, make_request("real", 5)], [1, 3, 5]))
    assert isinstance(running, SglangBatch)
    assert (len(running), dict(running)) == (1, {"real": range(1)})
    assert running.get(f"{WARM_UP}ab") is None


def test_stop_token_in_flight_makes_the_opening_iteration_vain() -> None:
    req = make_request("lead", 10, ignore_eos=False)
    req.output_ids = [7] * 19
    flying = make_batch("DECODE", [make_request("x", 1), req], [2, 29])
    batch = make_batch("DECODE", [req], [30])
    for token, starts, made in ((EOS, 20, range(20, 20)), (EOS, 25, range(20, 21)), (9, 20, range(20, 21))):
        requests = SglangRequests(
            (TokenWindow(starts, 30),), in_flight=lambda token=token: [(flying, make_result([5, token]))]
        )
        running, _ = requests.advance(batch)
        assert running is not None
        assert running["lead"] == made


def test_stop_tokens_come_from_all_three_places() -> None:
    req = make_request("lead", 1)
    req.sampling_params.stop_token_ids = {11}
    req.tokenizer = SimpleNamespace(eos_token_id=12, additional_stop_token_ids={13})
    assert stop_tokens(req) == {EOS, 11, 12, 13}


def test_tokens_behind_a_stop_are_not_counted() -> None:
    req = make_request("lead", 1)
    req.output_ids = [7] * 9
    assert final_count(req) == 9
    req.finished_len = 7
    assert final_count(req) == 7


def test_an_encoder_keeps_part_of_the_prompt() -> None:
    batch = make_batch("DECODE", [make_request("lead", 10)], [8])
    batch.encoder_lens_cpu = [6]
    running, _ = SglangRequests((TokenWindow(0, 9),)).advance(batch)
    assert running is not None
    assert running["lead"] == range(4, 5)
