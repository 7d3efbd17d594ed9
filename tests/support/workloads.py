"""What the end-to-end tests run, as data, in words that each engine's driver translates into its own options.

Every workload names the configuration that it needs (`Build`); engines are built once per configuration and reused, so
keep the number of different ones small.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Build:
    """How the engine is started."""

    overlap: bool = True
    """Schedule the next batch while one runs (vLLM: async scheduling; SGLang: overlap schedule)."""
    token_budget: int | None = None
    """Tokens of prompts that one iteration takes at most; None: the engine's default."""
    max_running: int | None = None
    """Requests that run at once; the others wait."""
    speculation: str | None = None
    """`ngram` or `draft`; None: none."""
    prefix_caching: bool = False
    kv_tokens: int | None = None
    """Room for so many tokens in the KV cache: too few, and requests are preempted. None: plenty."""
    by_priority: bool = False
    """Requests with a lower priority number run first; those with a higher one are preempted first."""


@dataclass(frozen=True)
class Workload:
    """Requests, and the window to capture.

    Attributes:
        prompts: prompt length of each request.
        responses: response length of each, which it reaches exactly (no end-of-sequence).
        settings: of the profiler, keys as in the config.
        arrivals: before which engine step each request arrives; empty: all at once, before the first.
        priorities: of each request; empty: all alike.
        shared_prefix: so many first tokens of all prompts are the same.
        repetitive: prompts repeat themselves, so that n-gram speculation finds something.
        rounds: how often the requests are run; under `arm: request` each is bracketed by start and stop.
    """

    name: str
    settings: dict[str, Any]
    prompts: tuple[int, ...] = (16,) * 8
    responses: tuple[int, ...] = (48,) * 8
    build: Build = field(default_factory=Build)
    arrivals: tuple[int, ...] = ()
    priorities: tuple[int, ...] = ()
    shared_prefix: int = 0
    repetitive: bool = False
    rounds: int = 1

    def __str__(self) -> str:
        return self.name


def window(start: int | None, end: int | None, **more: Any) -> dict[str, Any]:
    return {"profile_token_start": start, "profile_token_end": end, **more}


PLAIN = Build()
SMALL_BUDGET = Build(token_budget=64)
FOUR_AT_A_TIME = Build(max_running=4)
CACHED = Build(prefix_caching=True)
TIGHT = Build(kv_tokens=320, token_budget=256, by_priority=True)
NGRAM = Build(overlap=False, speculation="ngram")
NO_OVERLAP = Build(overlap=False, token_budget=64)
DRAFT = Build(speculation="draft")

WORKLOADS = (
    Workload("lockstep", window(20, 30)),
    Workload("from_zero", window(0, 1)),
    Workload("to_the_end", window(40, None)),
    Workload("staggered", window(20, 30), arrivals=(0, 3, 3, 7, 11, 20, 25, 30)),
    Workload("early_ends", window(20, 30), responses=(8, 12, 48, 25, 48, 9, 30, 31)),
    Workload("two_windows", {"profile_token_windows": [[4, 8], [30, 34]]}),
    Workload("two_rounds", window(20, 30, arm="request"), rounds=2),
    Workload("unreached", window(100, 120)),
    Workload("any_staggered", window(20, 24, track="any"), arrivals=(0, 0, 0, 2, 2, 30, 30, 30)),
    Workload("all_lockstep", window(20, 24, track="all"), arrivals=(0, 0, 0, 2, 2, 2, 2, 2)),
    Workload("chunked", window(20, 30), prompts=(50, 60, 70, 80, 90, 100, 110, 120), build=SMALL_BUDGET),
    Workload("long_prompt", window(20, 30), prompts=(600,), responses=(48,), build=SMALL_BUDGET),
    Workload("chunked_no_overlap", window(20, 30), prompts=(50, 60, 70, 80, 90, 100, 110, 120), build=NO_OVERLAP),
    Workload("waves", window(20, 30), prompts=(16,) * 12, responses=(48,) * 12, build=FOUR_AT_A_TIME),
    Workload(
        "prefix_cached",
        window(0, 6, arm="request"),
        prompts=(160,) * 4,
        responses=(24,) * 4,
        build=CACHED,
        shared_prefix=128,
        rounds=2,
    ),
    Workload("preempted_others", window(20, 70), prompts=(40,) * 6, responses=(80,) * 6, build=TIGHT),
    Workload(
        "preempted_lead",
        window(20, 70),
        prompts=(40,) * 6,
        responses=(80,) * 6,
        arrivals=(0, 2, 2, 2, 2, 2),
        priorities=(9, 0, 0, 0, 0, 0),
        build=TIGHT,
    ),
    Workload("ngram", window(20, 30), build=NGRAM, repetitive=True),
    Workload("ngram_waves", window(10, 20), prompts=(16,) * 4, responses=(30, 9, 24, 40), build=NGRAM, repetitive=True),
    Workload("draft", window(20, 30), build=DRAFT),
    Workload("skip_rounds", window(20, 30, skip_captures=1), rounds=2),
    Workload("skip_any", window(20, 24, track="any", skip_captures=1), arrivals=(0, 0, 0, 2, 2, 30, 30, 30)),
    Workload(
        "skip_waves",
        window(20, 30, arm="request", skip_captures=1),
        prompts=(16,) * 12,
        responses=(48,) * 12,
        build=FOUR_AT_A_TIME,
        rounds=2,
    ),
    Workload("skip_ngram", window(20, 30, skip_captures=1), build=NGRAM, repetitive=True, rounds=2),
)
