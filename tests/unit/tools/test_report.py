"""Reading traces and manifests: whole, or one line that names the file and what is wrong with it."""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from trace_files import NAMES, launched, real_trace, tokens, write

from verl_profiler_conf.capture.manifest import IterationRecord, Manifest, write_manifest
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.tools import cli
from verl_profiler_conf.tools.report.account import asked_windows
from verl_profiler_conf.tools.report.captures import Capture, read_captures
from verl_profiler_conf.tools.report.figures_table import capture_section, ranks_table
from verl_profiler_conf.tools.report.summary import groups
from verl_profiler_conf.tools.report.table import captures_table, captures_tables, iterations_table


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
    console = Console(width=200, record=True, markup=False, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(renderable)
    return console.export_text()


class TestCaptures:
    def test_trace_and_manifest_agree(self, tmp_path: Path) -> None:
        leave(tmp_path)
        reading = read_captures([tmp_path])
        assert len(reading.captures) == 1
        assert reading.problems == ()

    def test_they_disagree(self, tmp_path: Path) -> None:
        leave(tmp_path, rows=1)
        broken = read_captures([tmp_path]).problems
        assert len(broken) == 1
        assert "its ranges are not the manifest's rows (2 ranges, 1 rows)" in broken[0]

    def test_the_trace_is_gone(self, tmp_path: Path) -> None:
        leave(tmp_path).unlink()
        reading = read_captures([tmp_path])
        assert reading.captures[0].analysis is None
        assert "it is not there" in reading.problems[0]

    def test_half_a_manifest(self, tmp_path: Path) -> None:
        (tmp_path / "x.manifest.json").write_text("{")
        assert "not a manifest" in read_captures([tmp_path]).problems[0]

    def test_a_trace_without_a_manifest_and_one_with_it_by_their_names(self, tmp_path: Path) -> None:
        trace = leave(tmp_path)
        other = tmp_path / "other.json"
        other.write_bytes(trace_bytes(event(5, 6, 5)))
        with_manifest, without = read_captures([other, trace]).captures
        assert with_manifest.manifest is not None
        assert without.manifest is None
        found = without.analysis.iterations[0] if without.analysis is not None else without.counts.ranges[0].name
        assert found.lo == 5

    def test_a_folder_without_manifests_gives_all_its_traces(self, tmp_path: Path) -> None:
        for name in ("a.json", "b.json", "c.txt"):
            (tmp_path / name).write_bytes(trace_bytes(event(5, 6, 5)))
        assert [capture.path.name for capture in read_captures([tmp_path]).captures] == ["a.json", "b.json"]

    def test_what_torch_npu_leaves_is_read_once_it_is_analysed(self, tmp_path: Path) -> None:
        data = tmp_path / "npu_tokens2-4_rank0_pid1_1_ascend_pt"
        (data / "PROF_000001").mkdir(parents=True)
        rows = [IterationRecord(i, i, i + 1, 2, 2, 1) for i in (2, 3)]
        write_manifest(
            Manifest(TokenWindow(2, 4), "vllm", "1", 0, "lead", rows=rows, trace=data.name), tmp_path / "npu_1"
        )
        reading = read_captures([tmp_path])
        assert reading.problems == ()
        assert "not analysed yet" in reading.captures[0].remarks[0]
        (data / "ASCEND_PROFILER_OUTPUT").mkdir()
        (data / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").write_bytes(trace_bytes(event(2, 3, 2), event(3, 4, 3)))
        for path in (tmp_path, data):
            (capture,) = read_captures([path]).captures
            assert "not analysed yet" not in str(capture.remarks)
            assert capture.manifest is not None
            assert capture.analysis is not None or capture.counts is not None
        (tmp_path / "npu_1.manifest.json").unlink()
        (capture,) = read_captures([tmp_path]).captures
        assert capture.manifest is None

    def test_without_numpy_the_trace_is_counted_and_held_against_its_manifest(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        leave(tmp_path)
        for name in [name for name in sys.modules if name.startswith("verl_profiler_conf.tools.trace.")]:
            if name.rpartition(".")[2] in ("analysis", "arrays", "collect", "device", "spool", "operators"):
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "numpy", None)
        reading = read_captures([tmp_path])
        assert reading.problems == ()
        assert reading.captures[0].counts is not None
        assert reading.captures[0].counts.operators == 1
        assert "of verl-profiler-conf>[report]" in (reading.hint or "")
        leave(tmp_path, rows=1, stem="x_2")
        assert len(read_captures([tmp_path]).problems) == 1


def manifest(lo: int = 2, hi: int = 4, **more: Any) -> Manifest:
    """Of tokens [2, 4), of which [lo, hi) are in a trace; none of them: no trace."""
    rows = [IterationRecord(i, i, i + 1, 2, 2, 1) for i in range(lo, hi)]
    given = {"window": TokenWindow(2, 4), "rank": 0, "closed_by": "window" if rows else None, "run_id": "r"} | more
    return Manifest(engine="vllm", engine_version="1", track="lead", rows=rows, trace="t" if rows else None, **given)


class TestAccount:
    def test_all_is_there_over_several_parts(self) -> None:
        (asked,) = asked_windows([manifest(2, 3, closed_by="gap"), manifest(3, 4, part=2)])
        assert (asked.captured, asked.missing, asked.why) == (((2, 4),), (), "")

    @pytest.mark.parametrize(
        ("manifests", "missing", "why"),
        [
            ([manifest(0, 0, furthest_token=1)], ((2, 4),), "never reached; the furthest token was 1"),
            ([manifest(0, 0, notes=["the reason"])], ((2, 4),), "the reason"),
            ([manifest(2, 3, closed_by="job_end")], ((3, 4),), "the job ended there"),
            ([manifest(3, 4)], ((2, 3),), "no capture holds them"),
            ([manifest(0, 0, window=TokenWindow(9, None))], ((9, None),), "never reached; no token was seen"),
        ],
        ids=["never reached", "said why", "job end", "its begin", "open window"],
    )
    def test_what_is_missing_and_why(self, manifests: list[Manifest], missing: Any, why: str) -> None:
        (asked,) = asked_windows(manifests)
        assert (asked.missing, asked.why) == (missing, why)
        assert why in asked.line

    def test_what_was_recorded_and_not_written_is_missing(self) -> None:
        lost = manifest(2, 4)
        lost.trace = None
        assert asked_windows([lost])[0].missing == ((2, 4),)
        lost.backend = "cudart"  # nsys has the trace
        assert asked_windows([lost])[0].missing == ()

    def test_what_a_short_response_did_not_make_is_not_missing(self) -> None:
        (asked,) = asked_windows([manifest(2, 3, closed_by="request_end")])
        assert (asked.captured, asked.missing, asked.unmade) == (((2, 3),), (), ((3, 4),))
        assert asked.line == "short: vllm rank 0: tokens 2 of [2, 4): the response ended after token 2"

    def test_a_hole_before_the_end_of_a_short_response_is_missing(self) -> None:
        window = TokenWindow(2, 9)
        parts = [manifest(2, 3, window=window), manifest(4, 5, window=window, part=2, closed_by="request_end")]
        (asked,) = asked_windows(parts)
        assert (asked.missing, asked.unmade) == (((3, 4),), ((5, 9),))
        assert asked.line == "missing: vllm rank 0: tokens 3 of [2, 9): no capture holds them"

    @pytest.mark.parametrize("end", ["max_iterations", "stop_profile"])
    def test_what_the_user_cut_off_is_not_missing(self, end: str) -> None:
        assert asked_windows([manifest(2, 3, closed_by=end)])[0].missing == ()

    def test_an_open_window_is_whole_when_its_begin_is_there(self) -> None:
        assert asked_windows([manifest(2, 9, window=TokenWindow(2, None), closed_by="request_end")])[0].missing == ()

    def test_a_rank_that_left_nothing_in_one_of_the_steps(self) -> None:
        places = [(1, 0), (1, 1), (2, 0)]
        asked = asked_windows(
            [manifest(step=step, rank=rank, label=f"step{step}_replica0", replica=0) for step, rank in places]
        )
        assert [(a.step, a.rank) for a in asked if a.missing] == [(2, 1)]
        assert "no manifest" in asked[-1].why

    def test_a_process_that_never_ran_is_not_asked_where_another_captured(self) -> None:
        assert [a.missing for a in asked_windows([manifest(), manifest(0, 0, rank=1)])] == [()]
        assert len(asked_windows([manifest(0, 0), manifest(0, 0, rank=1)])) == 2

    def test_tokens_of_other_requests_are_counted_by_the_manifest_itself(self) -> None:
        some = manifest(3, 4)
        some.track = "any"
        assert asked_windows([some])[0].missing == ()


class TestFigures:
    @pytest.fixture(autouse=True)
    def _numpy(self) -> None:
        pytest.importorskip("numpy")

    def test_prefill_and_decode_apart_with_median_and_spread(self, tmp_path: Path) -> None:
        events = [tokens(0, 1, 0, 0, 9000)]
        events += [tokens(i, i + 1, i, 10_000 + i * 2000, 1000 + 10 * i) for i in range(1, 41)]
        shown = section(write(tmp_path / "t.json", events))
        assert cells(shown, "prefill") == ["prefill", "1", "9.00", "9.00", "9.00", "9.00", "12.00"]
        assert cells(shown, "decode") == ["decode", "40", "1.21", "1.05", "1.36", "1.40", "2.00"]
        assert "Decode from token 1 to 40: 1.05 ms an iteration in the first quarter, 1.35 ms in the last" in shown
        assert "No device work in it" in shown

    def test_a_device_that_waits_for_launches_is_named(self, tmp_path: Path) -> None:
        events = [tokens(1, 2, 1, 0, 1000)]
        for number in range(10):
            events += launched(number + 1, "gemm", number * 100, number * 100 + 3, 20)
        shown = section(write(tmp_path / "t.json", events))
        assert "Device: busy 22%" in shown
        assert ". Launch-bound" in shown
        assert cells(shown, "gemm")[:5] == ["100%", "0.20", "10", "20.0", "compute"]

    def test_communication_and_how_much_of_it_is_hidden(self, tmp_path: Path) -> None:
        events = [tokens(1, 2, 1, 0, 1000)]
        events += launched(1, "gemm", 10, 100, 300)
        events += launched(2, "ncclDevKernel_AllReduce", 20, 300, 200, stream=8)
        assert "Communication: 0.20 ms, 50% of the busy time; 50% of it is hidden" in section(
            write(tmp_path / "t.json", events)
        )

    def test_ranks_beside_each_other(self, tmp_path: Path) -> None:
        for rank, begin in ((0, 100), (1, 400)):
            stem = f"vllm_tokens1-2_rank{rank}_pid{rank}_1"
            events = [tokens(1, 2, 1, 0, 1000), *launched(1, "ncclAllReduce", 10, begin, 600 - begin)]
            path = write(tmp_path / f"{stem}.json", events, distributedInfo={"rank": rank, "world_size": 2})
            row = IterationRecord(1, 1, 2, 2, 2, 1)
            write_manifest(
                Manifest(TokenWindow(1, 2), "vllm", "1", rank, "lead", rows=[row], trace=path.name), tmp_path / stem
            )
        (group,) = groups(read_captures([tmp_path]).captures)
        shown = text(ranks_table(group))
        assert cells(shown, "0")[5:7] == ["0.30", "0.0%"]
        assert cells(shown, "1")[5:] == ["0.00", "100%", "the others wait for it"]

    def test_control_characters_in_names_do_not_reach_the_terminal(self, tmp_path: Path) -> None:
        events = [tokens(1, 2, 1, 0, 1000), *launched(1, "\x1b[2Jevil[bold]", 10, 100, 300)]
        shown = section(write(tmp_path / "t.json", events))
        assert "\x1b" not in shown
        assert "evil[bold]" in shown

    @pytest.mark.parametrize("name", NAMES)
    def test_a_real_trace(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["report", str(real_trace(name))]) == 0
        out = capsys.readouterr().out
        assert name in out
        assert "top operators" in out or "top kernels" in out or "counters of kernels" in out


def section(path: Path) -> str:
    (capture,) = read_captures([path]).captures
    return "".join(text(piece) for piece in capture_section(capture))


def cells(shown: str, of: str) -> list[str]:
    """The cells of the first row that has `of` in a cell."""
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in shown.splitlines()]
    return next(row for row in rows if of in row)


class TestTables:
    def test_control_characters_of_a_manifest_do_not_reach_the_terminal(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        evil = "\x1b[2J\nevil"
        hostile = manifest(0, 0, label=evil, node=evil, notes=[evil])
        hostile.engine = hostile.engine_version = hostile.closed_by = evil
        write_manifest(hostile, tmp_path / "x_1")
        assert cli.main(["report", str(tmp_path), "--iterations"]) == 1
        printed = capsys.readouterr()
        assert "\x1b" not in printed.out + printed.err
        assert printed.err.count("\n") == 1

    def test_a_capture_of_a_short_response_is_no_failure(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        short = manifest(2, 3, closed_by="request_end", backend="cudart")
        short.trace = None  # nsys has it
        write_manifest(short, tmp_path / "x_1")
        assert cli.main(["report", str(tmp_path)]) == 0
        assert capsys.readouterr().err == "short: vllm rank 0: tokens 2 of [2, 4): the response ended after token 2\n"

    def test_a_capture_says_what_was_asked_and_what_is_in_it(self, tmp_path: Path) -> None:
        leave(tmp_path)
        shown = text(captures_table(read_captures([tmp_path]).captures))
        for cell in ("vllm 0.32.0", "[2, 4)", "tokens 2-3", "window", "1.50"):
            assert cell in shown
        assert "label" not in shown

    def test_a_label_has_a_column_where_there_is_one(self, tmp_path: Path) -> None:
        leave(tmp_path)
        write_manifest(Manifest(TokenWindow(2, 4), "vllm", "1", 0, "lead", label="step3"), tmp_path / "vllm_step3_1")
        shown = text(captures_table(read_captures([tmp_path]).captures))
        assert "label" in shown
        assert "step3" in shown
        assert "replica" not in shown

    def test_step_replica_and_node_are_columns_and_ranks_are_counted_over_all_replicas(self, tmp_path: Path) -> None:
        place = {"label": "step3_replica2", "step": 3, "replica": 2, "global_rank": 17, "node": "10.0.0.7"}
        write_manifest(Manifest(TokenWindow(2, 4), "vllm", "1", 1, "lead", **place), tmp_path / "vllm_x_1")
        heading, row = (
            [cell.strip() for cell in re.split("[│┃]", line)[1:5]]
            for line in text(captures_table(read_captures([tmp_path]).captures)).splitlines()
            if "engine" in line or "vllm" in line
        )
        assert heading == ["step", "replica", "node", "engine"]
        assert row == ["3", "2", "10.0.0.7", "vllm 1"]
        assert "17" in text(captures_table(read_captures([tmp_path]).captures))

    def test_a_window_never_reached(self, tmp_path: Path) -> None:
        write_manifest(
            Manifest(TokenWindow(100, 120), "sglang", "0.5.23", 0, "lead", furthest_token=47), tmp_path / "sglang_x_1"
        )
        shown = text(captures_table(read_captures([tmp_path]).captures))
        assert "never reached" in shown
        assert "furthest token 47" in shown

    def test_a_long_capture_leaves_out_its_middle(self, tmp_path: Path) -> None:
        manifest = Manifest(
            TokenWindow(0, 50), "vllm", "1", 0, "lead", rows=[IterationRecord(i, i, i + 1, 1, 1, 1) for i in range(50)]
        )
        write_manifest(manifest, tmp_path / "x_1")
        shown = text(iterations_table(read_captures([tmp_path]).captures[0], most=6))
        assert "44 more" in shown
        assert "47" in shown

    @pytest.mark.parametrize(("width", "headings"), [(80, ["#", "#"]), (200, ["engine"])])
    def test_captures_are_readable_on_a_narrow_terminal(self, width: int, headings: list[str]) -> None:
        long = manifest(closed_by="never reached")
        long.engine, long.engine_version, long.window = "transformers", "5.24.0", TokenWindow(1900, 1910)
        console = Console(width=width, file=io.StringIO())
        tables = captures_tables([Capture(Path("x"), each) for each in (manifest(), long)], console)
        assert [table.columns[0].header for table in tables] == headings
        for table in tables:
            console.print(table)
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        for word in ("engine", "closed by", "requests", "ms/iteration", "transformers 5.24.0", "[1900, 1910)"):
            assert word in shown
        assert "…" not in shown

    def test_jobs_are_answered_in_the_order_in_which_they_ran(self) -> None:
        jobs = [manifest(run_id=job, created=f"2026-01-0{day}T00:00:00Z") for job, day in (("a", 2), ("b", 1))]
        assert [asked.run_id for asked in asked_windows(jobs)] == ["b", "a"]
