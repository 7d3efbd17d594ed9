"""A session whose device profiler fails, or is never asked for: the job goes on, and every window is answered for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from verl_profiler_conf.capture import form
from verl_profiler_conf.capture import live as module
from verl_profiler_conf.capture.backends import Written
from verl_profiler_conf.capture.claims import reserve_stem
from verl_profiler_conf.capture.manifest import Manifest, gather
from verl_profiler_conf.capture.session import Session, close_all
from verl_profiler_conf.capture.writer import default_writer
from verl_profiler_conf.core.errors import UnavailableError
from verl_profiler_conf.core.settings import Settings


class FakeRecording:
    def write(self, path: Path, renames: Mapping[str, str]) -> Written:
        target = path.with_name(path.name + ".fake")
        target.write_text("trace")
        return Written(target, 5)


class FakeProfiler:
    """Stands for a device's: raises where told to."""

    name = "fake"
    suffix = ".fake"

    def __init__(self, fails: str = "") -> None:
        self._fails = fails
        self.log: list[str] = []

    def _may_fail(self, where: str) -> None:
        if where == self._fails:
            raise UnavailableError(f"cannot {where} here")

    def busy(self) -> str | None:
        return None

    def prepare(self) -> None:
        self._may_fail("prepare")
        self.log.append("prepare")

    def start(self) -> None:
        self.log.append("start")
        self._may_fail("start")

    def annotate(self, name: str) -> contextlib.AbstractContextManager[None]:
        self._may_fail("annotate")
        return contextlib.nullcontext()

    def stop(self) -> FakeRecording:
        self._may_fail("stop")
        return FakeRecording()

    def discard(self) -> None:
        self.log.append("discard")


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    module._live.clear()
    yield
    module._live.clear()


def make(folder: Path, profiler: Any = None, **fields: Any) -> Session:
    raw = {"profile_token_start": 2, "profile_token_end": 4, "save_path": str(folder), "run_id": "job", **fields}
    return Session(Settings.from_mapping(raw), engine="toy", version="1", profiler=profiler or FakeProfiler())


def rollout(session: Session, tokens: int = 6, name: str = "r") -> None:
    for token in range(tokens):
        session.begin({name: range(token, token + 1)})
        session.end()
    session.idle({name: tokens})


def left(folder: Path) -> list[Manifest]:
    """What was left, in the order of the captures. Two of them may be made in the same millisecond."""
    assert default_writer().flush(30)
    return sorted(gather(folder, "job"), key=lambda manifest: (manifest.label or "", _number(manifest)))


def _number(manifest: Manifest) -> int:
    """That of the capture, which its files bear; 0 of a placeholder."""
    return int(Path(manifest.trace).stem.rpartition("_")[2]) if manifest.trace else 0


@pytest.mark.parametrize("where", ["prepare", "start", "annotate", "stop"])
def test_a_failing_profiler_leaves_word_of_why(where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session = make(tmp_path, FakeProfiler(where))
    rollout(session)
    session.close()
    (manifest,) = left(tmp_path)
    assert manifest.closed_by == "error"
    assert any(f"cannot {where} here" in note for note in manifest.notes)
    assert (manifest.trace is not None) == (where == "annotate")  # what was recorded until then is kept
    assert sum("the job goes on" in record.getMessage() for record in caplog.records) == 1
    assert not list(tmp_path.glob(".*"))


def test_word_of_a_failure_is_for_each_window_without_a_capture(tmp_path: Path) -> None:
    profiler = FakeProfiler()
    windows = {
        "profile_token_start": None,
        "profile_token_end": None,
        "profile_token_windows": [[0, 1], [2, 3], [4, 5]],
    }
    session = make(tmp_path, profiler, **windows)
    rollout(session, 1)
    profiler._fails = "start"
    rollout(session, 6, "s")
    assert {m.window.start: (m.closed_by, m.trace is None) for m in left(tmp_path)} == {
        0: ("window", False),
        2: ("error", True),
        4: ("error", True),
    }


def test_on_error_raise_reaches_the_job(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="cannot start here"):
        rollout(make(tmp_path, FakeProfiler("start"), on_error="raise"))


def test_a_session_that_fails_at_the_end_does_not_keep_another_from_ending(tmp_path: Path) -> None:
    for folder, profiler, tokens in ((tmp_path / "a", FakeProfiler("stop"), 3), (tmp_path / "b", FakeProfiler(), 1)):
        session = make(folder, profiler, on_error="raise")
        for token in range(tokens):
            session.begin({"r": range(token, token + 1)})
            session.end()
    with pytest.raises(UnavailableError):
        close_all()
    (manifest,) = left(tmp_path / "b")
    assert "never reached in 1 iterations" in manifest.notes[0]


class TestArmedByRequest:
    def test_never_started_is_said(self, tmp_path: Path) -> None:
        session = make(tmp_path, arm="request")
        rollout(session)
        rollout(session, name="s")
        (manifest,) = left(tmp_path)
        assert "start_profile was never called" in manifest.notes[0]

    def test_and_taken_back_once_it_is(self, tmp_path: Path) -> None:
        session = make(tmp_path, arm="request")
        rollout(session)
        session.start()
        rollout(session, name="s")
        (manifest,) = left(tmp_path)
        assert [row.lo for row in manifest.rows] == [2, 3]

    def test_every_round_is_captured_whatever_ran_before(self, tmp_path: Path) -> None:
        session = make(tmp_path, arm="request")
        for name in "abc":
            session.start()
            rollout(session, name=name)
            session.stop()
            session.stop()
        assert [[row.lo for row in manifest.rows] for manifest in left(tmp_path)] == [[2, 3]] * 3

    def test_stopped_before_the_window_nothing_fires_later(self, tmp_path: Path) -> None:
        session = make(tmp_path, arm="request")
        session.start()
        rollout(session, 1)
        session.stop()
        rollout(session, name="s")
        (manifest,) = left(tmp_path)
        assert manifest.trace is None
        assert manifest.furthest_token == 0
        assert "never reached in 1 iterations" in manifest.notes[0]  # what ran while it was not armed does not count


def test_a_fork_leaves_the_parents_capture_alone(tmp_path: Path) -> None:
    session = make(tmp_path)
    for token in range(3):
        session.begin({"r": range(token, token + 1)})
        session.end()
    session._pid += 1  # as a child sees it
    session.close()
    assert [(m.final, m.opened_by) for m in left(tmp_path)] == [(False, "window")], "as the parent left it"
    session._pid -= 1
    session.close()
    assert [manifest.closed_by for manifest in left(tmp_path)] == ["job_end"]


def test_a_trace_written_after_the_next_arming_takes_back_word_of_its_own_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of an RL training arms anew, and a large trace takes longer than that."""
    go = threading.Event()
    write = FakeRecording.write
    monkeypatch.setattr(FakeRecording, "write", lambda *args: go.wait(30) and write(*args))
    session = make(tmp_path, arm="request")
    session.start("step1")
    rollout(session, 1, "cut short")
    rollout(session)
    session.stop()
    session.start("step2")
    rollout(session, 1)
    go.set()
    assert {(m.label, m.trace is None) for m in left(tmp_path)} == {("step1", False), ("step2", True)}
    assert len(left(tmp_path)) == 2


class TestPrepared:
    def test_ahead_of_the_window(self, tmp_path: Path) -> None:
        profiler = FakeProfiler()
        session = make(tmp_path, profiler, profile_token_start=10, profile_token_end=12)
        for token in range(9):
            session.begin({"r": range(token, token + 1)})
            session.end()
        assert profiler.log == ["prepare"]
        for token in range(9, 12):
            session.begin({"r": range(token, token + 1)})
            session.end()
        assert profiler.log == ["prepare", "start"]

    def test_and_given_up_where_the_window_does_not_come(self, tmp_path: Path) -> None:
        profiler = FakeProfiler()
        session = make(tmp_path, profiler, profile_token_start=10, profile_token_end=12)
        rollout(session, 8)
        assert profiler.log == ["prepare", "discard"]

    def test_iterations_that_are_passed_by_may_prepare_too(self, tmp_path: Path) -> None:
        profiler = FakeProfiler()
        session = make(tmp_path, profiler, profile_token_start=10, profile_token_end=12)
        session.begin({"r": range(1)})
        session.skip({"r": range(7, 8)}, 7)
        assert not session.failed
        assert profiler.log == ["prepare"]


class TestParts:
    """A window longer than `part_iterations` is written as consecutive parts."""

    @pytest.mark.parametrize("track", ["lead", "any", "all"])
    @pytest.mark.parametrize(("end", "asked"), [(14, 12), (None, 28)])
    def test_every_iteration_is_in_exactly_one(self, track: str, end: int | None, asked: int, tmp_path: Path) -> None:
        session = make(tmp_path, track=track, profile_token_end=end, part_iterations=5)
        rollout(session, 30)
        session.close()
        parts = sorted(left(tmp_path), key=lambda manifest: manifest.part)
        assert [row.lo for manifest in parts for row in manifest.rows] == list(range(2, 2 + asked))
        assert [manifest.part for manifest in parts] == list(range(1, -(-asked // 5) + 1))
        assert [len(manifest.rows) for manifest in parts[:-1]] == [5] * (len(parts) - 1)
        assert [manifest.closed_by for manifest in parts[:-1]] == ["part"] * (len(parts) - 1)
        assert parts[-1].closed_by == ("window" if end else "request_end")

    def test_a_window_of_just_one_part_is_one(self, tmp_path: Path) -> None:
        session = make(tmp_path, profile_token_end=7, part_iterations=5)
        rollout(session, 30)
        session.close()
        (manifest,) = left(tmp_path)
        assert (manifest.part, manifest.closed_by) == (1, "window")

    def test_with_speculation(self, tmp_path: Path) -> None:
        session = make(tmp_path, profile_token_end=40, part_iterations=3)
        token = 0
        while token < 45:
            session.begin({"r": range(token, token + 4)})
            session.end()
            token += 2
        session.idle({"r": token})
        session.close()
        parts = sorted(left(tmp_path), key=lambda manifest: manifest.part)
        rows = [row for manifest in parts for row in manifest.rows]
        assert [(row.lo, row.hi) for row in rows] == [(lo, lo + 2) for lo in range(2, 40, 2)]
        assert [len(manifest.rows) for manifest in parts] == [3] * 6 + [1]

    def test_parts_go_on_counting_after_a_pause(self, tmp_path: Path) -> None:
        session = make(tmp_path, profile_token_end=12, part_iterations=4)
        for token in range(8):
            session.begin({"r": range(token, token + 1)})
            session.end()
        for _ in range(10):
            session.begin({"other": range(1)})
            session.end()
        for token in range(8, 12):
            session.begin({"r": range(token, token + 1)})
            session.end()
        session.close()
        parts = sorted(left(tmp_path), key=lambda manifest: manifest.part)
        assert [manifest.part for manifest in parts] == list(range(1, len(parts) + 1))
        assert {manifest.closed_by for manifest in parts} == {"part", "gap", "window"}
        assert [row.lo for manifest in parts for row in manifest.captured] == list(range(2, 12))

    def test_the_next_capture_begins_with_part_one(self, tmp_path: Path) -> None:
        session = make(tmp_path, profile_token_end=8, part_iterations=4, max_captures=2)
        rollout(session, 10)
        rollout(session, 10, "s")
        session.close()
        assert [manifest.part for manifest in left(tmp_path)] == [1, 2, 1, 2]


def test_the_manifest_tells_which_share_of_the_window_the_captures_hold(tmp_path: Path) -> None:
    session = make(tmp_path, track="any")
    for token in range(5):
        batch = {"a": range(token, token + 1)} | ({"b": range(1)} if token == 4 else {})
        session.begin(batch)
        session.end()
    (manifest,) = left(tmp_path)
    assert manifest.coverage == (2, 4)


class TestSkipCaptures:
    def test_the_manifest_says_how_many_times_the_window_went_by(self, tmp_path: Path) -> None:
        profiler = FakeProfiler()
        session = make(tmp_path, profiler, skip_captures=2)
        for request in "abcd":
            assert profiler.log == [] or request == "d", "nothing touches the device profiler before"
            rollout(session, 6, request)
        (manifest,) = left(tmp_path)
        assert (manifest.tracked, manifest.closed_by) == (["c"], "window")
        assert (manifest.skip_captures, manifest.skipped) == (2, 2)
        assert profiler.log == ["prepare", "start"]

    @pytest.mark.parametrize(
        ("rollouts", "said"),
        [
            ("", "were never reached in 1 iterations: the furthest response token seen is 0"),
            ("a", "were reached only 1 time in 7 iterations, and skip_captures=2 lets the first 2 pass by uncaptured"),
            ("ab", ": 2 times passed by uncaptured, as asked, and never reached after that in 13 iterations"),
        ],
    )
    def test_what_is_said_where_nothing_is_captured(self, tmp_path: Path, rollouts: str, said: str) -> None:
        session = make(tmp_path, skip_captures=2)
        for request in rollouts:
            rollout(session, 6, request)
        rollout(session, 1, "short")
        session.close()
        (manifest,) = left(tmp_path)
        assert [note.removeprefix("tokens [2, 4)").strip() for note in manifest.notes] == [said]
        assert (manifest.trace, manifest.skipped) == (None, len(rollouts))

    def test_each_start_counts_anew(self, tmp_path: Path) -> None:
        session = make(tmp_path, arm="request", skip_captures=1)
        for step in (1, 2):
            session.start(f"step{step}")
            rollout(session, 6, f"cold{step}")
            rollout(session, 6, f"warm{step}")
            session.stop()
        assert [(m.label, m.tracked, m.skipped) for m in left(tmp_path)] == [
            ("step1", ["warm1"], 1),
            ("step2", ["warm2"], 1),
        ]

    def test_a_start_while_a_window_goes_by_begins_anew(self, tmp_path: Path) -> None:
        session = make(tmp_path, arm="request", skip_captures=1)
        session.start()
        session.begin({"a": range(2, 3)})
        session.end()
        session.start()
        rollout(session, 6, "b")
        session.stop()
        assert {manifest.trace for manifest in left(tmp_path)} == {None}


def test_all_that_was_never_reached_says_why(tmp_path: Path) -> None:
    session = make(tmp_path, track="all")
    for token in range(5):
        session.begin({"a": range(token, token + 1), "b": range(token + 2, token + 3)})
        session.end()
    session.close()
    (manifest,) = left(tmp_path)
    assert "and at most 1 of 2 did" in manifest.notes[0]
    assert "furthest" not in manifest.notes[0]


def test_the_stalls_count_all_that_the_rollout_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of its own: preparing takes 100, starting 10, stopping 1,000, and a name 10,000: the placeholder of
    the first iteration has made it already."""
    now = [0]

    class Slow(FakeProfiler):
        def prepare(self) -> None:
            now[0] += 100

        def start(self) -> None:
            now[0] += 10

        def stop(self) -> FakeRecording:
            now[0] += 1_000
            return FakeRecording()

    def slowly(*args: Any) -> Path:
        now[0] += 10_000
        return reserve_stem(*args)

    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(form, "reserve_stem", slowly)
    session = make(tmp_path, Slow())
    rollout(session)
    session.close()
    (manifest,) = left(tmp_path)
    assert (manifest.opening_stall_ns, manifest.stall_ns) == (110, 1_000)
