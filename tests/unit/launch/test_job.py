"""A job from `activate` to its summary, in this process: compose() users, notebooks."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from claimed import leave_claim
from omegaconf import OmegaConf
from waiting import when_logged

from verl_profiler_conf import ConfigError, Settings, activate
from verl_profiler_conf.capture.capture_lines import capture_line
from verl_profiler_conf.capture.manifest import IterationRecord, Manifest, gather, write_manifest
from verl_profiler_conf.core.logs import forget_reasons, warn_once
from verl_profiler_conf.core.settings import ENV_NAME
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.engines import in_process
from verl_profiler_conf.launch import job
from verl_profiler_conf.launch import summary as launch_summary
from verl_profiler_conf.launch.options import NoWindow
from verl_profiler_conf.launch.summary import MOST_LINES, missing_lines
from verl_profiler_conf.schema.options import NpuWindow, TorchMemory, TorchWindow


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.delenv(ENV_NAME, raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    if job._active is not None:
        job._active.close()
    os.environ.pop(ENV_NAME, None)


def config(**fields: Any) -> Any:
    return OmegaConf.create({"profiler": OmegaConf.structured(TorchWindow(**fields))})


def published() -> dict[str, Any]:
    return json.loads(os.environ[ENV_NAME])  # type: ignore[no-any-return]


def test_window_is_in_force_inside(tmp_path: Path) -> None:
    with activate(config(profile_token_start=20, profile_token_end=80)) as running:
        assert published()["profile_token_start"] == 20
        assert published()["save_path"] == str(tmp_path / "profile")
        assert in_process.current_settings() == running.settings
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert ENV_NAME not in os.environ
    assert in_process.current_settings() is None
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_closing_twice_does_no_harm() -> None:
    running = activate(config(profile_token_end=8))
    running.close()
    running.close()
    assert ENV_NAME not in os.environ


def test_settings_do_as_well_as_a_config(tmp_path: Path) -> None:
    with activate(Settings(windows=(TokenWindow(0, 4),), run_id="mine"), run_dir=tmp_path / "run"):
        assert (published()["run_id"], published()["save_path"]) == ("mine", str(tmp_path / "run" / "profile"))


def test_bad_config_is_refused_and_changes_nothing() -> None:
    with pytest.raises(ConfigError, match=r"^profiler\.profile_token_end=0: "):
        activate(config(profile_token_end=0))
    assert ENV_NAME not in os.environ
    assert job._active is None


@pytest.mark.parametrize("off", [{}, {"a": NoWindow(profile_token_end=4)}, {"a": TorchWindow(enable=False)}])
def test_off_does_nothing(off: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    handler = signal.getsignal(signal.SIGTERM)
    with activate(OmegaConf.create({key: OmegaConf.structured(node) for key, node in off.items()})) as running:
        assert running.settings is None
        assert ENV_NAME not in os.environ
        assert in_process.current_settings() is None
        assert signal.getsignal(signal.SIGTERM) is handler
    assert caplog.messages == []


def test_a_new_window_takes_the_place_of_a_forgotten_one(caplog: pytest.LogCaptureFixture) -> None:
    os.environ[ENV_NAME] = mine = '{"profile_token_end": 2}'
    forgotten = activate(config(profile_token_end=8))
    with activate(config(profile_token_end=9)):
        assert published()["profile_token_end"] == 9
        forgotten.close()  # late: it is closed already
        assert published()["profile_token_end"] == 9
    assert "another window is active" in caplog.text
    assert os.environ.pop(ENV_NAME) == mine


def test_two_enabled_windows_are_refused() -> None:
    two = OmegaConf.create({"a": OmegaConf.structured(TorchWindow), "b": OmegaConf.structured(TorchMemory)})
    with pytest.raises(ConfigError, match=r"^b\.enable=True: a job has one window, and a is another"):
        activate(two)


def test_the_jobs_own_error_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_profiler_conf.capture.session.close_all", _fail)
    with pytest.raises(LookupError, match="the job's"):  # noqa: SIM117 - the inner one is under test
        with activate(config(profile_token_end=8, on_error="raise")):
            raise LookupError("the job's")
    assert ENV_NAME not in os.environ


def test_a_failure_of_ours_is_said_and_the_rest_is_done(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("verl_profiler_conf.capture.session.close_all", _fail)
    with activate(config(profile_token_end=8)):
        pass
    assert "profiling: OSError: disk full; the job goes on" in caplog.text
    assert ENV_NAME not in os.environ
    with pytest.raises(OSError, match="disk full"), activate(config(profile_token_end=8, on_error="raise")):
        pass
    assert ENV_NAME not in os.environ


def _fail(*_: Any) -> None:
    raise OSError("disk full")


def test_apps_own_sigterm_handler_is_left_alone() -> None:
    def own(*_: Any) -> None: ...

    before = signal.signal(signal.SIGTERM, own)
    try:
        with activate(config(profile_token_end=8)):
            assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_forked_child_dies_of_sigterm_as_ever_and_leaves_the_job_alone() -> None:
    with activate(config(profile_token_end=8)) as running:
        child = os.fork()
        if child == 0:
            running.close()  # as at its exit
            default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            os._exit(0 if default and ENV_NAME in os.environ else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert published()["profile_token_end"] == 8


def test_device_found_here_decides_what_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("verl_profiler_conf.capture.backends.detect.detect_device", lambda _: "cpu")
    with activate(OmegaConf.structured(TorchMemory(profile_token_end=8))):
        assert published()["device"] == "auto"  # an engine process elsewhere may have what this one lacks
    assert "torch_memory needs cuda, and this process finds none" in caplog.text
    caplog.clear()
    with activate(OmegaConf.structured(NpuWindow(profile_token_end=8, contents=["npu", "cpu"]))):
        pass
    assert "npu_window needs npu" in caplog.text
    assert "contents npu cannot be recorded on cpu" in caplog.text


def test_counters_only_is_told_how_well_they_hold(caplog: pytest.LogCaptureFixture) -> None:
    engine = {"name": "vllm", "version": "0.11.0"}
    with activate(OmegaConf.merge(config(mapping="iterations", profile_token_end=8), {"profiler": {"engine": engine}})):
        pass
    assert "has no step window for the gpu worker: it records from start to stop" in caplog.text


CUDA_FREE = """
import sys
from verl_profiler_conf import Settings, activate
from verl_profiler_conf.core.window import TokenWindow
with activate(Settings(windows=(TokenWindow(0, 4),))):
    print(sorted({"torch", "vllm", "sglang", "transformers", "ray", "rich"} & set(sys.modules)))
"""


def test_a_job_imports_no_engine_and_no_torch(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CUDA_FREE], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout == "[]\n", done.stderr


# -- the summary -------------------------------------------------------------------------------------------------------

WINDOW = TokenWindow(20, 24)
SETTINGS = Settings(windows=(WINDOW,), run_id="job", save_path="/p")


def manifest(rank: int = 0, *, tokens: int = 4, trace: str | None = "x.pt.trace.json.gz", **more: Any) -> Manifest:
    rows = [
        IterationRecord(index=30 + i, lo=20 + i, hi=21 + i, requests=8, tokens=8, wall_ns=1000) for i in range(tokens)
    ]
    fields = {"closed_by": "window", "opened_by": "window", "furthest_token": 23, "trace_bytes": 182044, **more}
    return Manifest(WINDOW, "vllm", "0.32.0", rank, "lead", rows=rows, trace=trace, run_id="job", **fields)


def summary(tmp_path: Path, caplog: pytest.LogCaptureFixture, *manifests: Manifest) -> list[tuple[str, str]]:
    folder = tmp_path / "captures"
    folder.mkdir()
    for number, each in enumerate(manifests):
        write_manifest(each, folder / f"capture_{number}")
    caplog.set_level(logging.INFO, logger="verl_profiler_conf.launch.summary")
    settings = Settings(windows=(WINDOW,), run_id="job", save_path=str(folder))
    with activate(settings):
        pass
    return [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "verl_profiler_conf.launch.summary"]


def test_one_line_says_window_iterations_path_and_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "captures" / "x.pt.trace.json.gz"
    line = f"tokens [20, 24): 4 iterations of vllm, rank 0 -> {path} (182,044 bytes)"
    assert summary(tmp_path, caplog, manifest()) == [("INFO", line)]


def test_captures_of_other_jobs_in_the_folder_are_not_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = manifest()
    other.run_id = "another"
    ((level, line),) = summary(tmp_path, caplog, other)
    assert level == "WARNING"
    assert "no engine reported an iteration" in line


@pytest.mark.parametrize(
    ("rank", "world", "ranks", "answers"),
    [
        ("0", "2", (1,), False),
        ("1", "2", (1,), True),
        ("0", "2", (5,), True),
        ("1", "2", (5,), False),
        ("0", "1", (3,), True),
        ("", "", (3,), True),
    ],
)
def test_of_several_ranks_the_ones_that_can_know_warn(
    rank: str,
    world: str,
    ranks: tuple[int, ...],
    answers: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    with activate(Settings(windows=(WINDOW,), ranks=ranks), run_dir=tmp_path):
        pass
    assert ("no engine reported an iteration" in caplog.text) is answers


def test_ranks_that_never_ran_are_named() -> None:
    settings = Settings(windows=(WINDOW,), ranks=(2, 3), run_id="job", save_path="/p")
    assert "no engine reported an iteration on rank 2 or 3;" in next(missing_lines(settings, [], unfinished=False))


def test_engines_own_counters_are_not_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="verl_profiler_conf.launch.summary")
    with activate(Settings(windows=(WINDOW,), mapping="iterations")):
        pass
    ((level, line),) = [
        (r.levelname, r.getMessage()) for r in caplog.records if r.name == "verl_profiler_conf.launch.summary"
    ]
    assert level == "INFO"
    assert "the engine's own profiler writes the captures" in line


def test_window_that_was_never_reached_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    note = "tokens [20, 24) were never reached in 19 iterations: the furthest response token seen is 17"
    unreached = [
        manifest(rank, tokens=0, trace=None, opened_by=None, closed_by=None, furthest_token=17 - rank, notes=[note])
        for rank in range(2)
    ]
    assert summary(tmp_path, caplog, *unreached) == [("WARNING", f"{note}; no trace was written")]


def test_reached_on_one_rank_is_reached(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unreached = manifest(1, tokens=0, trace=None, opened_by=None, closed_by=None, notes=["never"])
    assert [level for level, _ in summary(tmp_path, caplog, manifest(), unreached)] == ["INFO"]


def test_many_captures_do_not_flood_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = summary(tmp_path, caplog, *(manifest(rank) for rank in range(MOST_LINES + 3)))
    assert len(lines) == MOST_LINES + 1
    assert lines[-1][1] == f"and 3 more captures in {tmp_path / 'captures'}"


@pytest.mark.parametrize(
    ("closed_by", "why"),
    [
        ("request_end", "the response ended"),
        ("stop_profile", "stop_profile was called"),
        ("job_end", "the job ended"),
        ("error", "a failure ended the capture"),
    ],
)
def test_capture_that_ended_early_is_a_warning_with_both_ranges(
    closed_by: str, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ((level, line),) = summary(tmp_path, caplog, manifest(tokens=2, closed_by=closed_by, notes=["one note"]))
    assert level == "WARNING"
    assert line.startswith(f"captured tokens 20-21 of [20, 24): {why} after token 21; 2 iterations of vllm, rank 0 -> ")
    assert line.endswith("(182,044 bytes); one note")


def test_capture_that_holds_what_was_asked_for_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    capped = manifest(tokens=2, closed_by="max_iterations")
    whole = manifest(closed_by="request_end")
    endless = replace(manifest(tokens=2, closed_by="request_end"), window=TokenWindow(20, None))
    stretch = replace(manifest(tokens=2, closed_by="request_end"), track="any")
    lines = summary(tmp_path, caplog, capped, whole, endless, stretch)
    assert [level for level, line in lines if line.startswith("tokens [20, ")] == ["INFO"] * 4
    assert [line.endswith("ended by max_iterations") for _, line in lines].count(True) == 1


def test_a_reason_that_the_log_has_given_is_not_given_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reason = "no capture: device: cuda, but torch sees no GPU"
    forget_reasons()
    lost = manifest(0, tokens=0, trace=None, opened_by=None, notes=[reason])
    assert list(missing_lines(SETTINGS, [lost], unfinished=False)) == [
        f"tokens [20, 24): {reason}; no trace was written"
    ]
    warn_once(logging.getLogger("verl_profiler_conf.test"), f"{reason}; the job goes on", reason=reason)
    assert list(missing_lines(SETTINGS, [lost], unfinished=False)) == [
        "tokens [20, 24): no trace was written, for the reason that this log gave"
    ]
    forget_reasons()


def test_an_engine_that_ran_on_another_rank_is_named(tmp_path: Path) -> None:
    settings = Settings(windows=(WINDOW,), ranks=(3,), run_id="job", save_path=str(tmp_path))
    in_process.put_in_force(settings)
    try:
        assert in_process.open_loop("transformers", "5.0") is None
        (line,) = missing_lines(settings, [], unfinished=False)
    finally:
        in_process.put_in_force(None)
    assert line.startswith("tokens [20, 24): no capture, because transformers ran on rank 0, and ranks=[3] asks for")


def test_a_device_that_this_process_does_not_have_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "-1")
    with activate(Settings(windows=(WINDOW,), device="npu"), run_dir=tmp_path):
        pass
    assert "device=npu, and this process finds no such device" in caplog.text


@pytest.mark.parametrize(("times", "said"), [(1, "1 time passed by"), (2, "2 times passed by")])
def test_capture_says_how_many_times_the_window_went_by_first(times: int, said: str) -> None:
    line = capture_line(manifest(skip_captures=times, skipped=times), Path("/p"))
    assert line.endswith(f"(182,044 bytes); {said} uncaptured, as asked")
    assert "passed by" not in capture_line(manifest(skip_captures=times, skipped=times, part=2), Path("/p"))


def test_lost_trace_is_not_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lost = manifest(trace=None, closed_by="error", notes=["the trace could not be written: disk full"])
    ((level, line),) = summary(tmp_path, caplog, lost)
    assert level == "WARNING"
    assert "disk full" in line


def test_nsys_keeps_its_own_trace() -> None:
    line = capture_line(manifest(trace=None, backend="cudart"), Path("/p"))
    assert line == "tokens [20, 24): 4 iterations of vllm, rank 0, recorded by nsys"


def test_one_of_two_windows_missing_altogether() -> None:
    settings = Settings(windows=(WINDOW, TokenWindow(90, 99)), run_id="job", save_path="/p")
    assert list(missing_lines(settings, [manifest()], unfinished=False)) == [
        "tokens [90, 99): never reached; no trace was written"
    ]
    assert list(missing_lines(settings, [manifest()], unfinished=True)) == []


def test_each_arming_that_captured_nothing_is_named() -> None:
    """Armed by an RL framework, once a step; a replica that it does not profile has no label, and is not missed."""
    settings = Settings(windows=(WINDOW,), run_id="job", save_path="/p")
    step = manifest(label="step1")
    never_armed = manifest(tokens=0, trace=None, notes=["start_profile was never called"])
    assert list(missing_lines(settings, [step, never_armed], unfinished=False)) == []
    cut, short = (
        manifest(tokens=0, trace=None, label=f"step{number}", furthest_token=number, notes=[f"furthest {number}"])
        for number in (2, 3)
    )
    assert list(missing_lines(settings, [never_armed, step, cut, short], unfinished=False)) == [
        "step2, step3, tokens [20, 24): furthest 3; no trace was written"
    ]
    assert capture_line(step, Path("/p")).startswith("step1: tokens [20, 24): 4 iterations")


def test_trace_of_another_process_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its name is reserved, its manifest comes a moment after the job's end."""
    folder = tmp_path / "profile"
    folder.mkdir()
    code = (
        "import sys; from pathlib import Path; folder = Path(sys.argv[1]); text = sys.stdin.read();"
        "folder.joinpath('late.manifest.json').write_text(text);"
        "folder.joinpath('.late.reserved').unlink()"
    )
    caplog.set_level(logging.INFO, logger="verl_profiler_conf.launch.summary")
    engine = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, text=True)
    with (
        when_logged("waiting for 1 traces", lambda: engine.communicate(manifest().to_json())),
        activate(Settings(windows=(WINDOW,), run_id="job")),
    ):
        leave_claim(folder / "late", "job", pid=engine.pid)
    assert "waiting for 1 traces that engine processes are writing" in caplog.text
    assert engine.wait(60) == 0
    assert "tokens [20, 24): 4 iterations of vllm" in caplog.text


def replaced_while_waited_for(folder: Path, last: Manifest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The engine replaces its placeholder while the job waits. Returns how often the job looked."""
    looks = 0

    def look(*args: Any) -> list[Manifest]:
        nonlocal looks
        looks += 1
        if looks == 3:
            write_manifest(last, folder / "window", replace=True)
        return gather(*args)

    monkeypatch.setattr(launch_summary, "_has_workers", lambda: True)
    monkeypatch.setattr(launch_summary, "gather", look)
    monkeypatch.setattr(launch_summary, "GRACE_S", 60.0)
    with activate(Settings(windows=(WINDOW,), run_id="job", save_path=str(folder))):
        pass
    return looks


def test_a_placeholder_is_not_the_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine process writes one at its first iteration, and what became of the window a moment after its end."""
    waiting = manifest(tokens=0, trace=None, final=False, opened_by=None, notes=["waited for"])
    write_manifest(waiting, tmp_path / "window")
    never = manifest(tokens=0, trace=None, notes=["never reached in 7 iterations"])
    assert replaced_while_waited_for(tmp_path, never, monkeypatch) == 4, "until the last word came, and once to read it"
    assert "never reached in 7 iterations; no trace was written" in caplog.text
    assert "waited for" not in caplog.text.replace("waiting for", "")


def test_a_placeholder_of_a_process_that_was_killed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="verl_profiler_conf.launch.summary")
    killed = manifest(1, tokens=0, trace=None, final=False, opened_by=None, pid=2**22 + 1, notes=["was waited for"])
    write_manifest(killed, tmp_path / "rank_1")
    write_manifest(manifest(), tmp_path / "rank_0")
    assert replaced_while_waited_for(tmp_path, manifest(), monkeypatch) == 2, "once to wait, once to read"
    assert "tokens [20, 24): 4 iterations of vllm" in caplog.text
    assert "tokens [20, 24), part 1, rank 1: was waited for" in caplog.text, "the other rank's capture is not its own"


def test_each_process_that_was_lost_is_named_with_its_window(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lost = [
        manifest(
            rank, tokens=0, trace=None, final=False, pid=2**22 + rank, notes=[f"a capture was open in process {rank}"]
        )
        for rank in (0, 1)
    ]
    assert (
        "WARNING",
        "tokens [20, 24): a capture was open in process 0; a capture was open in process 1; no trace was written",
    ) in summary(tmp_path, caplog, *lost)


def test_leftovers_of_others_cost_nothing_and_hide_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder that jobs share: another one captures, and processes were killed while they wrote."""
    folder = tmp_path / "profile"
    folder.mkdir()
    caplog.set_level(logging.INFO)
    with activate(Settings(windows=(WINDOW,), run_id="job", ranks=(0,))):
        leave_claim(folder / "of_another", "another job")
        leave_claim(folder / "dead_of_another", "another job", pid=2**22 + 1)
        (folder / ".old.reserved").touch()
        os.utime(folder / ".old.reserved", (0, 0))
    assert "waiting for" not in caplog.text.replace("waiting for response tokens", "")
    assert "tokens [20, 24): no capture, because no engine reported an iteration" in caplog.text


def test_a_capture_that_its_process_did_not_finish_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    with activate(Settings(windows=(WINDOW,), run_id="job")):
        leave_claim(folder / "lost", "job", pid=2**22 + 1)
    assert f"captures that were not finished, because their process (pid {2**22 + 1}) ended before: lost" in caplog.text
    assert "still writing" not in caplog.text
    assert "no engine reported" not in caplog.text


def test_a_job_that_hangs_in_native_code_does_not_outlive_sigterm(tmp_path: Path) -> None:
    script = f"""
import hashlib, sys
from verl_profiler_conf.launch import sigterm_watch
from verl_profiler_conf.launch.job import activate
from verl_profiler_conf.core.settings import Settings

sigterm_watch.START_PATIENCE = 0.5
activate(Settings.from_mapping({{"profile_token_end": 4, "save_path": {str(tmp_path)!r}, "device": "cpu"}}))
def say(frame, event, function):
    if event == "c_call" and function is hashlib.pbkdf2_hmac:
        sys.setprofile(None)
        print("waiting", flush=True)

sys.setprofile(say)  # called as the last thing before the main thread is in C
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # minutes in C, without Python's lock
"""
    job = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    with job:
        assert job.stdout.readline() == "waiting\n"
        job.terminate()
        assert job.wait(60) == -signal.SIGTERM
