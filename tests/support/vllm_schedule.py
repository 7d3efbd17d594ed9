"""A scheduler that schedules at random, counting as vLLM's does, for releases whose engines cannot run here.

What it tells the worker is built by the release's own code: its SchedulerOutput classes, and its scheduler's
`_make_cached_request_data`. What each iteration really makes is decided here, beside it.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import MISSING, dataclass, field, fields
from types import SimpleNamespace
from typing import Any

from own_sources import own_class, own_source

from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.engines.vllm.requests import VllmRequests

OUTPUT = "vllm/v1/core/sched/output.py"
SCHEDULER = "vllm/v1/core/sched/scheduler.py"
DRAFTS = 3
STOP = 2
"""The token id that ends a request."""

EVERYWHERE = (TokenWindow(0, None),)
"""A window that every token is near to."""


@dataclass
class Release:
    """The classes of one release."""

    version: str
    output: type
    new: type
    cached: type
    scheduler: type


def load(version: str) -> Release:
    """From the release's own text."""
    texts = own_source("vllm", version, OUTPUT, SCHEDULER)
    names: dict[str, Any] = {"bc_linter_include": lambda thing: thing, "deprecated": lambda _: lambda thing: thing}
    exec("from dataclasses import dataclass, field\nfrom functools import cached_property", names)  # noqa: S102
    new = own_class(texts[OUTPUT], "NewRequestData", names)
    cached = own_class(texts[OUTPUT], "CachedRequestData", names)
    names["CachedRequestData"] = cached
    output = own_class(texts[OUTPUT], "SchedulerOutput", names)
    scheduler = own_class(
        texts[SCHEDULER],
        "Scheduler",
        {"itertools": itertools, "CachedRequestData": cached},
        methods=["_make_cached_request_data"],
    )
    return Release(version, output, new, cached, scheduler)


def required(kind: type) -> list[str]:
    """Fields of a dataclass that have no default."""
    return [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]


@dataclass(eq=False)
class Request:
    """Counters named as in vLLM's Request."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    ends_at: int | None
    """The response token that is a stop token."""
    all_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    spec: int = 0
    in_flight: int = 0
    stale: int = 0
    ended: bool = False

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - len(self.prompt)


@dataclass
class Step:
    """One `execute_model`."""

    output: Any
    made: dict[str, range]
    """Response tokens that each request gets, so far as the worker samples them: a stop token may cut them later."""
    result: Any
    """What sampling returns."""
    prefills: set[str]


@dataclass(frozen=True)
class Pace:
    """How often things happen, as shares of the steps, and how long responses are."""

    preempts: float = 0.08
    pauses: float = 0.05
    admits: float = 0.6
    stops: float = 0.4
    longest: tuple[int, int] = (5, 40)
    to_the_end: bool = False
    """Whoever is preempted waits behind all others."""


LONG = Pace(preempts=0.02, pauses=0.003, admits=0.1, stops=0.3, longest=(20, 260), to_the_end=True)
"""Long responses, seldom disturbed."""


class RandomEngine:
    """Yields steps; the results of each are taken in one step late when `overlapped`.

    Args:
        release: whose classes to use.
        model_runner_v2: preempted requests come back as new ones.
    """

    def __init__(
        self,
        release: Release,
        seed: int,
        *,
        overlapped: bool,
        speculative: bool,
        model_runner_v2: bool = False,
        pace: Pace = Pace(),
    ) -> None:
        self.release = release
        self.pace = pace
        self.overlapped = overlapped
        self.speculative = speculative
        self.v2 = model_runner_v2
        self.draw = random.Random(seed)
        self.waiting = [self._request(number) for number in range(7)]
        self.longest = {
            request.request_id: request.max_tokens
            if request.ends_at is None
            else min(request.max_tokens, request.ends_at + 1)
            for request in self.waiting
        }
        self.ends = {request.request_id: request.ends_at for request in self.waiting}
        self.running: list[Request] = []
        self.finished: set[str] = set()
        self.finals: dict[str, int] = {}
        self.outputs: dict[str, int] = {}
        """What the worker itself has counted."""
        self.outputs_before: dict[str, int] = {}
        """The same, before the step that runs."""
        self.steps = 0
        self.previous: set[str] = set()
        self._unprocessed: list[tuple[dict[str, int], dict[str, int], dict[str, int]]] = []
        self.fake = release.scheduler.__new__(release.scheduler)
        self.fake.__dict__.update(
            use_pp=False,
            connector=None,
            use_v2_model_runner=model_runner_v2,
            scheduler_config=SimpleNamespace(async_scheduling=overlapped),
        )

    def _request(self, number: int) -> Request:
        longest = self.draw.randrange(*self.pace.longest)
        ends = self.draw.randrange(2, longest) if self.draw.random() < self.pace.stops else None
        prompt = [5] * self.draw.randrange(1, 60)
        request = Request(f"r{number}", prompt, longest, ends)
        request.all_token_ids = list(prompt)
        return request

    def __iter__(self) -> Any:
        while self.waiting or self.running or self.finished or self._unprocessed:
            step = self._schedule()
            yield step
            while len(self._unprocessed) > self.overlapped or (self._unprocessed and not step.made):
                self._process(*self._unprocessed.pop(0))
            self.steps += 1
            assert self.steps < 20000

    def limit(self, request: str) -> int:
        """Response tokens that a request gets, its stop token included, also while only the device knows of it."""
        return self.finals.get(request, self.longest[request])

    def _schedule(self) -> Step:
        budget = 48
        preempts = bool(self.running) and self.draw.random() < self.pace.preempts
        if preempts:
            self._preempt(self.draw.choice(self.running))
        scheduled: dict[str, int] = {}
        spec: dict[str, list[int]] = {}
        running, resumed, new = [], [], []
        pauses = self.draw.random() < self.pace.pauses  # an output without a forward, as while a transfer is waited for
        for request in self.running:
            tokens = self._wanted(request, budget)
            if tokens and not pauses:
                budget -= tokens
                scheduled[request.request_id] = tokens
                running.append(request)
        closed = preempts or pauses  # vLLM lets nobody in while it preempts
        while (
            self.waiting and not closed and len(self.running) < 4 and budget and self.draw.random() < self.pace.admits
        ):
            request = self.waiting.pop(0)
            tokens = min(len(request.all_token_ids) - request.num_computed_tokens, budget)
            budget -= tokens
            scheduled[request.request_id] = tokens
            self.running.append(request)
            came_before = request.request_id in self.outputs
            (resumed if came_before and not self.v2 else new).append(request)
        for request in running:
            known = len(request.all_token_ids) + request.num_output_placeholders
            drafts = max(request.num_computed_tokens + scheduled[request.request_id] - known, 0)
            if drafts:
                spec[request.request_id] = [-1] * drafts
        output = self._output(scheduled, spec, running, resumed, new)
        made, accepted = self._run(scheduled, spec)
        return Step(output, made, self._result(accepted, made), {r for r, m in made.items() if not m})

    def _wanted(self, request: Request, budget: int) -> int:
        if (
            request.num_output_placeholders
            and request.num_computed_tokens + 2 - request.num_output_placeholders
            >= len(request.prompt) + request.max_tokens
        ):
            return 0  # it will have all it can get
        known = len(request.all_token_ids) + request.num_output_placeholders + request.spec
        return min(known - request.num_computed_tokens, budget)

    def _output(
        self, scheduled: dict[str, int], spec: dict[str, list[int]], running: Any, resumed: Any, new: Any
    ) -> Any:
        blocks = dict.fromkeys(scheduled, SimpleNamespace(get_block_ids=lambda allow_none: None))
        self.fake.prev_step_scheduled_req_ids = self.previous
        self.previous = set(scheduled)
        output = self.release.output(**dict.fromkeys(required(self.release.output)))
        output.scheduled_cached_reqs = self.fake._make_cached_request_data(running, resumed, scheduled, spec, blocks)
        output.scheduled_new_reqs = [self._new(request) for request in new]
        output.num_scheduled_tokens = scheduled
        output.total_num_scheduled_tokens = sum(scheduled.values())
        output.scheduled_spec_decode_tokens = spec
        output.finished_req_ids, self.finished = self.finished, set()
        return output

    def _new(self, request: Request) -> Any:
        more = {"prefill_token_ids": list(request.all_token_ids)} if self.v2 else {}
        self.outputs.setdefault(request.request_id, 0)
        return self.release.new(
            req_id=request.request_id,
            prompt_token_ids=request.prompt,
            mm_features=[],
            sampling_params=SimpleNamespace(max_tokens=request.max_tokens, all_stop_token_ids={STOP}),
            pooling_params=None,
            block_ids=(),
            num_computed_tokens=request.num_computed_tokens,
            lora_request=None,
            **more,
        )

    def _run(self, scheduled: dict[str, int], spec: dict[str, list[int]]) -> tuple[dict[str, range], dict[str, int]]:
        made: dict[str, range] = {}
        accepted: dict[str, int] = {}
        for request in self.running:
            name = request.request_id
            if name not in scheduled:
                continue
            known = len(request.all_token_ids) + request.num_output_placeholders
            drafts = len(spec.get(name, ()))
            request.num_computed_tokens += scheduled[name]
            request.in_flight += 1
            request.spec = 0
            if request.num_computed_tokens < known:
                accepted[name] = 0
                made[name] = range(self.outputs[name], self.outputs[name])
                continue
            taken = self.draw.randrange(drafts + 1) if drafts else 0
            accepted[name] = 1 + taken
            made[name] = range(self.outputs[name], self.outputs[name] + 1 + taken)
            self.outputs[name] += 1 + taken
            if self.overlapped:
                request.num_output_placeholders += 1 + drafts
            if self.speculative:
                request.spec = DRAFTS if self.overlapped else self.draw.randrange(DRAFTS + 1)
        drafted = {name: len(tokens) for name, tokens in spec.items()}
        self._unprocessed.append((dict(scheduled), accepted, drafted))
        return made, accepted

    def _process(self, scheduled: dict[str, int], accepted: dict[str, int], drafted: dict[str, int]) -> None:
        everyone = {request.request_id: request for request in [*self.running, *self.waiting]}
        for name in scheduled:
            request = everyone.get(name)
            if request is None:
                continue  # it ended meanwhile
            request.in_flight -= 1
            stale = request.stale > 0
            request.stale -= stale
            count = accepted[name]
            if name in drafted and count and not stale:
                rejected = drafted[name] + 1 - count
                request.num_computed_tokens -= rejected
                if self.overlapped:
                    request.num_output_placeholders -= rejected
            self._append(request, count, stale)

    def _append(self, request: Request, count: int, stale: bool) -> None:
        for index in range(count):
            at = request.num_output_tokens
            request.all_token_ids.append(STOP if at == request.ends_at else 7)
            if at == request.ends_at or at + 1 == request.max_tokens:
                count = index + 1
                self.finals[request.request_id] = at + 1
                self.finished.add(request.request_id)
                for queue in (self.running, self.waiting):
                    if request in queue:
                        queue.remove(request)
                break
        if self.overlapped and not stale:
            request.num_output_placeholders -= count

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.waiting.insert(len(self.waiting) if self.pace.to_the_end else 0, request)
        request.num_computed_tokens = request.num_output_placeholders = request.spec = 0
        request.stale = request.in_flight

    def _result(self, accepted: dict[str, int], made: dict[str, range]) -> Any:
        """As the V1 model runner returns it: at once, or on its way from the device."""
        by_name = {request.request_id: request for request in self.running}
        rows = []
        for name, tokens in made.items():
            row = [STOP if at == by_name[name].ends_at else 7 for at in tokens]
            rows.append(row)
        names = {name: index for index, name in enumerate(made)}
        if not self.overlapped:
            return SimpleNamespace(sampled_token_ids=rows, req_id_to_index=names)
        padded = [Row(row + [-1] * (1 + DRAFTS - len(row))) for row in rows]
        return SimpleNamespace(
            _model_runner_output=SimpleNamespace(req_id_to_index=names),
            async_copy_ready_event=SimpleNamespace(synchronize=lambda: None),
            sampled_token_ids_cpu=padded,
        )


class Row(list):  # type: ignore[type-arg]
    """A row of a tensor."""

    def tolist(self) -> list[int]:
        return list(self)


def follow(engine: RandomEngine, windows: tuple[TokenWindow, ...] = EVERYWHERE) -> VllmRequests:
    return VllmRequests(
        windows,
        in_flight=int(engine.overlapped),
        max_drafts=DRAFTS if engine.speculative else 0,
        max_model_len=1024,
        count_outputs=engine.outputs_before.get,
    )
