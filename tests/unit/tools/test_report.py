"""Reading traces and manifests: whole, or one line that names the file and what is wrong with it."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from verl_profiler_conf.capture.manifest import IterationRecord, Manifest, write_manifest
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.tools.report.captures import read_captures
from verl_profiler_conf.tools.report.table import captures_table, iterations_table
from verl_profiler_conf.tools.report.trace import TraceError, read_trace


def event(lo: int, hi: int, iteration: int) -> dict[str, Any]:
    name = f"response_tokens[{lo}:{hi}) iter={iteration} reqs=2"
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": iteration * 10.0, "dur": 5}


def trace_bytes(*events: dict[str, Any]) -> bytes:
    return json.dumps({"traceEvents": [*events, {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1}]}).encode()


def leave(folder: Path, *, stem: str = "vllm_tokens2-4_rank0_pid1_1", rows: int = 2, data: bytes | None = None) -> Path:
    """A capture of tokens [2, 4) as a session leaves it."""
    folder.mkdir(exist_ok=True)
    trace = folder / f"{stem}.pt.trace.json.gz"
    trace.write_bytes(gzip.compress(trace_bytes(event(2, 3, 2), event(3, 4, 3))) if data is None else data)
    manifest = Manifest(
        TokenWindow(2, 4),
        "vllm",
        "0.32.0",
        0,
        "lead",
        rows=[IterationRecord(i, i, i + 1, 2, 2, 1_500_000, request="a") for i in range(2, 2 + rows)],
        closed_by="window",
        trace=trace.name,
        trace_bytes=trace.stat().st_size,
    )
    write_manifest(manifest, folder / stem)
    return trace


def text(renderable: Any) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(renderable)
    return console.export_text()


class TestTraces:
    def test_a_gzip_of_one_member(self, tmp_path: Path) -> None:
        trace = read_trace(leave(tmp_path))
        assert [(r.lo, r.hi, r.iteration, r.requests) for r in trace.ranges] == [(2, 3, 2, 2), (3, 4, 3, 2)]
        assert trace.operators == 1
        assert trace.kernels == 0

    def test_a_gzip_of_several_members(self, tmp_path: Path) -> None:
        data = trace_bytes(event(2, 3, 2))
        path = tmp_path / "t.json.gz"
        path.write_bytes(gzip.compress(data[:40]) + gzip.compress(data[40:]))
        assert len(read_trace(path).ranges) == 1

    def test_plain_json(self, tmp_path: Path) -> None:
        path = tmp_path / "t.json"
        path.write_bytes(trace_bytes(event(2, 3, 2)))
        assert len(read_trace(path).ranges) == 1

    def test_the_accelerators_copy_of_a_range_does_not_count(self, tmp_path: Path) -> None:
        path = tmp_path / "t.json"
        path.write_bytes(trace_bytes(event(2, 3, 2), {**event(2, 3, 2), "cat": "gpu_user_annotation"}))
        assert len(read_trace(path).ranges) == 1

    @pytest.mark.parametrize(
        ("data", "wrong"),
        [
            (gzip.compress(trace_bytes(event(2, 3, 2)))[:60], "cut off"),
            (b"not gzip at all", "not whole gzip data"),
            (gzip.compress(b'{"traceEvents": ['), "not whole JSON"),
            (gzip.compress(b"\xff\xfe"), "not whole JSON"),
            (gzip.compress(b"{}"), "no list of traceEvents"),
            (gzip.compress(b"3"), "no list of traceEvents"),
        ],
        ids=["short", "plain", "unfinished", "no text", "an object", "a number"],
    )
    def test_a_broken_file_is_named_in_one_line(self, tmp_path: Path, data: bytes, wrong: str) -> None:
        path = tmp_path / "t.json.gz"
        path.write_bytes(data)
        with pytest.raises(TraceError) as error:
            read_trace(path)
        assert str(path) in str(error.value)
        assert wrong in str(error.value)
        assert "\n" not in str(error.value)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="cannot be read"):
            read_trace(tmp_path / "none.json")


class TestCaptures:
    def test_trace_and_manifest_agree(self, tmp_path: Path) -> None:
        leave(tmp_path)
        captures, broken = read_captures(tmp_path)
        assert len(captures) == 1
        assert broken == []

    def test_they_disagree(self, tmp_path: Path) -> None:
        leave(tmp_path, rows=1)
        _, broken = read_captures(tmp_path)
        assert len(broken) == 1
        assert "its ranges are not the manifest's rows (2 ranges, 1 rows)" in broken[0]

    def test_the_trace_is_gone(self, tmp_path: Path) -> None:
        leave(tmp_path).unlink()
        captures, broken = read_captures(tmp_path)
        assert captures[0].trace is None
        assert "cannot be read" in broken[0]

    def test_half_a_manifest(self, tmp_path: Path) -> None:
        (tmp_path / "x.manifest.json").write_text("{")
        assert "not a manifest" in read_captures(tmp_path)[1][0]


class TestTables:
    def test_a_capture_says_what_was_asked_and_what_is_in_it(self, tmp_path: Path) -> None:
        leave(tmp_path)
        shown = text(captures_table(read_captures(tmp_path)[0]))
        for cell in ("vllm 0.32.0", "[2, 4)", "tokens 2-3", "window", "1.50"):
            assert cell in shown
        assert "label" not in shown

    def test_a_label_has_a_column_where_there_is_one(self, tmp_path: Path) -> None:
        leave(tmp_path)
        write_manifest(Manifest(TokenWindow(2, 4), "vllm", "1", 0, "lead", label="step3"), tmp_path / "vllm_step3_1")
        shown = text(captures_table(read_captures(tmp_path)[0]))
        assert "label" in shown
        assert "step3" in shown
        assert "replica" not in shown

    def test_step_replica_and_node_are_columns_and_ranks_are_counted_over_all_replicas(self, tmp_path: Path) -> None:
        place = {"label": "step3_replica2", "step": 3, "replica": 2, "global_rank": 17, "node": "10.0.0.7"}
        write_manifest(Manifest(TokenWindow(2, 4), "vllm", "1", 1, "lead", **place), tmp_path / "vllm_x_1")
        heading, row = (
            [cell.strip() for cell in re.split("[│┃]", line)[1:5]]
            for line in text(captures_table(read_captures(tmp_path)[0])).splitlines()
            if "engine" in line or "vllm" in line
        )
        assert heading == ["step", "replica", "node", "engine"]
        assert row == ["3", "2", "10.0.0.7", "vllm 1"]
        assert "17" in text(captures_table(read_captures(tmp_path)[0]))

    def test_a_window_never_reached(self, tmp_path: Path) -> None:
        write_manifest(
            Manifest(TokenWindow(100, 120), "sglang", "0.5.23", 0, "lead", furthest_token=47), tmp_path / "sglang_x_1"
        )
        shown = text(captures_table(read_captures(tmp_path)[0]))
        assert "never reached" in shown
        assert "furthest token 47" in shown

    def test_a_long_capture_leaves_out_its_middle(self, tmp_path: Path) -> None:
        manifest = Manifest(
            TokenWindow(0, 50), "vllm", "1", 0, "lead", rows=[IterationRecord(i, i, i + 1, 1, 1, 1) for i in range(50)]
        )
        write_manifest(manifest, tmp_path / "x_1")
        shown = text(iterations_table(read_captures(tmp_path)[0][0], most=6))
        assert "44 more" in shown
        assert "47" in shown
