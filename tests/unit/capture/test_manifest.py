"""Manifests: as JSON and back, names that nobody else has, files whole or not at all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from verl_profiler_conf.capture import manifest as module
from verl_profiler_conf.capture.claims import reserve_stem
from verl_profiler_conf.capture.files import manifest_path, publish, stem, write_atomically
from verl_profiler_conf.capture.manifest import IterationRecord, Manifest, gather, write_manifest
from verl_profiler_conf.core.window import TokenWindow

WINDOW = TokenWindow(20, 80)


def a_manifest(**more: object) -> Manifest:
    fields: dict[str, object] = {
        "window": WINDOW,
        "engine": "vllm",
        "engine_version": "0.32.0",
        "rank": 0,
        "track": "lead",
        "rows": [
            IterationRecord(25, 20, 21, 8, 8, 1_500_000, request="a"),
            IterationRecord(26, 21, 21, 8, 7, 900_000, gap=True),
        ],
    }
    return Manifest(**{**fields, **more})  # type: ignore[arg-type]


class TestJson:
    @pytest.mark.parametrize("window", [WINDOW, TokenWindow(40, None)])
    def test_comes_back_the_same(self, window: TokenWindow) -> None:
        manifest = a_manifest(window=window, tracked=["a", "ü"], notes=["one", "two"], trace="x.gz", label="step 7")
        assert Manifest.from_json(manifest.to_json()) == manifest

    def test_without_rows(self) -> None:
        manifest = a_manifest(rows=[])
        assert json.loads(manifest.to_json())["rows"] == []
        assert Manifest.from_json(manifest.to_json()) == manifest

    def test_a_row_is_a_line(self) -> None:
        lines = [line for line in a_manifest().to_json().splitlines() if '"wall_ns"' in line]
        assert [json.loads(line.strip().rstrip(","))["index"] for line in lines] == [25, 26]

    def test_never_reached_has_a_null_trace(self) -> None:
        raw = json.loads(a_manifest(rows=[], furthest_token=47).to_json())
        assert (raw["trace"], raw["opened_by"], raw["furthest_token"]) == (None, None, 47)

    def test_fields_of_a_newer_version_are_passed_over(self) -> None:
        raw = json.loads(a_manifest().to_json())
        raw["colour"] = "green"
        raw["rows"][0]["taste"] = "sweet"
        assert Manifest.from_json(json.dumps(raw)).rows == a_manifest().rows

    @pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense", '{"window": 3}', '{"window": [5, 2]}'])
    def test_anything_else_is_refused_in_one_line(self, text: str) -> None:
        with pytest.raises(ValueError, match="not a manifest") as caught:
            Manifest.from_json(text)
        assert "\n" not in str(caught.value)

    def test_captured_leaves_gaps_out(self) -> None:
        assert [row.index for row in a_manifest().captured] == [25]


class TestNames:
    def test_as_in_the_contract(self) -> None:
        assert stem("vllm", WINDOW, 3, 77) == "vllm_tokens20-80_rank3_pid77"
        assert stem("vllm", TokenWindow(40, None), 0, 77) == "vllm_tokens40-end_rank0_pid77"

    def test_with_a_label(self) -> None:
        assert stem("vllm", WINDOW, 0, 1, "step7") == "vllm_tokens20-80_rank0_pid1_step7"

    @pytest.mark.parametrize("label", ["../../etc", "a/b", "a\x00b", "..", "-rf", "x" * 500])
    def test_a_label_never_leaves_the_folder(self, label: str, tmp_path: Path) -> None:
        name = stem("vllm", WINDOW, 0, 1, label)
        assert "/" not in name
        assert "\x00" not in name
        assert not name.startswith((".", "-"))
        write_manifest(a_manifest(), reserve_stem(tmp_path, name))

    def test_numbers_rise(self, tmp_path: Path) -> None:
        names = []
        for _ in range(3):
            path = reserve_stem(tmp_path, "s")
            names.append(path.name)
            write_manifest(a_manifest(), path)
        assert names == ["s_1", "s_2", "s_3"]

    @pytest.mark.parametrize("left", ["s_1.pt.trace.json.gz", "s_1.manifest.json", "s_1_ascend_pt/x", "s_1.pickle"])
    def test_what_exists_is_never_reused(self, left: str, tmp_path: Path) -> None:
        old = tmp_path / left
        old.parent.mkdir(exist_ok=True)
        old.write_text("old")
        assert reserve_stem(tmp_path, "s").name == "s_2"
        assert old.read_text() == "old"

    def test_numbers_go_on_after_the_highest(self, tmp_path: Path) -> None:
        (tmp_path / "s_10.manifest.json").write_text("old")
        (tmp_path / "s_2_40.manifest.json").write_text("of the name s_2")
        assert reserve_stem(tmp_path, "s").name == "s_11"

    def test_given_back_where_the_manifest_cannot_be_written(self, tmp_path: Path) -> None:
        path = reserve_stem(tmp_path, "s")
        manifest_path(path).write_text("older")
        with pytest.raises(FileExistsError):
            write_manifest(a_manifest(), path)
        assert [entry.name for entry in tmp_path.iterdir()] == ["s_1.manifest.json"]

    def test_reserved_twice_before_anything_is_written(self, tmp_path: Path) -> None:
        assert reserve_stem(tmp_path, "s") != reserve_stem(tmp_path, "s")

    def test_rivals_never_share_a_name(self, tmp_path: Path) -> None:
        taken: list[str] = []

        def claim() -> None:
            for _ in range(20):
                path = reserve_stem(tmp_path, "s")
                taken.append(path.name)
                write_manifest(a_manifest(), path)

        threads = [threading.Thread(target=claim) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(taken)) == 80
        assert len(list(tmp_path.glob("s_*.manifest.json"))) == 80

    def test_nothing_else_stays_in_the_folder(self, tmp_path: Path) -> None:
        path = reserve_stem(tmp_path, "s")
        write_manifest(a_manifest(), path)
        assert [entry.name for entry in tmp_path.iterdir()] == ["s_1.manifest.json"]


class TestWriting:
    def test_never_over_an_older_file(self, tmp_path: Path) -> None:
        target = tmp_path / "a.json"
        target.write_bytes(b"old")
        with pytest.raises(FileExistsError):
            write_atomically(target, b"new")
        assert target.read_bytes() == b"old"
        assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]

    def test_replacing_is_asked_for(self, tmp_path: Path) -> None:
        path = tmp_path / "s_1"
        write_manifest(a_manifest(furthest_token=1), path)
        write_manifest(a_manifest(furthest_token=2), path, replace=True)
        assert Manifest.from_json(manifest_path(path).read_text()).furthest_token == 2

    def test_without_hard_links(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise PermissionError("no links here")

        monkeypatch.setattr(os, "link", refuse)
        write_atomically(tmp_path / "a", b"new")
        assert (tmp_path / "a").read_bytes() == b"new"
        (tmp_path / "b").write_bytes(b"finished")
        with pytest.raises(FileExistsError):
            publish(tmp_path / "b", tmp_path / "a")
        assert (tmp_path / "a").read_bytes() == b"new"

    def test_a_refusing_disk_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write_atomically(tmp_path / "a", b"new")
        assert list(tmp_path.iterdir()) == []

    def test_killed_while_writing_leaves_no_half_file(self, tmp_path: Path) -> None:
        script = """
import os, signal, sys
from pathlib import Path
from verl_profiler_conf.capture import files
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
files.write_atomically(Path(sys.argv[1]), b"x" * 1_000_000)
"""
        done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "a.json")], check=False)
        assert done.returncode == -9
        assert not (tmp_path / "a.json").exists()


class TestGather:
    def test_one_run_oldest_first(self, tmp_path: Path) -> None:
        for number, (run, created) in enumerate([("r", "2"), ("other", "0"), ("r", "1")], 1):
            write_manifest(a_manifest(run_id=run, created=created), tmp_path / f"s_{number}")
        (tmp_path / "broken.manifest.json").write_text("{")
        assert [found.created for found in gather(tmp_path, "r")] == ["1", "2"]

    def test_rows_are_read_when_they_are_asked_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A job's end looks at thousands of manifests, and at the rows of a few."""
        for number in range(3):
            write_manifest(a_manifest(run_id="r"), tmp_path / f"s_{number}")
        write_manifest(a_manifest(run_id="r", rows=[]), tmp_path / "s_4")
        plain, read = module._records, []
        monkeypatch.setattr(module, "_records", lambda rows: read.append(len(rows)) or plain(rows))
        found = gather(tmp_path, "r")
        assert sorted(manifest.has_rows for manifest in found) == [False, True, True, True]
        assert read == []
        first = next(manifest for manifest in found if manifest.has_rows)
        assert first.rows == a_manifest().rows
        assert first.rows is first.rows
        assert read == [2]
        with pytest.raises(AttributeError, match="no_such_field"):
            _ = first.no_such_field

    def test_a_manifest_of_another_make_is_read_whole(self, tmp_path: Path) -> None:
        raw = json.loads(a_manifest(run_id="r").to_json())
        (tmp_path / "s.manifest.json").write_text(json.dumps(raw))
        (found,) = gather(tmp_path, "r")
        assert found.rows == a_manifest().rows

    def test_no_folder_no_manifests(self, tmp_path: Path) -> None:
        assert gather(tmp_path / "missing", "r") == []


def test_defaults_say_where_and_when() -> None:
    manifest = a_manifest()
    assert manifest.pid == os.getpid()
    assert manifest.host
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", manifest.created)
