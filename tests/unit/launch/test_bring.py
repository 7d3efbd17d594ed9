"""A capture of another node in the job's folder: whole or not at all, and never over an older file. Two folders stand
for two disks; the nodes of a real cluster are in tests/real/ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from claimed import leave_claim

from verl_profiler_conf.capture.manifest import IterationRecord, Manifest, write_manifest
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.launch import bring as module
from verl_profiler_conf.launch.bring import bring
from verl_profiler_conf.launch.on_node import RemoteCapture, digest, list_captures, read_chunk
from verl_profiler_conf.tools.report.captures import read_captures

STEM = "vllm_tokens20-30_rank0_pid42_1"
TRACE = f"{STEM}.pt.trace.json"
CONTENT = json.dumps({"traceEvents": []}).encode()


@pytest.fixture
def there(tmp_path: Path) -> Path:
    folder = tmp_path / "there"
    folder.mkdir()
    return folder


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


def leave(folder: Path, stem: str = STEM, *, content: bytes | None = CONTENT, **more: Any) -> Manifest:
    """A capture as an engine leaves it; without `content`, a window that was not reached."""
    trace = None if content is None else f"{stem}.pt.trace.json"
    rows = [] if content is None else [IterationRecord(1, 20, 30, 1, 10, 1000)]
    fields = {"trace": trace, "trace_bytes": len(content or b""), "rows": rows, "run_id": "job", **more}
    manifest = Manifest(TokenWindow(20, 30), "vllm", "1", 0, "lead", **fields)
    if trace is not None and content is not None and fields["trace"] == trace:
        (folder / trace).write_bytes(content)
    write_manifest(manifest, folder / stem)
    return manifest


def only(folder: Path, **more: Any) -> RemoteCapture:
    (capture,) = list_captures(str(folder), "job", more.pop("known", {}), 0.0, **more).captures
    return capture


def from_node(folder: Path) -> Callable[[str, int, int], bytes]:
    return lambda name, offset, size: read_chunk(str(folder), name, offset, size)


def brought(there: Path, here: Path, *, limit: int = 2**30, read: Any = None) -> Manifest | None:
    read = read or from_node(there)
    return bring(only(there), here, node="10.0.0.2", source=str(there), read=read, limit=limit)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class TestListing:
    def test_this_jobs_only(self, there: Path) -> None:
        leave(there)
        leave(there, "other_1", run_id="another")
        (there / "broken.manifest.json").write_text("{")
        capture = only(there)
        assert (capture.name, capture.size) == (f"{STEM}.manifest.json", len(CONTENT))
        assert [file.name for file in capture.files] == [TRACE]

    def test_what_the_driver_has_is_left_out(self, there: Path) -> None:
        leave(there)
        capture = only(there)
        known = {capture.name: digest(capture.manifest)}
        assert list_captures(str(there), "job", known, 0.0).captures == ()
        assert only(there, known={capture.name: "another"}) == capture

    def test_captures_only(self, there: Path) -> None:
        leave(there, content=None)
        assert only(there).files == ()
        assert list_captures(str(there), "job", {}, 0.0, True).captures == ()

    def test_no_folder_no_captures(self, tmp_path: Path) -> None:
        assert list_captures(str(tmp_path / "none"), "job", {}, 0.0).captures == ()

    def test_a_capture_that_is_being_written_is_waited_for(self, there: Path) -> None:
        """By a process of this node; one whose process has gone is not."""
        writer = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, text=True
        )
        stem = STEM.replace("pid42", f"pid{writer.pid}")
        leave_claim(there / stem, "job", pid=writer.pid)
        gone = STEM.replace("pid42", f"pid{2**22 + 1}")
        leave_claim(there / gone, "job", pid=2**22 + 1)
        leave_claim(there / "another", "another job", pid=writer.pid)
        code = (
            "import sys; from verl_profiler_conf.launch.on_node import list_captures;"
            "print('asks', flush=True); print(list_captures(sys.argv[1], 'job', {}, 60.0))"
        )
        asking = subprocess.Popen([sys.executable, "-c", code, str(there)], stdout=subprocess.PIPE, text=True)
        assert asking.stdout is not None
        assert asking.stdout.readline() == "asks\n"
        leave(there, stem)
        writer.communicate()
        listing = asking.communicate(timeout=60)[0]
        assert stem in listing
        assert f"unfinished=('{gone}',)" in listing


class TestBringing:
    def test_manifest_and_trace_arrive_as_they_were(self, there: Path, here: Path) -> None:
        left = leave(there)
        found = brought(there, here)
        assert found is not None
        assert files(here) == [f"{STEM}.manifest.json", TRACE]
        assert (here / TRACE).read_bytes() == CONTENT
        left.node = "10.0.0.2"
        assert Manifest.from_json((here / f"{STEM}.manifest.json").read_text()) == found == left
        assert files(there) == [f"{STEM}.manifest.json", TRACE], "a copy"

    def test_a_shared_folder_holds_it_already(self, there: Path) -> None:
        leave(there)
        assert brought(there, there) is None
        assert files(there) == [f"{STEM}.manifest.json", TRACE]

    def test_the_node_that_a_manifest_names_stays(self, there: Path, here: Path) -> None:
        leave(there, node="host-7")
        assert brought(there, here).node == "host-7"  # type: ignore[union-attr]

    @pytest.mark.parametrize("taken", [f"{STEM}.manifest.json", TRACE, f".{STEM}.reserved"])
    def test_a_name_that_is_taken_gives_another_number(self, taken: str, there: Path, here: Path) -> None:
        """Nodes count their process ids for themselves."""
        leave(there)
        here.mkdir()
        (here / taken).write_text("mine")
        found = brought(there, here)
        assert found is not None
        assert (here / taken).read_text() == "mine"
        assert found.trace == TRACE.replace("_1.", "_2.")
        assert (here / found.trace).read_bytes() == CONTENT
        assert (here / f"{STEM[:-1]}2.manifest.json").exists()

    def test_a_window_that_was_not_reached(self, there: Path, here: Path) -> None:
        leave(there, content=None)
        assert brought(there, here).trace is None  # type: ignore[union-attr]
        assert files(here) == [f"{STEM}.manifest.json"]

    def test_a_trace_that_is_a_directory(self, there: Path, here: Path) -> None:
        trace = f"{STEM}_ascend_pt"
        for name in ("a/b.bin", "c.json"):
            (there / trace / name).parent.mkdir(parents=True, exist_ok=True)
            (there / trace / name).write_text(name)
        leave(there, trace=trace)
        assert brought(there, here).trace == trace  # type: ignore[union-attr]
        assert (here / trace / "a" / "b.bin").read_text() == "a/b.bin"
        assert files(here) == [f"{STEM}.manifest.json", trace]
        assert files(here / trace) == ["a", "c.json"]

    def test_in_chunks(self, there: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "CHUNK", 5)
        leave(there)
        brought(there, here)
        assert (here / TRACE).read_bytes() == CONTENT

    @pytest.mark.parametrize("limit", [0, len(CONTENT) - 1, len(CONTENT)])
    def test_beyond_the_limit_the_manifest_says_where_the_trace_is(self, limit: int, there: Path, here: Path) -> None:
        leave(there)
        found = brought(there, here, limit=limit)
        assert found is not None
        if limit == len(CONTENT):
            assert (found.trace, found.left_at) == (TRACE, None)
            return
        assert (found.trace, found.left_at) == (None, f"10.0.0.2:{there}/{TRACE}")
        size = len(CONTENT)
        why = f"{size} bytes, and {limit} bytes of gather_limit are left"
        assert found.notes == [f"the trace was not brought from its node ({why})"]
        assert files(here) == [f"{STEM}.manifest.json"]
        reading = read_captures([here])
        assert (len(reading.captures), reading.problems) == (1, ()), "the report takes it for no broken file"

    def test_a_node_that_goes_away_leaves_nothing_half(
        self, there: Path, here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "CHUNK", 5)
        leave(there)

        def read(name: str, offset: int, size: int) -> bytes:
            if offset:
                raise RuntimeError("gone")
            return read_chunk(str(there), name, offset, size)

        found = brought(there, here, read=read)
        assert found is not None
        assert found.left_at == f"10.0.0.2:{there}/{TRACE}"
        assert "the node stopped answering: RuntimeError" in found.notes[0]
        assert files(here) == [f"{STEM}.manifest.json"]

    def test_a_file_that_shrinks_is_not_taken(self, there: Path, here: Path) -> None:
        leave(there)
        found = brought(there, here, read=lambda name, offset, size: b"")
        assert found is not None
        assert "became shorter" in found.notes[0]
        assert files(here) == [f"{STEM}.manifest.json"]

    @pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
    def test_a_folder_that_cannot_be_written(self, there: Path, here: Path) -> None:
        leave(there)
        here.mkdir(mode=0o500)
        with pytest.raises(PermissionError):
            brought(there, here)

    def test_no_manifest_no_claim(self, there: Path, here: Path) -> None:
        with pytest.raises(ValueError, match="not a manifest"):
            bring(RemoteCapture(f"{STEM}.manifest.json", b"{", ()), here, node="n", source="/", read=None, limit=0)  # type: ignore[arg-type]
        assert not here.exists()
