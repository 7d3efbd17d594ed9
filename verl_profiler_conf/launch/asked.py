"""Compares what a job was asked to capture with the manifests that came back, so that no capture is forgotten.

This needs to know how many engines the job has, and when each should capture. A preset knows that from the launch, and
makes an `Asked`. Without one, the job's end only reports the manifests that are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from verl_profiler_conf.capture.manifest import Manifest
from verl_profiler_conf.core.asked import Asked, AskedCapture

CAPTURED = "captured"
LOST = "lost"
NOT_REACHED = "not reached"
NOT_REPORTED = "not reported"


@dataclass(frozen=True)
class Answer:
    """What became of one capture that was asked for.

    Attributes:
        asked: the capture.
        state: `CAPTURED`; `LOST`: recorded, but there is no trace, or its process has ended before it could say what
            became of it; `NOT_REACHED`; `NOT_REPORTED`: there is no manifest.
        reason: what is known of the cause.
        furthest_token: last response token that was seen, -1 when none.
    """

    asked: AskedCapture
    state: str
    reason: str = ""
    furthest_token: int = -1


def answer(asked: Asked, manifests: Iterable[Manifest], unanswered: str = "") -> list[Answer] | None:
    """What became of each capture.

    Args:
        asked: by the job.
        manifests: of the job, from all nodes that answered.
        unanswered: what is known of nodes that did not answer.

    Returns:
        Answers in the order of `asked`. None where captures do not say their step or rank, for example those of an
        engine that takes no label: they cannot be compared with what was asked.
    """
    known: dict[AskedCapture, Manifest] = {}
    never_armed: set[int] = set()
    """Ranks whose engine ran, but was never asked to capture."""
    for manifest in manifests:
        rank, step = manifest.global_rank, manifest.step
        if rank is None or (asked.steps and step is None):
            if manifest.has_rows:
                return None
            never_armed.add(-1 if rank is None else rank)
            continue
        capture = AskedCapture(step if asked.steps else None, rank, manifest.window)
        if capture not in known or _state(manifest) == CAPTURED:
            known[capture] = manifest
    answers = []
    for capture in asked.captures():
        found = known.get(capture)
        if found is not None:
            answers.append(Answer(capture, _state(found), "; ".join(found.notes), found.furthest_token))
        elif capture.rank in never_armed:
            answers.append(Answer(capture, NOT_REPORTED, "its engine ran, and was never told to capture"))
        else:
            answers.append(Answer(capture, NOT_REPORTED, unanswered))
    return answers


def account(asked: Asked, answers: Sequence[Answer]) -> Iterator[str]:
    """The captures that are missing: a line with their number, then one for each step, cause and window. No line when
    all are there."""
    missing = [each for each in answers if each.state != CAPTURED]
    if not missing:
        return
    yield f"{len(answers) - len(missing)} of {len(answers)} captures that were asked for are there"
    reported = {each.asked.step for each in answers if each.state != NOT_REPORTED}
    unreported = [step for step in asked.steps if step not in reported]
    if reported and unreported:
        yield (
            f"{counted('step', unreported)} never came: no engine was told to capture there; the training ended before,"
            " or it was resumed from a later checkpoint"
        )
        missing = [each for each in missing if each.asked.step in reported]
    for step in asked.steps or (None,):
        for window in asked.windows:
            for state in (LOST, NOT_REACHED, NOT_REPORTED):
                alike = [each for each in missing if each.asked.step == step and each.asked.window == window]
                yield from _lines(asked, [each for each in alike if each.state == state])


def _lines(asked: Asked, answers: Sequence[Answer]) -> Iterator[str]:
    """Answers of the same step, window and state: a line for each reason. Where a window was not reached, there is one
    line, with the reason of the rank that came furthest."""
    if not answers:
        return
    if answers[0].state == NOT_REACHED:
        groups = {max(answers, key=lambda each: each.furthest_token).reason: list(answers)}
    else:
        groups = {}
        for each in answers:
            groups.setdefault(each.reason, []).append(each)
    for reason, group in groups.items():
        ranks = [each.asked.rank for each in group]
        where = f"{counted('rank', ranks)} ({counted('replica', sorted({asked.replicas[rank] for rank in ranks}))})"
        step, window, state = group[0].asked.step, f"tokens {group[0].asked.window}", group[0].state
        outcome = reason if reason.startswith(window) else f"{window} {state}" + (f": {reason}" if reason else "")
        yield f"{'' if step is None else f'step {step}, '}{where}: {outcome}"


def counted(noun: str, numbers: Sequence[int]) -> str:
    """`step 3`, `ranks 0-7, 9`: ascending numbers, as people write them."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    texts = [f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts]
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(texts)}"


def _state(manifest: Manifest) -> str:
    if not manifest.final:
        return LOST
    if not manifest.has_rows:
        return NOT_REACHED
    return CAPTURED if manifest.trace or manifest.left_at or manifest.backend == "cudart" else LOST
