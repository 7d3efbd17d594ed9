"""A window -> counters, by what is known about the run; and counters -> what they capture."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from packaging.version import Version

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.iterations import sglang, trtllm, vllm
from verl_profiler_conf.core.iterations.result import (
    CANNOT,
    EXACT,
    CounterPlan,
    Counters,
    EngineFit,
    Fit,
    IterationSpan,
)
from verl_profiler_conf.core.iterations.versions import release
from verl_profiler_conf.core.numbers import is_integer
from verl_profiler_conf.core.window import MAX_TOKEN, TokenWindow


@dataclass(frozen=True)
class _Engine:
    counters: Callable[[IterationSpan, Version, str | None, int | None], EngineFit]
    iterations: Callable[[Counters, Version, str | None, int], range]
    oldest: str
    newest: str
    workers: tuple[str, ...]


ENGINES = {
    "vllm": _Engine(vllm.counters, vllm.iterations, vllm.OLDEST, vllm.NEWEST, vllm.WORKER_KINDS),
    "sglang": _Engine(sglang.counters, sglang.iterations, sglang.OLDEST, sglang.NEWEST, sglang.WORKER_KINDS),
    "tensorrt_llm": _Engine(trtllm.counters, trtllm.iterations, trtllm.OLDEST, trtllm.NEWEST, trtllm.WORKER_KINDS),
}


def plan(
    window: TokenWindow,
    *,
    engine: str,
    version: str | None = None,
    worker: str | None = None,
    prompt_tokens: int | None = None,
    max_num_batched_tokens: int | None = None,
    num_speculative_tokens: int | None = None,
    forward_count: int | None = None,
) -> CounterPlan:
    """The engine's own counters for a window, and how well they hold it.

    The answer is about a request that is scheduled in the first iteration after start_profile and in each one from then
    on. Requests that arrive or are admitted later, or are preempted, are that many iterations behind.

    Args:
        engine: `vllm`, `sglang` or `tensorrt_llm`.
        version: version of the engine (or of vllm-ascend); None: unknown, counts as the newest.
        worker: kind of device worker: `gpu`, `cpu`, `xpu`, `npu`, `tpu`; None: `gpu`.
        prompt_tokens: length of the prompt; None: unknown, taken to fit into one iteration.
        max_num_batched_tokens: tokens an iteration may compute (SGLang: `chunked_prefill_size`), which makes a prompt
            take `ceil(prompt_tokens / max_num_batched_tokens)` iterations, when the request is alone and nothing of its
            prompt is cached; None: as above.
        num_speculative_tokens: most draft tokens that an iteration verifies; None: unknown, taken to be 0.
        forward_count: iterations that the engine has run before the start call (SGLang, TensorRT-LLM); None: unknown.

    Raises:
        ConfigError: an engine or worker that is not known, or a number that cannot be.
    """
    facts = _engine(engine)
    _check_worker(worker, engine, facts)
    _check("prompt_tokens", prompt_tokens, 1)
    _check("max_num_batched_tokens", max_num_batched_tokens, 1)
    _check("num_speculative_tokens", num_speculative_tokens, 0)
    _check("forward_count", forward_count, 0)
    found = release(version, engine=engine, oldest=facts.oldest, newest=facts.newest)
    assumes = list(found.assumes)
    prefill = 0
    whole = window.start == 0 and window.end is None
    if prompt_tokens is not None and max_num_batched_tokens is not None:
        prefill = -(-prompt_tokens // max_num_batched_tokens) - 1
    elif not whole:
        assumes.append("the whole prompt is computed in one iteration")
    span = IterationSpan(
        prefill + window.start, None if window.end is None else prefill + window.end, from_start=window.start == 0
    )
    answer = facts.counters(span, found.version, worker, forward_count)
    reason = answer.obstacle
    # token 0 comes out of the prompt's last forward, which has no drafts to verify: both its edges are certain
    if reason is None and not (window.start <= 1 and window.end in (1, None)):
        if num_speculative_tokens:
            reason = (
                f"an iteration makes 1 to {num_speculative_tokens + 1} tokens with {num_speculative_tokens} drafted,"
                " so no count of iterations says where a token is made"
            )
        elif num_speculative_tokens is None:
            assumes.append("no tokens are drafted")
    if reason is not None:
        return CounterPlan(engine, str(found.version), answer.values, CANNOT, reason, found.assumes, prefill)
    fit = EXACT if answer.slop == (0, 0) else Fit("shifted", *answer.slop)
    assumed = (*assumes, *answer.assumes)
    return CounterPlan(engine, str(found.version), answer.values, fit, answer.reason, assumed, prefill)


def captured_iterations(
    engine: str, version: str | None, counters: Counters, *, worker: str | None = None, forward_count: int = 0
) -> range:
    """Iterations, counted from 0 since start_profile, that the engine records with these counters.

    `stop` is `sys.maxsize` when recording lasts until stop_profile.
    """
    facts = _engine(engine)
    _check_worker(worker, engine, facts)
    found = release(version, engine=engine, oldest=facts.oldest, newest=facts.newest)
    return facts.iterations(counters, found.version, worker, forward_count)


def captured(
    engine: str,
    version: str | None,
    counters: Counters,
    prefill_iteration: int = 0,
    *,
    worker: str | None = None,
    forward_count: int = 0,
) -> range:
    """Response tokens that the engine records with these counters: the inverse of `plan`.

    Args:
        counters: as in `CounterPlan.values`; a counter that is missing or None counts as unset.
        prefill_iteration: iteration since start_profile that makes token 0 of the request in question, which then makes
            one token in each iteration.
        forward_count: iterations that the engine has run before the start call.

    Returns:
        Token indices; empty when none is recorded, and with `stop == MAX_TOKEN + 1` when recording has no end.
    """
    recorded = captured_iterations(engine, version, counters, worker=worker, forward_count=forward_count)
    first = max(recorded.start - prefill_iteration, 0)
    stop = MAX_TOKEN + 1 if recorded.stop == sys.maxsize else recorded.stop - prefill_iteration
    return range(first, max(stop, first))


def _engine(name: str) -> _Engine:
    if name not in ENGINES:
        raise ConfigError("engine.name", name, f"must be one of {', '.join(ENGINES)}")
    return ENGINES[name]


def _check_worker(worker: str | None, engine: str, facts: _Engine) -> None:
    if worker is not None and worker not in facts.workers:
        raise ConfigError("engine.worker", worker, f"must be one of {', '.join(facts.workers)} for {engine}, or null")


def _check(name: str, value: object, least: int) -> None:
    if value is not None and (not is_integer(value) or value < least):
        raise ConfigError(f"engine.{name}", value, f"must be an integer of at least {least}, or null")
