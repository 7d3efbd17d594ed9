"""From raw trace to kept trace, without a profiler."""

from __future__ import annotations

import gc
import gzip
import io
import json
import os
import zlib
from pathlib import Path

import pytest
from made_trace import MadeTrace

from verl_profiler_conf.capture.backends import raw_trace, tracefile
from verl_profiler_conf.capture.backends.base import IterationCounts
from verl_profiler_conf.capture.backends.raw_trace import RawFile, RawInMemory, export_name
from verl_profiler_conf.capture.backends.tracefile import Packed, pack


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "raw.json"
    trace = MadeTrace(name=str(path))
    for index in range(5):
        trace.iteration(index, kernels=2, copies=1)
    trace.annotation("a range of the job")
    path.write_text(trace.text())
    return path


@pytest.fixture
def raw(path: Path) -> RawFile:
    return RawFile(path, str(path))


def text_of(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode()


RENAMES = {f"response_tokens[{index}:{index + 1}) iter={index} reqs=8": f"short {index}" for index in (0, 3)}


@pytest.mark.parametrize("chunk", [7, 64, 300, 1 << 20])
def test_whatever_the_size_of_a_chunk(
    chunk: int, raw: RawFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracefile, "_CHUNK", chunk)
    original = raw.path.read_text()
    packed = pack(raw, tmp_path / "t.gz", RENAMES)
    assert packed.counts.device_events == 15
    assert packed.flaw is None
    expected = original.replace(str(raw.path), str(tmp_path / "t.gz"))
    for old, new in RENAMES.items():
        expected = expected.replace(f'"{old}"', f'"{new}"')
    assert text_of(tmp_path / "t.gz") == expected


@pytest.mark.parametrize("chunk", [3000, 64 * 1024])
@pytest.mark.parametrize("head", [0, 10_000, 200_000])
def test_pieces_stay_small_whatever_stands_before_the_events(
    chunk: int, head: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracefile, "_CHUNK", chunk)
    text = path.read_text().replace("{", '{"mine": "' + "x" * head + '",', 1).encode()
    pieces = list(tracefile._pieces(io.BytesIO(text)))
    assert b"".join(piece for piece, _, _ in pieces) == text
    assert [opens for _, opens, _ in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [closes for _, _, closes in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces[0][0]) <= (head + chunk + 1000 if head else 4096)
    assert len(pieces[-1][0]) < 4096 + 1000
    assert max(len(piece) for piece, _, _ in pieces[1:]) < chunk + 5000
    assert all(piece.startswith(b"{") for piece, _, _ in pieces[1:])


def test_counts_are_of_the_names_that_the_trace_bears(raw: RawFile, tmp_path: Path) -> None:
    renames = {"response_tokens[0:1) iter=0 reqs=8": "response_tokens[0:0) iter=0 reqs=8"}
    assert sorted(pack(raw, tmp_path / "t.gz", renames).counts.iterations) == [0, 1, 2, 3, 4]


def test_names_that_begin_differently(raw: RawFile, tmp_path: Path) -> None:
    pack(raw, tmp_path / "t.gz", {"a range of the job": "its range", "absent": "x"} | RENAMES)
    text = text_of(tmp_path / "t.gz")
    assert '"name": "its range"' in text
    assert '"name": "short 3"' in text
    assert "absent" not in text


def test_events_of_a_device_are_not_looked_for_where_none_can_be(raw: RawFile, tmp_path: Path) -> None:
    packed = pack(raw, tmp_path / "t.gz", {}, records_device=False)
    assert packed.counts.iterations[0] == IterationCounts(operators=2)
    assert packed.counts.device_events == 0


def test_from_memory(path: Path, tmp_path: Path) -> None:
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    raw = RawInMemory(packer.compress(path.read_bytes()) + packer.flush(), str(path), b"}")
    assert pack(raw, tmp_path / "t.gz", {}).counts.device_events == 15
    assert json.loads(text_of(tmp_path / "t.gz"))["traceName"] == str(tmp_path / "t.gz")


def test_cut_short(raw: RawFile, tmp_path: Path) -> None:
    raw.path.write_bytes(raw.path.read_bytes()[:200])
    with pytest.raises(OSError, match="cut short after 200 bytes"):
        pack(raw, tmp_path / "t.gz", {})
    assert not (tmp_path / "t.gz").exists()


def test_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="wrote no trace"):
        pack(RawFile(tmp_path / "raw.json", "raw.json"), tmp_path / "t.gz", {})


def test_never_over_an_older_file(raw: RawFile, tmp_path: Path) -> None:
    (tmp_path / "t.gz").write_text("old")
    with pytest.raises(FileExistsError):
        pack(raw, tmp_path / "t.gz", {})
    assert (tmp_path / "t.gz").read_text() == "old"


def test_a_refusing_disk_leaves_nothing_and_the_raw_trace_can_be_packed_again(
    raw: RawFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            pack(raw, tmp_path / "t.gz", {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["raw.json"]
    assert pack(raw, tmp_path / "t.gz", {}).counts.device_events == 15


def test_a_raw_file_goes_with_its_object(path: Path) -> None:
    raw = RawFile(path, "raw.json")
    path.with_name("raw.json.tmp").touch()
    del raw
    gc.collect()
    assert list(path.parent.iterdir()) == []


def test_a_fork_leaves_the_raw_file_of_its_parent(path: Path) -> None:
    raw_trace._unlink(path, os.getpid() + 1)
    assert path.exists()


class TestTextsThatAreNoJson:
    """What a job's own ranges and a folder's name may hold."""

    def _pack(self, path: Path, name: str, target: Path) -> Packed:
        text = path.read_text().replace("a range of the job", name, 1)
        path.write_text(text)
        return pack(RawFile(path, str(path)), target, {})

    @pytest.mark.parametrize("name", ['a"b', 'say "hi" twice', '"', "half \\", "a\\nb", "é", "{}[],:"])
    def test_names_come_out_as_they_were(self, name: str, path: Path, tmp_path: Path) -> None:
        written = name.replace("\\", "\\\\") if "\\" in name else name  # of quotes alone Kineto takes no care
        packed = self._pack(path, written, tmp_path / "t.gz")
        assert packed.flaw is None
        assert name in {event["name"] for event in json.loads(text_of(tmp_path / "t.gz"))["traceEvents"]}
        assert packed.counts.iterations[4].kernels == 2

    @pytest.mark.parametrize("name", ["bad escape \\x", "control \x01"])
    def test_a_flaw_that_is_not_mended_is_told(self, name: str, path: Path, tmp_path: Path) -> None:
        packed = self._pack(path, name, tmp_path / "t.gz")
        assert packed.flaw is not None
        with pytest.raises(ValueError, match=r"escape|control"):
            json.loads(text_of(tmp_path / "t.gz"))

    @pytest.mark.parametrize("place", ['"deviceProperties": [', '"traceName": '])
    @pytest.mark.parametrize("length", [0, 10_000])
    def test_a_flaw_before_or_after_the_events_is_told(
        self, place: str, length: int, path: Path, tmp_path: Path
    ) -> None:
        """What a job has put there itself: letters alone do not show that they are wrong."""
        text = path.read_text()
        assert place in text
        path.write_text(text.replace(place, f'"mine": "{"x" * length}"quoted"", {place}'))
        assert pack(RawFile(path, str(path)), tmp_path / "t.gz", {}).flaw is not None

    def test_bytes_that_are_not_utf8(self, path: Path, tmp_path: Path) -> None:
        path.write_bytes(path.read_bytes().replace(b"aten::add", b"aten::\xff", 1))
        assert "utf-8" in (pack(RawFile(path, str(path)), tmp_path / "t.gz", {}).flaw or "")

    @pytest.mark.parametrize(
        "name", [b'quo"te', b"back\\slash", b"new\nline", b"tab\t", b"not utf8 \xff", b"per%20cent"]
    )
    def test_folders(self, name: bytes, path: Path, tmp_path: Path) -> None:
        folder = tmp_path / os.fsdecode(name)
        with export_name(folder) as (file, export):
            Path(export).write_text(path.read_text().replace(str(path), export))
        packed = pack(RawFile(file, export), folder / "t.gz", {})
        assert packed.flaw is None
        assert json.loads(text_of(folder / "t.gz"))["traceName"] == str(folder / "t.gz")


def test_without_proc_a_plain_folder_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda _: False)
    with export_name(tmp_path / 'quo"te') as (file, export):
        assert str(file) == export
        assert '"' not in export
