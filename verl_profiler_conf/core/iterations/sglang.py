"""SGLang: `start_step` (S) and `num_steps` (N) of a start_profile request, counted by the scheduler.

`run_batch` adds 1 to `forward_ct`, tests for the end, tests for the start, then runs the forward. S is compared with
`forward_ct`, which counts from the start of the scheduler and is never reset: with c forwards before the request,
recording begins with iteration `max(S - c - 1, 0)` after it and lasts N iterations. S = 0 counts as absent, N = 0 as no
limit. (managers/scheduler.py up to 0.4.9, scheduler_profiler_mixin.py to 0.5.12, then
scheduler_components/profiler_manager.py.)
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from packaging.version import Version

from verl_profiler_conf.core.iterations.result import Counters, EngineFit, IterationSpan
from verl_profiler_conf.core.iterations.versions import since
from verl_profiler_conf.core.releases import SGLANG

START = "start_step"
NUM = "num_steps"
OLDEST = SGLANG.counters_since
NEWEST = SGLANG.newest
WORKER_KINDS = ("gpu", "cpu", "xpu", "npu", "tpu")
"""The scheduler counts, so that the kind of worker makes no difference."""


@dataclass(frozen=True)
class Counting:
    """How a range of versions counts.

    Attributes:
        has_start: whether start_profile knows `start_step`.
        lost: iterations by which `num_steps` falls short when `start_step` is not given.
        threaded: whether the overlap schedule runs forwards in a thread of their own, so that a boundary drawn by the
            scheduler's thread may be off by one batch.
        takes_object: whether `TokenizerManager.start_profile` takes one `ProfileReq` instead of keywords.
    """

    has_start: bool
    lost: int
    threaded: bool
    takes_object: bool


_COUNTING: tuple[tuple[str, Counting], ...] = (
    (OLDEST, Counting(has_start=False, lost=1, threaded=True, takes_object=False)),
    ("0.4.9.post2", Counting(has_start=True, lost=1, threaded=True, takes_object=False)),
    ("0.5.4", Counting(has_start=True, lost=1, threaded=False, takes_object=False)),
    ("0.5.15", Counting(has_start=True, lost=1, threaded=False, takes_object=True)),
    ("0.5.16", Counting(has_start=True, lost=0, threaded=False, takes_object=True)),
)


def counting(version: Version) -> Counting:
    return since(_COUNTING, version)


def counters(span: IterationSpan, version: Version, worker: str | None, forward_count: int | None) -> EngineFit:  # noqa: ARG001
    rules = counting(version)
    slop = (-1, 1) if rules.threaded and not span.is_whole else (0, 0)
    if not rules.has_start:
        return _from_now(span, version, rules, slop)
    if span.first == 0 or (span.from_start and forward_count is None):
        # start_step=1 has always passed by the time of the call: "from now on", for exactly num_steps on every version.
        # Unlike an absolute step it does not depend on what ran before; chunks of the prompt come along
        return EngineFit(
            {START: 1, NUM: span.stop},
            "start_step=1 records from the next forward on, whatever ran before",
            (),
            None,
            slop,
        )
    before = forward_count or 0
    unknown = ("no forward has run before start_profile (forward_count unknown)",) if forward_count is None else ()
    step = before + span.first + 1
    return EngineFit(
        {START: step, NUM: span.length},
        f"start_step counts every forward since the scheduler began, so iteration {span.first} after {before} others"
        f" is step {step}",
        unknown,
        None,
        slop,
    )


def _from_now(span: IterationSpan, version: Version, rules: Counting, slop: tuple[int, int]) -> EngineFit:
    if not span.from_start:
        obstacle = f"SGLang {version} has no start_step and records from the call on"
        return EngineFit({START: None, NUM: None}, obstacle, obstacle=obstacle)
    if span.stop is None:
        return EngineFit({START: None, NUM: None}, "everything from start_profile to stop_profile is recorded")
    reason = f"SGLang {version} stops {rules.lost} iteration early, so num_steps is that much more"
    return EngineFit({START: None, NUM: span.stop + rules.lost}, reason, (), None, slop)


def iterations(values: Counters, version: Version, worker: str | None, forward_count: int) -> range:  # noqa: ARG001
    """Iterations since start_profile that are recorded; `stop` is `sys.maxsize` when there is no end."""
    rules = counting(version)
    step = (values.get(START) or 0) if rules.has_start else 0
    length = values.get(NUM) or 0
    first = max(step - forward_count - 1, 0)
    if not length:
        return range(first, sys.maxsize)
    return range(first, first + length - (0 if step else rules.lost))
