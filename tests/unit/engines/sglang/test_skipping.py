"""Iterations of an SGLang scheduler that are only counted: what a job leaves is as if each had been looked at."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang_schedule import WIDEST, Rollout, make_batch, make_request

from verl_profiler_conf.capture.live import close_all, live_sessions
from verl_profiler_conf.core.gate import LeadGate
from verl_profiler_conf.core.settings import ENV_NAME, TOKENS_BEFORE
from verl_profiler_conf.engines.sglang import hooks
from verl_profiler_conf.engines.sglang import requests as module

pytest.importorskip("torch")  # what is compared is captured


class Scheduler:
    """As SGLang's, from the hook's side, over the books of a rollout."""

    def __init__(self, rollout: Rollout | None = None) -> None:
        self.rollout = rollout
        speculative = rollout is not None and rollout.speculative
        self.is_generation = True
        self.spec_algorithm = SimpleNamespace(is_none=lambda: not speculative)
        self.server_args = SimpleNamespace(speculative_num_draft_tokens=WIDEST, pp_size=1)
        self.tp_rank, self.tp_size, self.pp_rank, self.pp_size, self.dp_rank = 0, 1, 0, 1, None
        self.waiting_queue: list[Any] = [] if rollout is None else rollout.waiting
        self.result_queue: Any = () if rollout is None else rollout.in_flight
        self.idle = False

    @property
    def running_batch(self) -> Any:
        return None if self.rollout is None else SimpleNamespace(reqs=self.rollout.running)

    def run_batch(self, batch: Any) -> Any:
        return SimpleNamespace(delay_sample_func=None)

    def launch_batch_sample_if_needed(self, result: Any, batch: Any) -> None: ...

    def on_idle(self) -> None: ...

    def is_fully_idle(self) -> bool:
        return self.idle


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., type[Scheduler]]]:
    """Publish settings; a scheduler class that has been hooked."""

    def publish(**settings: Any) -> type[Scheduler]:
        raw = {"profile_token_start": 100, "profile_token_end": 104, "save_path": str(tmp_path), "device": "cpu"}
        monkeypatch.setenv(ENV_NAME, json.dumps({**raw, **settings}))
        monkeypatch.setattr(hooks, "_in_every_iteration", [])
        kind = type("Scheduler", (Scheduler,), dict(vars(Scheduler)))
        hooks._hook_scheduler(SimpleNamespace(Scheduler=kind))
        return kind

    yield publish
    close_all()


def left(folder: Path) -> list[Any]:
    """What a job has left, apart from what differs from run to run."""
    manifests = [json.loads(path.read_text()) for path in folder.glob("*.manifest.json")]
    for manifest in manifests:
        for row in manifest["rows"]:
            del row["wall_ns"]
    kept = ("window", "part", "rows", "tracked", "closed_by", "furthest_token", "notes")
    return sorted(([manifest[key] for key in kept] for manifest in manifests), key=str)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("track", ["lead", "any", "all"])
@pytest.mark.parametrize(("overlap", "speculative"), [(False, False), (True, False), (False, True), (True, True)])
def test_skipped_iterations_make_no_difference(
    hooked: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overlap: bool,
    speculative: bool,
    track: str,
    seed: int,
) -> None:
    start = (60, 90, 150, 400)[seed % 4]
    found, skipped = [], 0
    for skips in (False, True):
        folder = tmp_path / str(skips)
        with monkeypatch.context() as patch:
            if not skips:
                patch.setattr(module, "skippable", lambda *_, **__: 0)
            kind = hooked(
                profile_token_start=None,
                profile_token_end=None,
                profile_token_windows=[[start // 2, start // 2 + 3], [start, start + 6]],
                track=track,
                save_path=str(folder),
            )
            rollout = Rollout(3000 + seed, overlap=overlap, speculative=speculative, longest=260, retracts=0.01)
            scheduler = kind(rollout)
            hook = vars(scheduler)[hooks._STATE]
            while rollout.run(scheduler.run_batch) is not None:
                skipped += bool(hook.left)
            scheduler.idle = True
            scheduler.on_idle()
            close_all()
        found.append(left(folder))
    assert found[0], "a window that was not reached leaves word"
    assert found[0] == found[1]
    assert skipped


def decode(scheduler: Scheduler, reqs: list[Any]) -> None:
    """One iteration in which these requests make their next token."""
    lengths = [len(req.origin_input_ids) + len(req.output_ids) for req in reqs]
    scheduler.run_batch(make_batch("DECODE", reqs, lengths))
    for req in reqs:
        req.output_ids.append(7)


def count_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    asked: list[int] = []
    step = LeadGate.step
    monkeypatch.setattr(LeadGate, "step", lambda *given: (asked.append(1), step(*given))[1])
    return asked


def captured(folder: Path) -> list[tuple[str, int]]:
    return [(row["request"], row["lo"]) for entry in left(folder) for row in entry[2]]


def test_far_from_the_window_the_session_is_hardly_asked(
    hooked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = hooked()()
    asked = count_steps(monkeypatch)
    reqs = [make_request(f"r{number}", 4, 500) for number in range(8)]
    for _ in range(97):
        decode(scheduler, reqs)
    assert len(asked) < 10
    for _ in range(20):
        decode(scheduler, reqs)
    close_all()
    assert captured(tmp_path) == [("r0", token) for token in range(100, 104)]


def test_prompts_of_others_do_not_end_the_skipping(
    hooked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = hooked()()
    reqs = [make_request("lead", 4, 500)]
    decode(scheduler, reqs)
    decode(scheduler, reqs)
    asked = count_steps(monkeypatch)
    for number in range(20):
        decode(scheduler, reqs)
        new = make_request(f"r{number}", 30, 500)
        scheduler.run_batch(make_batch("EXTEND", [new], [30]))
        reqs.insert(0, new)  # the lead stands elsewhere from then on
    assert not asked
    for _ in range(100):
        decode(scheduler, reqs)
    close_all()
    assert captured(tmp_path) == [("lead", token) for token in range(100, 104)]


def test_a_lead_that_ends_gives_way_at_once(hooked: Any, tmp_path: Path) -> None:
    scheduler = hooked()()
    lead, second, third = (make_request(name, 4, 500) for name in ("lead", "second", "third"))
    for _ in range(20):
        decode(scheduler, [lead, second])
    lead.finished_reason = "stop"
    for _ in range(10):
        decode(scheduler, [second, third])
    scheduler.waiting_queue.append(second)  # it is retracted, and leads all the same
    for _ in range(90):
        decode(scheduler, [third])
    for _ in range(100):
        decode(scheduler, [third, second])
    close_all()
    assert captured(tmp_path) == [("second", token) for token in range(100, 104)]


def test_a_lead_that_has_ended_gives_way_while_it_is_still_in_the_batch(hooked: Any, tmp_path: Path) -> None:
    """The overlap schedule runs it once more."""
    scheduler = hooked()()
    lead, second = make_request("lead", 4, 500), make_request("second", 4, 500)
    second.output_ids = [7] * 80
    for _ in range(20):
        decode(scheduler, [lead, second])
    lead.finished_reason = "stop"
    decode(scheduler, [lead, second])
    for _ in range(10):
        decode(scheduler, [second])
    close_all()
    assert captured(tmp_path) == [("second", token) for token in range(100, 104)]


def test_a_lead_that_was_aborted_while_it_waited_gives_way(hooked: Any, tmp_path: Path) -> None:
    """SGLang says nothing of it."""
    scheduler = hooked()()
    lead, second = make_request("lead", 4, 500), make_request("second", 4, 500)
    second.output_ids = [7] * 50
    for _ in range(20):
        decode(scheduler, [lead, second])
    for _ in range(40):
        decode(scheduler, [second])
    close_all()
    assert captured(tmp_path) == [("second", token) for token in range(100, 104)]


def test_a_response_that_is_continued_ends_the_skipping(hooked: Any, tmp_path: Path) -> None:
    scheduler = hooked(track="any")()
    reqs = [make_request("a", 4, 500)]
    for _ in range(10):
        decode(scheduler, reqs)
    on = make_request("on", 98, 500)
    on.sampling_params.custom_params = {TOKENS_BEFORE: 97}
    scheduler.run_batch(make_batch("EXTEND", [on], [98]))
    on.output_ids.append(7)
    for _ in range(10):
        decode(scheduler, [*reqs, on])
    close_all()
    assert captured(tmp_path) == [("on", token) for token in range(100, 104)]


@pytest.mark.parametrize("track", ["lead", "any"])
def test_stopped_far_from_the_window_the_furthest_token_is_known(hooked: Any, tmp_path: Path, track: str) -> None:
    scheduler = hooked(track=track)()
    reqs = [make_request("a", 4, 500)]
    for _ in range(40):
        decode(scheduler, reqs)
    assert live_sessions()[0].iteration < 39
    close_all()
    ((_, _, _, _, _, furthest, (note,)),) = left(tmp_path)
    assert furthest == 39
    assert "in 40 iterations" in note


def test_a_stranger_that_comes_back_is_captured(hooked: Any, tmp_path: Path) -> None:
    """It was retracted right before the window when the session was armed."""
    scheduler = hooked(track="any", arm="request")()
    old, new = make_request("old", 4, 500), make_request("new", 4, 500)
    old.output_ids = [7] * 99
    scheduler.waiting_queue.append(old)
    vars(scheduler)[hooks._STATE].profile(True, None)
    hooks.put_in()
    for _ in range(20):
        decode(scheduler, [new])
    for _ in range(10):
        decode(scheduler, [new, old])
    close_all()
    assert captured(tmp_path) == [("old", token) for token in range(100, 104)]


# -- hooks that are taken out ---------------------------------------------------------------------------------------


def is_hooked(kind: type[Scheduler]) -> bool:
    return any(vars(kind)[name] is not vars(Scheduler)[name] for name in hooks._IN_EVERY_ITERATION)


def test_a_scheduler_that_was_not_asked_for_has_no_hooks_left(hooked: Any) -> None:
    kind = hooked(ranks=[1])
    assert is_hooked(kind)
    decode(kind(), [make_request("a", 4)])
    assert not is_hooked(kind)


def test_when_all_is_captured_no_hooks_are_left(hooked: Any, tmp_path: Path) -> None:
    kind = hooked(profile_token_start=2, profile_token_end=4)
    scheduler = kind()
    reqs = [make_request("a", 4)]
    for _ in range(6):
        decode(scheduler, reqs)
    assert not is_hooked(kind)


def test_a_start_call_brings_the_hooks_back(hooked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = hooked(profile_token_start=2, profile_token_end=4, arm="request")
    scheduler = kind()
    decode(scheduler, [make_request("before", 4)])
    assert not is_hooked(kind)
    (word,) = left(tmp_path)
    assert "start_profile was never called" in word[-1][0]

    class Manager:
        def _profile(self, request: Any) -> str:
            return "SGLang's own"

    monkeypatch.setitem(
        __import__("sys").modules, "sglang.srt.managers.io_struct", SimpleNamespace(ProfileReqOutput=SimpleNamespace)
    )
    hooks._hook_profile("Manager", "_profile")(SimpleNamespace(Manager=Manager))
    Manager()._profile(SimpleNamespace(type=SimpleNamespace(name="START_PROFILE")))  # type: ignore[arg-type]
    assert is_hooked(kind)
    reqs = [make_request("a", 4)]
    for _ in range(6):
        decode(scheduler, reqs)
    close_all()
    assert captured(tmp_path) == [("a", 2), ("a", 3)]
