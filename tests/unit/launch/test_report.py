"""The page at a job's end: what may go wrong with the process that makes it, none of which changes how the job ends."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from verl_profiler_conf import activate, decode_loop
from verl_profiler_conf.capture.manifest import Manifest, write_manifest
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.launch import report, termination
from verl_profiler_conf.launch.remote import RemoteFolder
from verl_profiler_conf.launch.report import warn_of_missing_extra, write_report

SETTINGS = Settings(windows=(TokenWindow(0, 4),), report="html", run_id="job")
BY_HAND = "`verl-profiler report {} --html report.html` makes one"
ENDLESS = "import sys; sys.stdin.read(); import time; time.sleep(600)"


@pytest.fixture(autouse=True)
def _libraries(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(report, "LIBRARIES", ())
    caplog.set_level(logging.INFO)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a capture of the job."""
    write_manifest(Manifest(TokenWindow(0, 4), "loop", "1", 0, "lead", run_id="job"), tmp_path / "loop_1")
    return tmp_path


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_reason_is_the_last_line_of_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(report, "_CODE", "import sys; print('noise', file=sys.stderr); sys.exit('the disk is full')")
    write_report(SETTINGS, folder)
    assert warnings(caplog) == [f"no report: the disk is full; {BY_HAND.format(folder)}"]


def test_process_that_cannot_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", str(folder / "no-python"))
    write_report(SETTINGS, folder)
    (line,) = warnings(caplog)
    assert line.startswith("no report: FileNotFoundError: ")


def test_slow_page_is_left_to_its_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(report, "_CODE", ENDLESS)
    monkeypatch.setattr(report, "PATIENCE_S", 0.0)
    write_report(SETTINGS, folder)
    (record,) = (record for record in caplog.records if "takes longer" in record.getMessage())
    pid = record.args[0]  # type: ignore[index]
    assert isinstance(pid, int)
    assert os.getsid(pid) == pid  # Ctrl-C and the end of the job's terminal are not its
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert warnings(caplog) == []


def test_slow_page_of_traces_that_move_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.setattr(report, "_CODE", ENDLESS)
    monkeypatch.setattr(report, "PATIENCE_S", 0.0)
    started = spy_on_processes(monkeypatch)
    write_report(SETTINGS, folder, RemoteFolder(f"local://{folder}/there"))
    assert [process.returncode for process in started] == [-signal.SIGKILL]
    assert warnings(caplog) == [f"no report: not done after 0 seconds; {BY_HAND.format(folder)}"]


def test_ctrl_c_gives_the_page_up_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(report, "_CODE", ENDLESS)
    started = spy_on_processes(monkeypatch)

    def interrupted(process: subprocess.Popen[str], **_: object) -> tuple[str, str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    write_report(SETTINGS, folder)
    assert warnings(caplog) == [f"no report: interrupted; {BY_HAND.format(folder)}"]
    assert [process.wait() for process in started] == [-signal.SIGKILL]


def spy_on_processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    started: list[subprocess.Popen[str]] = []
    start = report._start

    def spied(settings: Settings, folder: Path) -> subprocess.Popen[str]:
        started.append(start(settings, folder))
        return started[-1]

    monkeypatch.setattr(report, "_start", spied)
    return started


def test_sigterm_leaves_no_time_for_a_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = spy_on_processes(monkeypatch)
    monkeypatch.setattr(termination, "_deadline", object())
    write_report(SETTINGS, folder)
    assert started == []


@pytest.mark.parametrize(
    ("rank", "fields", "writes"),
    [
        (0, {"ranks": (0, 1)}, True),
        (1, {"ranks": (0, 1)}, False),
        (1, {"ranks": (1,)}, True),
        (0, {"ranks": (1,)}, False),
        (0, {"ranks": (7,)}, True),  # of the engine: torch.distributed has only two
        (0, {"all_ranks": True}, True),
        (1, {"all_ranks": True}, False),
        (0, {"report": None}, False),
    ],
)
def test_one_rank_of_torchrun_writes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int, fields: dict[str, object], writes: bool
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(report, "_CODE", "print('page.html')")
    started = spy_on_processes(monkeypatch)
    write_report(replace(SETTINGS, **fields), folder)  # type: ignore[arg-type]
    assert len(started) == writes


def test_missing_extra_is_said_at_the_start_and_not_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(report, "LIBRARIES", ("numpy_that_is_not_there", "sys"))
    warn_of_missing_extra(SETTINGS)
    write_report(SETTINGS, folder)
    needs = "report=html needs numpy_that_is_not_there: pip install '<wheel or clone of verl-profiler-conf>[report]'"
    assert [record.getMessage() for record in caplog.records] == [f"{needs}; the job goes on without a report"]
    caplog.clear()
    warn_of_missing_extra(replace(SETTINGS, report=None))
    assert caplog.records == []


def test_no_process_is_started_without_a_capture_of_the_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = spy_on_processes(monkeypatch)
    write_report(replace(SETTINGS, run_id="another"), folder)
    write_report(SETTINGS, folder / "absent")
    assert started == []


def test_page_moves_to_a_url_under_a_free_name(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    remote = RemoteFolder(f"local://{tmp_path}/there")
    for name in ("report.html", "report_2.html", "report_3.html"):
        page = tmp_path / "report.html"
        page.write_text(name)
        assert remote.move_file(page) == f"local://{tmp_path}/there/{name}"
        assert (tmp_path / "there" / name).read_text() == name
        assert not page.exists()


def test_page_goes_to_the_url_with_the_traces(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for module in ("fsspec", "numpy", "plotly", "torch"):
        pytest.importorskip(module)
    url = f"local://{tmp_path}/there"
    settings = replace(SETTINGS, windows=(TokenWindow(1, 3),), device="cpu", save_path=url)
    with activate(settings, run_dir=tmp_path / "here"), decode_loop(rows=1) as loop:
        for _ in range(4):
            with loop.iteration():
                pass
    assert f"report: {url}/report.html" in [record.getMessage() for record in caplog.records]
    text = (tmp_path / "there" / "report.html").read_text()
    assert "loop_tokens1-3_rank0" in text
    assert not (tmp_path / "here" / "profile").exists()
