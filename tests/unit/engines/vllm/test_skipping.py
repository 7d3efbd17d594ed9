"""Iterations of a vLLM worker that are only counted: what a job leaves is as if each had been looked at."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from oracle import Iteration, expect_lead
from vllm_runner import V1Runner
from vllm_schedule import DRAFTS, LONG, STOP, Pace, RandomEngine, load
from vllm_worker import Worker, captured, output

from verl_profiler_conf.capture.live import close_all, live_sessions
from verl_profiler_conf.core.settings import ENV_NAME
from verl_profiler_conf.engines.vllm import hooks
from verl_profiler_conf.engines.vllm import worker as worker_module
from verl_profiler_conf.engines.vllm.worker import STATE

pytest.importorskip("torch")  # what is compared is captured

# -- iterations that the gate is not asked about ----------------------------------------------------------------------


def decode(worker: Any, made: dict[str, int], *, refilled: str | None = None) -> None:
    """One iteration in which these requests make their next token."""
    out = output(dict.fromkeys(made, 1))
    cached = out.scheduled_cached_reqs
    cached.num_output_tokens = list(made.values())
    cached.num_computed_tokens = [3 + tokens for tokens in made.values()]
    if refilled is not None:
        cached.resumed_req_ids = {refilled}
        cached.num_computed_tokens[cached.req_ids.index(refilled)] = 0
        out.num_scheduled_tokens[refilled] = 4 + made[refilled]
    worker.execute_model(out)
    worker.sample_tokens(None)
    for request in made:
        made[request] += 1


def two_requests(worker: Any) -> dict[str, int]:
    out = output({"a": 4, "b": 4}, new=("a", "b"))
    for new in out.scheduled_new_reqs:
        new.sampling_params = SimpleNamespace(max_tokens=500, all_stop_token_ids=set())
    worker.execute_model(out)
    worker.sample_tokens(None)
    return {"a": 1, "b": 1}


@pytest.mark.parametrize("away", [8, 20, 60])
@pytest.mark.parametrize("before", range(56, 72, 3))
def test_a_lead_that_is_away_for_a_while_is_captured_when_it_is_there(
    hooked: Any, tmp_path: Path, before: int, away: int
) -> None:
    worker = hooked(profile_token_start=100, profile_token_end=104)()
    made = two_requests(worker)
    for _ in range(before):
        decode(worker, made)
    for _ in range(away):
        alone = {"b": made["b"]}
        decode(worker, alone)
        made |= alone
    decode(worker, made, refilled="a")
    for _ in range(100):
        decode(worker, made)
    close_all()
    assert captured(tmp_path) == [(token, token + 1) for token in range(100, 104)]


def forty_tokens(hooked: Any) -> Any:
    """A worker whose requests have made so many, far from its window."""
    worker = hooked(profile_token_start=100, profile_token_end=104)()
    made = two_requests(worker)
    for _ in range(39):
        decode(worker, made)
    return worker


def furthest(folder: Path) -> int:
    (manifest,) = (json.loads(path.read_text()) for path in folder.glob("*.manifest.json"))
    assert manifest["trace"] is None
    return int(manifest["furthest_token"])


def test_the_job_ends_and_how_far_it_came_is_known(hooked: Any, tmp_path: Path) -> None:
    worker = forty_tokens(hooked)
    close_all()
    assert furthest(tmp_path) == 39
    del worker  # it had to live until here


def test_another_job_begins_and_how_far_the_last_came_is_known(
    hooked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = forty_tokens(hooked)
    monkeypatch.setenv(
        ENV_NAME, json.dumps({"profile_token_end": 2, "save_path": str(tmp_path / "b"), "device": "cpu"})
    )
    worker.execute_model(output({"c": 4}, new=("c",)))
    assert furthest(tmp_path) == 39


def test_a_window_whose_iterations_were_skipped_is_said(
    hooked: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = hooked(profile_token_start=100, profile_token_end=200)()
    made = two_requests(worker)
    decode(worker, made)
    hook = vars(worker)[STATE]
    hook.grant(200)  # as no gate would have it
    while made["a"] <= 100:
        decode(worker, made)
    close_all()
    assert "iterations of a window were left out" in caplog.text
    assert not list(tmp_path.glob("*.gz"))


def test_a_worker_class_that_calls_the_one_it_inherits_from_counts_once(hooked: Any) -> None:
    base = hooked(profile_token_start=100, profile_token_end=104)

    class Own(base):  # type: ignore[misc]
        def execute_model(self, scheduler_output: Any) -> Any:
            return super().execute_model(scheduler_output)

    hooks._hook_worker("Own")(SimpleNamespace(__name__="module", Own=Own))
    worker = Own()
    made = two_requests(worker)
    for _ in range(40):
        decode(worker, made)
    (session,) = live_sessions()
    session.catch_up()
    assert session.iteration == 40


# -- random schedules, through the hook and the gate ------------------------------------------------------------------

KINDS = [(False, False), (True, False), (False, True), (True, True)]
"""Overlapped, speculative."""


def play(kind: type[Worker], engine: RandomEngine, steps: Iterable[Any], *, table: bool) -> list[dict[str, range]]:
    """Run the steps of an engine on a new worker; what its iterations made."""
    worker = kind()
    worker.vllm_config.scheduler_config.async_scheduling = engine.overlapped
    if engine.speculative:
        worker.vllm_config.speculative_config = SimpleNamespace(num_speculative_tokens=DRAFTS)
    runner = V1Runner(overlapped=engine.overlapped)
    if table:
        worker.model_runner = runner
    made: list[dict[str, range]] = []
    for step in steps:
        worker.returns = step.result
        worker.during = lambda step=step: runner.update_states(step.output)
        worker.execute_model(step.output)
        runner.keep_sampled(
            {name: [STOP if at == engine.ends[name] else 7 for at in tokens] for name, tokens in step.made.items()}
        )
        if step.made:
            made.append(step.made)
    return made


@pytest.mark.parametrize("table", [False, True], ids=["history", "table"])
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("pace", "starts"), [(Pace(), (5, 9, 14, 20)), (LONG, (30, 60, 90, 120, 160))], ids=["short", "long"]
)
@pytest.mark.parametrize(("overlapped", "speculative"), KINDS)
def test_random_schedules_are_captured_as_the_rule_says(
    hooked: Any,
    tmp_path: Path,
    overlapped: bool,
    speculative: bool,
    pace: Pace,
    starts: tuple[int, ...],
    seed: int,
    table: bool,
) -> None:
    engine = RandomEngine(load("0.33.0"), 1000 + seed, overlapped=overlapped, speculative=speculative, pace=pace)
    start = starts[seed % len(starts)]
    ended: list[frozenset[str]] = []
    told: set[str] = set()

    def watched() -> Iterator[Any]:
        for step in engine:
            told.update(step.output.finished_req_ids)
            if step.made:
                ended.append(frozenset(told))
            yield step

    made = play(hooked(profile_token_start=start, profile_token_end=start + 6), engine, watched(), table=table)
    close_all()
    log = []
    for number, row in enumerate(made):
        ends = {request: engine.finals[request] for request in row}
        real = {r: range(min(m.start, ends[r]), min(m.stop, ends[r])) for r, m in row.items()}
        log.append(Iteration(number, made=real, ended=ended[number]))
    expected = [
        (it.number, it.made[capture.request].start, it.made[capture.request].stop)
        for capture in expect_lead(log, [(start, start + 6)])
        for it in log
        if it.number in capture.iterations and it.number not in capture.gaps
    ]
    manifests = [json.loads(path.read_text()) for path in tmp_path.glob("*.manifest.json")]
    rows = [(row["index"], row["lo"], row["hi"]) for m in manifests for row in m["rows"] if not row["gap"]]
    assert sorted(rows) == expected


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
@pytest.mark.parametrize(("overlapped", "speculative"), KINDS)
@pytest.mark.parametrize("table", [False, True], ids=["history", "table"])
def test_skipped_iterations_make_no_difference(
    hooked: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    table: bool,
    overlapped: bool,
    speculative: bool,
    track: str,
    seed: int,
) -> None:
    start = (40, 90, 150, 400)[seed % 4]
    found, granted = [], []
    may_skip = worker_module.skippable
    for skips in (False, True):
        folder = tmp_path / str(skips)
        with monkeypatch.context() as patch:
            patch.setattr(
                worker_module,
                "skippable",
                lambda *given, skips=skips, **named: granted.append(may_skip(*given, **named)) or granted[-1] * skips,
            )
            engine = RandomEngine(
                load("0.33.0"), 2000 + seed, overlapped=overlapped, speculative=speculative, pace=LONG
            )
            play(
                hooked(
                    profile_token_start=None,
                    profile_token_end=None,
                    profile_token_windows=[[start // 2, start // 2 + 3], [start, start + 6]],
                    track=track,
                    save_path=str(folder),
                ),
                engine,
                engine,
                table=table,
            )
            close_all()
        found.append(left(folder))
    assert found[0], "a window that was not reached leaves word"
    if overlapped and track != "lead":  # asked in every iteration, it takes one that ran in vain for one more token
        figures = [max(entry.pop(5) for entry in entries) for entries in found]
        assert 0 <= figures[0] - figures[1] <= 1
        for entries in found:
            for entry in entries:
                entry[-1] = [note.split(": the furthest")[0] for note in entry[-1]]
    assert found[0] == found[1]
    assert max(granted) > 0
