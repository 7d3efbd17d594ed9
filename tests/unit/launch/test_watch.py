"""A line as soon as a capture is on disk, once, and only of this job."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from verl_profiler_conf.capture.manifest import IterationRecord, Manifest, manifest_names, write_manifest
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.launch import watch
from verl_profiler_conf.launch.watch import Watcher


def manifest(*, rows: bool = True, **more: Any) -> Manifest:
    record = [IterationRecord(1, 20, 30, 1, 10, 1000)] if rows else []
    return Manifest(TokenWindow(20, 30), "vllm", "1", 0, "lead", rows=record, **{"run_id": "job", **more})


@pytest.fixture
def seen() -> list[Manifest]:
    return []


@pytest.fixture
def watcher(tmp_path: Path, seen: list[Manifest]) -> Watcher:
    return Watcher(tmp_path / "profile", "job", seen.append)


def test_each_capture_once(watcher: Watcher, seen: list[Manifest], tmp_path: Path) -> None:
    watcher.look()
    folder = tmp_path / "profile"
    folder.mkdir()
    for number in range(3):
        write_manifest(manifest(pid=number), folder / f"c_{number}")
        os.utime(folder, (number, number))  # two of them may come in the same tick of the clock
        watcher.look()
        watcher.look()
    assert [each.pid for each in seen] == [0, 1, 2]


def test_other_jobs_and_windows_that_were_not_reached_are_not_reported(
    watcher: Watcher, seen: list[Manifest], tmp_path: Path
) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    write_manifest(manifest(run_id="another"), folder / "a_1")
    write_manifest(manifest(rows=False), folder / "b_1")
    (folder / "c_1.manifest.json").write_text("{")
    watcher.look()
    assert seen == []
    (folder / "b_1.manifest.json").unlink()
    write_manifest(manifest(), folder / "b_1")  # the same name, captured after all
    watcher.look()
    assert len(seen) == 1


def test_an_unchanged_folder_is_not_read(
    watcher: Watcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[Manifest]
) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    write_manifest(manifest(run_id="another"), folder / "a_1")
    reads: list[Path] = []
    monkeypatch.setattr(watch, "manifest_names", lambda folder: reads.append(folder) or manifest_names(folder))
    for _ in range(5):
        watcher.look()
    assert reads == [folder] * 2, "a file may come in the same tick of the clock, so it is read once more"


def test_a_capture_that_comes_in_the_same_tick_of_the_clock_is_seen(
    watcher: Watcher, seen: list[Manifest], tmp_path: Path
) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    write_manifest(manifest(pid=1), folder / "a_1")
    watcher.look()
    ticked = folder.stat()
    write_manifest(manifest(pid=2), folder / "b_1")
    os.utime(folder, ns=(ticked.st_atime_ns, ticked.st_mtime_ns))
    watcher.look()
    assert [each.pid for each in seen] == [1, 2]


def test_from_a_thread_until_it_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "EVERY_S", 0.01)
    found, looked = threading.Event(), []
    watcher = Watcher(tmp_path, "job", lambda _: found.set(), lambda: looked.append(1))
    watcher.start()
    write_manifest(manifest(), tmp_path / "c_1")
    assert found.wait(60)
    watcher.stop()
    assert not watcher._thread.is_alive()
    assert looked


def test_a_look_that_fails_is_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "EVERY_S", 0.01)
    found, failed = threading.Event(), []

    def fail_once() -> None:
        if not failed:
            failed.append(1)
            raise OSError("stale file handle")

    watcher = Watcher(tmp_path, "job", lambda _: found.set(), fail_once)
    write_manifest(manifest(), tmp_path / "c_1")
    watcher.start()
    assert found.wait(60)
    watcher.stop()


def test_never_started_it_stops(watcher: Watcher) -> None:
    watcher.stop()
    watcher.start()
    watcher._thread.join(60)
    assert not watcher._thread.is_alive()
