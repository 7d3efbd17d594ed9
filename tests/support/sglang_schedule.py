"""SGLang's own books, kept on random schedules as its scheduler keeps them: results are processed one iteration late
under overlap, speculation accepts what it likes, requests are retracted and refilled."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from verl_profiler_conf.engines.sglang.requests import SglangRequests

WIDEST = 4
EOS = 2


class Mode:
    def __init__(self, name: str) -> None:
        self.name = name

    def is_decode(self) -> bool:
        return self.name == "DECODE"

    def is_prebuilt(self) -> bool:
        return self.name == "PREBUILT"


@functools.cache
def mode_of(name: str) -> Mode:
    """One of each kind, as the members of SGLang's enumeration are."""
    return Mode(name)


def make_request(rid: str, prompt: int, most: int = 64, *, ignore_eos: bool = True) -> Any:
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=[5] * prompt,
        output_ids=[],
        finished_reason=None,
        finished_len=None,
        tokenizer=None,
        eos_token_ids={EOS},
        sampling_params=SimpleNamespace(max_new_tokens=most, stop_token_ids=None, ignore_eos=ignore_eos),
    )


def make_batch(mode: str, reqs: list[Any], lengths: list[int] | None, decoding: list[Any] | None = None) -> Any:
    return SimpleNamespace(
        reqs=reqs, forward_mode=mode_of(mode), seq_lens_cpu=lengths, encoder_lens_cpu=None, decoding_reqs=decoding
    )


def make_result(tokens: list[int], accepted: list[int] | None = None) -> Any:
    waited: list[bool] = []
    return SimpleNamespace(
        next_token_ids=tokens,
        accept_lens=accepted,
        waited=waited,
        copy_done=SimpleNamespace(synchronize=lambda: waited.append(True)),
    )


class Rollout:
    """A scheduler's books, and the truth beside them."""

    def __init__(
        self, seed: int, *, overlap: bool, speculative: bool, longest: int = 60, retracts: float = 0.05
    ) -> None:
        self.draw = random.Random(seed)
        self.retracts = retracts
        self.overlap = overlap
        self.speculative = speculative
        self.in_flight: deque[tuple[Any, Any]] = deque()
        self.waiting = [
            make_request(f"r{i}", self.draw.randrange(1, 40), self.draw.randrange(1, longest)) for i in range(9)
        ]
        self.filled = {req.rid: 0 for req in self.waiting}
        """Prompt (and refill) tokens computed."""
        self.truth = {req.rid: 0 for req in self.waiting}
        """Response tokens made, in flight included."""
        self.running: list[Any] = []
        self.dropped: set[str] = set()
        """Retracted with a token in flight: it is thrown away."""

    def step(self, requests: SglangRequests) -> tuple[dict[str, range], dict[str, range], dict[str, int | None]] | None:
        """One iteration: what the requests said, what came of it, and who they said had ended; None at the end."""
        said: dict[str, range] = {}
        gone: dict[str, int | None] = {}

        def look(batch: Any) -> None:
            running, ended = requests.advance(batch)
            assert running is not None
            said.update(running.items())
            gone.update(ended)

        made = self.run(look)
        return None if made is None else (said, made, gone)

    def run(self, look: Callable[[Any], object]) -> dict[str, range] | None:
        """One iteration, shown to `look` before it runs: what came of it, None at the end."""
        self.running = [req for req in self.running if req.finished_reason is None]
        if self.running and self.draw.random() < self.retracts:
            req = self.running.pop(self.draw.randrange(len(self.running)))
            self.waiting.insert(0, req)
            self.filled[req.rid] = 0
            self.truth[req.rid] = len(req.output_ids)
            if self.in_flight:
                self.dropped.add(req.rid)
            batch, counts = self.plan_decode() if self.running else (None, {})  # refilled in a later iteration
        else:
            batch, counts = self.plan()
        if batch is None:
            if not self.in_flight and not self.waiting:
                return None
            if self.in_flight:
                self.process()
            return {}
        look(batch)
        made = {}
        for req in batch.reqs:
            before = self.truth[req.rid]
            count = min(counts[req.rid], max(req.sampling_params.max_new_tokens - before, 0))
            made[req.rid] = range(before, before + count)
            self.truth[req.rid] = before + count
        accepted = [max(counts[req.rid], 1) for req in batch.reqs] if self.speculative else None
        kept = SimpleNamespace(**{**vars(batch), "reqs": list(batch.reqs)})
        self.in_flight.append((kept, make_result([7] * len(batch.reqs), accepted)))
        kept.made = made
        if len(self.in_flight) > self.overlap:
            self.process()
        return made

    def plan(self) -> tuple[Any, dict[str, int]]:
        if self.waiting and self.draw.random() < 0.4:
            return self.plan_prompts()
        if not self.running:
            return self.plan_prompts() if self.waiting else (None, {})
        return self.plan_decode()

    def plan_decode(self) -> tuple[Any, dict[str, int]]:
        lengths = [len(req.origin_input_ids) + self.truth[req.rid] for req in self.running]
        if not self.speculative:
            return make_batch("DECODE", self.running, lengths), {req.rid: 1 for req in self.running}
        counts = {req.rid: self.draw.randrange(1, WIDEST + 1) for req in self.running}
        lagging = None if self.draw.random() < 0.5 else [length - 1 for length in lengths]
        return make_batch("DECODE", self.running, lagging), counts

    def plan_prompts(self) -> tuple[Any, dict[str, int]]:
        reqs, lengths, counts = [], [], {}
        for req in self.waiting[: self.draw.randrange(1, 3)]:
            self.dropped.discard(req.rid)
            whole = len(req.origin_input_ids) + len(req.output_ids)
            chunk = self.draw.randrange(1, 30)
            self.filled[req.rid] = min(self.filled[req.rid] + chunk, whole)
            reqs.append(req)
            lengths.append(self.filled[req.rid])
            counts[req.rid] = int(self.filled[req.rid] == whole)
        for req in reqs:
            if counts[req.rid]:
                self.waiting.remove(req)
        mixed = not self.speculative and self.running and self.draw.random() < 0.5
        decoding = list(self.running) if mixed else None
        for req in decoding or []:
            reqs.append(req)
            lengths.append(len(req.origin_input_ids) + self.truth[req.rid])
            counts[req.rid] = 1
        begun = [req for req in reqs if counts[req.rid] and req not in self.running]
        batch = make_batch("MIXED" if mixed else "EXTEND", reqs, lengths, decoding)
        self.running = self.running + begun
        return batch, counts

    def process(self) -> None:
        batch, _ = self.in_flight.popleft()
        for req in batch.reqs:
            if req.finished_reason is None and req.rid not in self.dropped:
                req.output_ids.extend([7] * len(batch.made[req.rid]))
                if len(req.output_ids) >= req.sampling_params.max_new_tokens:
                    req.finished_reason = "length"
