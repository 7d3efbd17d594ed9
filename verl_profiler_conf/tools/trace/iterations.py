"""The iterations that a trace names: this package's own ranges, vLLM's, SGLang's, or the profiler's steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Source = Literal["response_tokens", "vllm", "sglang", "profiler_step"]
Phase = Literal["prefill", "decode", "mixed"]

PREFERENCE: tuple[Source, ...] = ("response_tokens", "vllm", "sglang", "profiler_step")
"""Kinds of ranges that can be the iterations. A trace with several kinds counts by the first of them."""

MAX_RANGES = 50_000
"""More are not kept."""

_OWN = re.compile(r"response_tokens\[(\d{1,10}):(\d{1,10})\) iter=(\d{1,18}) reqs=(\d{1,10})(?!\d)")
_VLLM = re.compile(
    r"execute_(?:(?P<total>\d{1,10})_)?context_(?P<prefill>\d{1,10})\((?:sq)?(?P<prompt>\d{1,10})[^)]*\)"
    r"_generation_(?P<decode>\d{1,10})\((?:sq)?(?P<made>\d{1,10})[^)]*\)"
)
_VLLM_OLDER = re.compile(r"execute_new_(?P<prefill>\d{1,10})_cached_(?P<decode>\d{1,10})")
_SGLANG = re.compile(r"step\[(?P<mode>\w+) bs=(?P<size>\d{1,10})(?: toks=(?P<tokens>\d{1,10}))?[^\]]*\]")
_STEP = re.compile(r"ProfilerStep#(\d{1,18})")

_SGLANG_PHASES: dict[str, Phase] = {"EXTEND": "prefill", "DECODE": "decode", "VERIFY": "decode", "MIXED": "mixed"}
_SGLANG_PARTS = ("DRAFT", "IDLE")
"""Not iterations: what a draft model runs inside one, and what keeps idle ranks in step."""


@dataclass(frozen=True, slots=True)
class RangeName:
    """The parts of a range's name.

    Attributes:
        source: who wrote it.
        number: of the iteration, where the name holds one.
        lo: first response token that the tracked request made in it; None where the name does not say.
        hi: one past the last.
        requests: size of the batch.
        prefills: requests that ran their prompt.
        decodes: requests that made tokens from a finished prompt.
        phase: what the batch did; None where the name does not say.
    """

    source: Source
    number: int | None = None
    lo: int | None = None
    hi: int | None = None
    requests: int | None = None
    prefills: int | None = None
    decodes: int | None = None
    phase: Phase | None = None


@dataclass(frozen=True, slots=True)
class IterationRange:
    """An iteration on the host's clock: `begin_us` to `end_us` of the trace, on thread `thread`."""

    name: RangeName
    begin_us: float
    end_us: float
    thread: tuple[object, object] = (0, 0)


def parse_range(name: str) -> RangeName | None:
    """Read the name of a range. None where the name is that of no iteration."""
    for prefix, parse in _PARSERS:
        if name.startswith(prefix):
            return parse(name)
    return None


def _own(name: str) -> RangeName | None:
    match = _OWN.match(name)
    if match is None:
        return None
    lo, hi, number, requests = (int(group) for group in match.groups())
    phase: Phase | None = "prefill" if lo == 0 else "decode" if hi > lo else None  # no token of it: a gap
    return RangeName("response_tokens", number, lo, hi, requests, phase=phase)


def _vllm(name: str) -> RangeName | None:
    match = _VLLM.match(name) or _VLLM_OLDER.match(name)
    if match is None:
        return None
    prefills, decodes = int(match["prefill"]), int(match["decode"])
    if not prefills + decodes:
        return None  # vLLM also calls its workers with nothing to run
    return RangeName(
        "vllm",
        requests=prefills + decodes,
        prefills=prefills,
        decodes=decodes,
        phase=_phase(prefills, decodes),
    )


def _sglang(name: str) -> RangeName | None:
    match = _SGLANG.match(name)
    if match is None or match["mode"] in _SGLANG_PARTS:
        return None
    size = int(match["size"])
    return RangeName("sglang", requests=size, phase=_SGLANG_PHASES.get(match["mode"]))


def _step(name: str) -> RangeName | None:
    match = _STEP.match(name)
    return None if match is None else RangeName("profiler_step", int(match[1]))


_PARSERS: tuple[tuple[str, Callable[[str], RangeName | None]], ...] = (
    ("response_tokens[", _own),
    ("execute_", _vllm),
    ("step[", _sglang),
    ("ProfilerStep#", _step),
)


RANGE_PREFIXES = tuple(prefix for prefix, _ in _PARSERS)
"""What the name of an iteration's range begins with."""


def _phase(prefills: int, decodes: int) -> Phase | None:
    if prefills and decodes:
        return "mixed"
    return "prefill" if prefills else "decode" if decodes else None


def choose(ranges: Iterable[IterationRange], source: Source | None = None) -> list[IterationRange]:
    """The iterations, in the order they ran, without overlap: one kind of range, of the thread that has most of them.

    Where our own ranges are chosen and an engine's lie inside them, the engine's tell prefill from decode: a range of
    ours follows one request, the engine's counts all of the batch.

    Args:
        ranges: all that the trace names.
        source: the kind wanted; None: the first of `PREFERENCE` there is.
    """
    by_source: dict[Source, list[IterationRange]] = {}
    for found in ranges:
        by_source.setdefault(found.name.source, []).append(found)
    chosen = next((s for s in ([source] if source else PREFERENCE) if s in by_source), None)
    if chosen is None:
        return []
    kept = _in_order(by_source[chosen])
    if chosen == "response_tokens":
        engine = by_source.get("vllm") or by_source.get("sglang")
        if engine:
            kept = _with_phases(kept, _in_order(engine))
    return kept


def _in_order(ranges: list[IterationRange]) -> list[IterationRange]:
    counts: dict[object, int] = {}
    for found in ranges:
        counts[found.thread] = counts.get(found.thread, 0) + 1
    thread = max(counts, key=lambda key: counts[key])
    kept: list[IterationRange] = []
    for found in sorted((r for r in ranges if r.thread == thread), key=lambda r: (r.begin_us, -r.end_us)):
        if not kept or found.begin_us >= kept[-1].end_us:
            kept.append(found)
    return kept


def _with_phases(own: list[IterationRange], engine: list[IterationRange]) -> list[IterationRange]:
    merged: list[IterationRange] = []
    at = 0
    for outer in own:
        while at < len(engine) and engine[at].begin_us < outer.begin_us:
            at += 1
        inner = engine[at] if at < len(engine) and engine[at].begin_us < outer.end_us else None
        if inner is None or inner.name.phase is None:
            merged.append(outer)
            continue
        name = RangeName(
            outer.name.source,
            outer.name.number,
            outer.name.lo,
            outer.name.hi,
            outer.name.requests,
            inner.name.prefills,
            inner.name.decodes,
            inner.name.phase,
        )
        merged.append(IterationRange(name, outer.begin_us, outer.end_us, outer.thread))
    return merged
