"""The windows that were asked for: what of them was captured, what is missing, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from verl_profiler_conf.capture.manifest import Manifest
from verl_profiler_conf.core.window import TokenWindow

Spans = tuple[tuple[int, int | None], ...]
"""Spans of tokens, half-open and ascending. An end of None means the end of the response."""

_WANTED_ENDS = ("max_iterations", "stop_profile")
"""Why a capture ended, where the user has asked for that end: what comes after it is not missing."""

_WHY = {
    "job_end": "the job ended there",
    "error": "the capture ended with an error",
    "gap": "the request paused, and the capture was not taken up again",
}


@dataclass(frozen=True)
class AskedWindow:
    """One window that one rank of one engine was to capture, in one RL step where there are steps.

    Attributes:
        run_id: of the job.
        engine: its name.
        rank: over all replicas where that is known.
        step: of the job; None without steps.
        replica: index of the engine; None where that is not known.
        label: None where none was given.
        window: asked for.
        captured: tokens in captures.
        missing: tokens that are in none and should be.
        unmade: tokens at the window's end that were never made, because the response ended inside the window. They
            are not missing: the capture goes as far as the response did.
        why: in a sentence, why tokens are missing or unmade; empty where none are.
    """

    run_id: str
    engine: str
    rank: int
    step: int | None
    replica: int | None
    label: str | None
    window: TokenWindow
    captured: Spans
    missing: Spans
    unmade: Spans
    why: str

    @property
    def line(self) -> str:
        """What is missing, or shorter than asked for, as one line."""
        words = [f"step {self.step}"] if self.step is not None else [self.label] if self.label else []
        words += [f"replica {self.replica}"] if self.replica is not None else []
        place = ", ".join([*words, f"{self.engine} rank {self.rank}"])
        if self.missing:
            return f"missing: {place}: tokens {spans_label(self.missing)} of {self.window}: {self.why}"
        return f"short: {place}: tokens {spans_label(self.captured)} of {self.window}: {self.why}"


def spans_label(spans: Spans) -> str:
    """`20-49, 60`: inclusive, as people count; `none` for no tokens."""
    return ", ".join(_span_label(lo, hi) for lo, hi in spans) or "none"


def _span_label(lo: int, hi: int | None) -> str:
    if hi is None:
        return f"{lo}-end"
    return str(lo) if hi - lo == 1 else f"{lo}-{hi - 1}"


def asked_windows(manifests: Iterable[Manifest]) -> list[AskedWindow]:
    """Every window that the manifests show was asked for, in each job, by rank and by step.

    A rank may have a manifest for one step or window of a job, and none for another. It is missing there: its process
    ended before it could write one. A process that ran no iteration is left out if another captured the same window.
    """
    manifests = sorted(manifests, key=lambda manifest: manifest.created)
    began = {run_id: number for number, run_id in enumerate(dict.fromkeys(m.run_id for m in manifests))}
    groups: dict[tuple[object, ...], list[Manifest]] = {}
    for manifest in _asked(manifests):
        groups.setdefault((*_place(manifest), manifest.step, manifest.label, manifest.window), []).append(manifest)
    asked = [_asked_window(group) for group in groups.values()]
    return sorted([*asked, *_unreported(asked)], key=lambda each: (began[each.run_id], *_order(each)))


def _order(each: AskedWindow) -> tuple[object, ...]:
    step = -1 if each.step is None else each.step
    replica = -1 if each.replica is None else each.replica
    label = "" if each.step is not None else each.label or ""
    return (each.engine, step, label, replica, each.rank, each.window.start)


def _place(manifest: Manifest) -> tuple[object, ...]:
    return (manifest.run_id, manifest.engine, manifest.replica, _rank(manifest))


def _rank(manifest: Manifest) -> int:
    return manifest.rank if manifest.global_rank is None else manifest.global_rank


def _asked(manifests: list[Manifest]) -> list[Manifest]:
    """The manifests, without those of processes that were not asked to capture, or ran nothing while others did."""
    labelled = {m.run_id for m in manifests if m.label is not None}
    captured = {(m.run_id, m.label, m.window) for m in manifests if m.rows}
    kept = []
    for manifest in manifests:
        is_idle = not manifest.rows and manifest.furthest_token < 0 and not manifest.notes
        if manifest.rows or not (
            (manifest.label is None and manifest.run_id in labelled)
            or (is_idle and (manifest.run_id, manifest.label, manifest.window) in captured)
        ):
            kept.append(manifest)
    return kept


def _is_on_a_disk(manifest: Manifest) -> bool:
    """Whether the trace is beside its manifest, or on the node that wrote it. With nsys the trace is nsys's."""
    return manifest.trace is not None or manifest.left_at is not None or manifest.backend == "cudart"


def _asked_window(group: list[Manifest]) -> AskedWindow:
    first, window = group[0], group[0].window
    kept = [m for m in group if _is_on_a_disk(m)]
    captured = _union((row.lo, row.hi) for m in kept for row in m.captured)
    last = max(group, key=lambda m: (m.furthest_token, m.part, m.created))
    missing = _rest(window, captured)
    unmade: Spans = ()
    why = ""
    if captured and last.closed_by == "request_end" and missing and missing[-1][1] == window.end:
        missing, unmade = missing[:-1], missing[-1:]
        why = f"the response ended after token {unmade[0][0] - 1}"
    if first.track != "lead" and captured:
        missing = ()  # each request counts by itself there: the manifest's coverage says how many tokens are in it
    elif any(m.closed_by in _WANTED_ENDS for m in kept):
        missing = ()
    if missing:
        why = _why(last, bool(captured), lost=any(m.rows for m in group) and not kept)
    rank = _rank(first)
    place = (first.run_id, first.engine, rank, first.step, first.replica, first.label)
    return AskedWindow(*place, window, captured, missing, unmade, why)


def _why(last: Manifest, is_partly: bool, *, lost: bool) -> str:
    notes = "; ".join(last.notes)
    if lost:
        return notes or "it was recorded, and its trace could not be written"
    if not is_partly:
        furthest = last.furthest_token
        seen = f"the furthest token was {furthest}" if furthest >= 0 else "no token was seen"
        return notes or f"never reached; {seen}"
    return _WHY.get(last.closed_by or "", notes or "no capture holds them")


def _unreported(asked: Sequence[AskedWindow]) -> list[AskedWindow]:
    """Windows without a manifest. Other ranks, windows or steps of the same job show that they were asked for."""
    found = []
    jobs: dict[tuple[str, str], list[AskedWindow]] = {}
    for each in asked:
        jobs.setdefault((each.run_id, each.engine), []).append(each)
    for (run_id, engine), of_job in jobs.items():
        if any(each.label is not None and each.step is None for each in of_job):
            continue  # labels of the caller's own do not show what belongs together
        windows = {each.window for each in of_job}
        places = {(each.replica, each.rank) for each in of_job}
        steps = {each.step for each in of_job}
        known = {(each.step, each.replica, each.rank, each.window) for each in of_job}
        for step in steps:
            for replica, rank in places:
                for window in windows:
                    if (step, replica, rank, window) in known:
                        continue
                    why = "no manifest: its process ended before it could write one"
                    missing = ((window.start, window.end),)
                    found.append(AskedWindow(run_id, engine, rank, step, replica, None, window, (), missing, (), why))
    return found


def _union(spans: Iterable[tuple[int, int]]) -> Spans:
    merged: list[tuple[int, int]] = []
    for lo, hi in sorted(span for span in spans if span[0] < span[1]):
        if merged and lo <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(hi, merged[-1][1]))
        else:
            merged.append((lo, hi))
    return tuple(merged)


def _rest(window: TokenWindow, captured: Spans) -> Spans:
    """The spans of the window that are not captured. A window without an end is complete with its first token."""
    rest: list[tuple[int, int | None]] = []
    at = window.start
    for lo, hi in captured:
        if lo > at:
            rest.append((at, lo))
        at = max(at, hi or at)
    if window.end is None:
        return tuple(rest) if captured else ((window.start, None),)
    return tuple((lo, hi) for lo, hi in [*rest, (at, window.end)] if hi is None or lo < hi)
