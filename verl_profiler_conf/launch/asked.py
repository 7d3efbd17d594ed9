"""What a job was asked to capture, held against the manifests that came back: every capture is answered for.

Only a job that says how many engines it has, and when each is to capture, can be held to it. A preset makes an `Asked`
from the launch. Without one, the job's end only speaks of the manifests that are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from verl_profiler_conf.capture.manifest import Manifest
from verl_profiler_conf.core.asked import Asked, AskedCapture

CAPTURED = "captured"
LOST = "lost"
NOT_REACHED = "not reached"
WITHOUT_WORD = "without word"


@dataclass(frozen=True)
class Answer:
    """What became of one capture that was asked for.

    Attributes:
        asked: the capture.
        state: `CAPTURED`; `LOST`: recorded, but there is no trace, or its process has ended before it could say what
            became of it; `NOT_REACHED`; `WITHOUT_WORD`: nothing is known.
        reason: what is known of the cause.
        furthest_token: last response token that was seen, -1 when none.
    """

    asked: AskedCapture
    state: str
    reason: str = ""
    furthest_token: int = -1


def answer(asked: Asked, manifests: Iterable[Manifest], unheard: str = "") -> list[Answer] | None:
    """What became of each capture.

    Args:
        asked: by the job.
        manifests: of the job, from wherever they could be had.
        unheard: what is known of nodes from which there is no word.

    Returns:
        Answers in the order of `asked`. None where captures do not say their step or rank, as those of an engine that
        takes no label: they cannot be held against what was asked.
    """
    known: dict[AskedCapture, Manifest] = {}
    never_told: set[int] = set()
    for manifest in manifests:
        rank, step = manifest.global_rank, manifest.step
        if rank is None or (asked.steps and step is None):
            if manifest.has_rows:
                return None
            never_told.add(-1 if rank is None else rank)
            continue
        capture = AskedCapture(step if asked.steps else None, rank, manifest.window)
        if capture not in known or _state(manifest) == CAPTURED:
            known[capture] = manifest
    answers = []
    for capture in asked.captures():
        found = known.get(capture)
        if found is not None:
            answers.append(Answer(capture, _state(found), "; ".join(found.notes), found.furthest_token))
        elif capture.rank in never_told:
            answers.append(Answer(capture, WITHOUT_WORD, "its engine ran, and was never told to capture"))
        else:
            answers.append(Answer(capture, WITHOUT_WORD, unheard))
    return answers


def account(asked: Asked, answers: Sequence[Answer]) -> Iterator[str]:
    """What is missing: a line with the count, then one for each step, cause and window. Nothing when all is there."""
    missing = [each for each in answers if each.state != CAPTURED]
    if not missing:
        return
    yield f"{len(answers) - len(missing)} of {len(answers)} captures that were asked for are there"
    heard = {each.asked.step for each in answers if each.state != WITHOUT_WORD}
    silent = [step for step in asked.steps if step not in heard]
    if heard and silent:
        yield (
            f"{counted('step', silent)} never came: no engine was told to capture there; the training ended before, or"
            " it was resumed from a later checkpoint"
        )
        missing = [each for each in missing if each.asked.step in heard]
    for step in asked.steps or (None,):
        for window in asked.windows:
            for state in (LOST, NOT_REACHED, WITHOUT_WORD):
                alike = [each for each in missing if each.asked.step == step and each.asked.window == window]
                yield from _lines(asked, [each for each in alike if each.state == state])


def _lines(asked: Asked, answers: Sequence[Answer]) -> Iterator[str]:
    """The same step, window and state: a line for each reason. Of windows that were not reached, the reason of the rank
    that came furthest stands for all."""
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
        became = reason if reason.startswith(window) else f"{window} {state}" + (f": {reason}" if reason else "")
        yield f"{'' if step is None else f'step {step}, '}{where}: {became}"


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
