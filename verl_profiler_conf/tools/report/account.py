"""What was asked for, what of it was captured, and what is missing and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from verl_profiler_conf.capture.manifest import Manifest
from verl_profiler_conf.core.window import TokenWindow

Spans = tuple[tuple[int, int | None], ...]
"""Stretches of tokens, half-open and ascending; an end of None: to the end of the response."""

_WANTED_ENDS = ("max_iterations", "stop_profile")
"""Ends of a capture that the user has asked for: what comes after them is not missing."""

_WHY = {
    "job_end": "the job ended there",
    "error": "the capture ended with an error",
    "gap": "the request paused, and the capture was not taken up again",
}


@dataclass(frozen=True)
class Answer:
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


def account(manifests: Iterable[Manifest]) -> list[Answer]:
    """An answer for everything that the manifests show was asked for: windows, ranks and steps of each job.

    A rank that has a manifest for one step or window of a job, and none for another, is missing there: its process
    ended before it could write one. A process that ran no iteration is not counted where another captured the same.
    """
    manifests = sorted(manifests, key=lambda manifest: manifest.created)
    began = {run_id: number for number, run_id in enumerate(dict.fromkeys(m.run_id for m in manifests))}
    groups: dict[tuple[object, ...], list[Manifest]] = {}
    for manifest in _asked(manifests):
        groups.setdefault((*_place(manifest), manifest.step, manifest.label, manifest.window), []).append(manifest)
    answers = [_answer(group) for group in groups.values()]
    return sorted([*answers, *_unreported(answers)], key=lambda answer: (began[answer.run_id], *_order(answer)))


def _order(answer: Answer) -> tuple[object, ...]:
    step = -1 if answer.step is None else answer.step
    replica = -1 if answer.replica is None else answer.replica
    label = "" if answer.step is not None else answer.label or ""
    return (answer.engine, step, label, replica, answer.rank, answer.window.start)


def _place(manifest: Manifest) -> tuple[object, ...]:
    return (manifest.run_id, manifest.engine, manifest.replica, _rank(manifest))


def _rank(manifest: Manifest) -> int:
    return manifest.rank if manifest.global_rank is None else manifest.global_rank


def _asked(manifests: list[Manifest]) -> list[Manifest]:
    """Without those of processes that were not asked to capture, or ran nothing while another process did."""
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


def _answer(group: list[Manifest]) -> Answer:
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
    return Answer(*place, window, captured, missing, unmade, why)


def _why(last: Manifest, is_partly: bool, *, lost: bool) -> str:
    notes = "; ".join(last.notes)
    if lost:
        return notes or "it was recorded, and its trace could not be written"
    if not is_partly:
        furthest = last.furthest_token
        seen = f"the furthest token was {furthest}" if furthest >= 0 else "no token was seen"
        return notes or f"never reached; {seen}"
    return _WHY.get(last.closed_by or "", notes or "no capture holds them")


def _unreported(answers: Sequence[Answer]) -> list[Answer]:
    """What other ranks, windows or steps of the same job show was asked for, and no manifest mentions."""
    found = []
    jobs: dict[tuple[str, str], list[Answer]] = {}
    for answer in answers:
        jobs.setdefault((answer.run_id, answer.engine), []).append(answer)
    for (run_id, engine), of_job in jobs.items():
        if any(answer.label is not None and answer.step is None for answer in of_job):
            continue  # the caller's own labels: what belongs together is not known
        windows = {answer.window for answer in of_job}
        places = {(answer.replica, answer.rank) for answer in of_job}
        steps = {answer.step for answer in of_job}
        known = {(answer.step, answer.replica, answer.rank, answer.window) for answer in of_job}
        for step in steps:
            for replica, rank in places:
                for window in windows:
                    if (step, replica, rank, window) in known:
                        continue
                    why = "no manifest: its process ended before it could write one"
                    missing = ((window.start, window.end),)
                    found.append(Answer(run_id, engine, rank, step, replica, None, window, (), missing, (), why))
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
    """What of the window is in no span. An open window is whole as soon as its first token is there."""
    rest: list[tuple[int, int | None]] = []
    at = window.start
    for lo, hi in captured:
        if lo > at:
            rest.append((at, lo))
        at = max(at, hi or at)
    if window.end is None:
        return tuple(rest) if captured else ((window.start, None),)
    return tuple((lo, hi) for lo, hi in [*rest, (at, window.end)] if hi is None or lo < hi)
