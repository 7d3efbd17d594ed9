"""The report for programs: JSON, CSV, and two captures side by side."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from trace_files import launched, tokens, write

from verl_profiler_conf.capture.manifest import IterationRecord, Manifest, write_manifest
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.tools import cli

pytest.importorskip("numpy")

FIELDS = {"schema", "complete", "problems", "hint", "asked", "captures", "ranks", "against"}


def leave(folder: Path, kernel_us: float = 20, step: int | None = None, end: int = 4) -> Path:
    """A capture of tokens [2, 4) with one kernel in each iteration."""
    folder.mkdir(exist_ok=True)
    stem = f"vllm_tokens2-{end}_rank0_pid1" + (f"_step{step}" if step is not None else "") + "_1"
    events: list[Any] = []
    for number in (2, 3):
        events.append(tokens(number, number + 1, number, number * 1000, 500))
        events += launched(number, "gemm", number * 1000 + 10, number * 1000 + 20, kernel_us)
    trace = write(folder / f"{stem}.pt.trace.json", events)
    rows = [IterationRecord(i, i, i + 1, 2, 2, 1) for i in (2, 3)]
    label = None if step is None else f"step{step}"
    manifest = Manifest(
        TokenWindow(2, end), "vllm", "1", 0, "lead", rows=rows, trace=trace.name, step=step, label=label
    )
    write_manifest(manifest, folder / stem)
    return trace


class TestJson:
    def test_standard_output_is_one_document_whatever_is_wrong(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        leave(tmp_path, end=5)
        (tmp_path / "broken.manifest.json").write_text("{")
        assert cli.main(["report", str(tmp_path), "--json"]) == 1
        printed = capsys.readouterr()
        data = json.loads(printed.out)
        assert set(data) == FIELDS
        assert data["schema"] == 1
        assert data["complete"] is False
        assert [each["missing"] for each in data["asked"]] == [[[4, 5]]]
        assert len(data["problems"]) == 1
        assert printed.err.count("\n") == 2

    def test_figures(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        leave(tmp_path)
        assert cli.main(["report", str(tmp_path), "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        (capture,) = data["captures"]
        assert data["complete"] is True
        assert capture["manifest"]["window"] == [2, 4]
        figures = capture["figures"]
        assert [phase["phase"] for phase in figures["phases"]] == ["all", "decode"]
        assert figures["phases"][1]["wall"]["median"] == 500
        assert [i["device"]["busy_us"] for i in figures["iterations"]] == [20, 20]
        assert figures["device"]["busy_share"] == pytest.approx(40 / 1020)
        assert figures["device"]["launch_bound"] is True
        assert [(k["name"], k["calls"], k["share"]) for k in figures["kernels"]] == [("gemm", 2, 1.0)]


class TestCsv:
    def test_one_row_an_iteration(self, tmp_path: Path) -> None:
        leave(tmp_path / "run", step=7)
        out = tmp_path / "out.csv"
        out.write_text("older")
        assert cli.main(["report", str(tmp_path / "run"), "--csv", str(out)]) == 0
        with out.open() as file:
            rows = list(csv.DictReader(file))
        assert [(row["lo"], row["hi"], row["wall_us"], row["busy_us"], row["step"]) for row in rows] == [
            ("2", "3", "500.0", "20.0", "7"),
            ("3", "4", "500.0", "20.0", "7"),
        ]
        assert {row["window_start"] for row in rows} == {"2"}
        assert rows[1]["period_us"] == ""

    def test_a_trace_is_not_overwritten_by_a_slip(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        trace = leave(tmp_path)
        before = trace.read_bytes()
        assert cli.main(["report", str(tmp_path), "--csv", str(trace)]) == 2
        assert "has to end with .csv" in capsys.readouterr().err
        assert trace.read_bytes() == before

    def test_a_folder_that_is_not_there(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        leave(tmp_path)
        out = tmp_path / "none" / "x.csv"
        assert cli.main(["report", str(tmp_path), "--csv", str(out)]) == 2
        assert capsys.readouterr().err == f"verl-profiler report: {out}: No such file or directory\n"

    @pytest.mark.parametrize("top", ["-3", "many"])
    def test_a_number_that_cannot_be(self, top: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stopped:
            cli.main(["report", str(tmp_path), "--top", top])
        assert stopped.value.code == 2
        assert f"argument --top: {top}: must be" in capsys.readouterr().err


class TestAgainst:
    def test_two_runs(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        leave(tmp_path / "old", 20)
        leave(tmp_path / "new", 50)
        arguments = ["report", str(tmp_path / "new"), "--against", str(tmp_path / "old")]
        assert cli.main(arguments) == 0
        out = capsys.readouterr().out
        assert "Changed most: gemm +0.0300 ms/iteration (+150%)" in out
        assert "top kernels" not in out
        assert cli.main([*arguments, "--json"]) == 0
        (pair,) = json.loads(capsys.readouterr().out)["against"]
        assert [(k["name"], k["before"], k["after"], k["ratio"]) for k in pair["kernels"]] == [("gemm", 20, 50, 2.5)]

    def test_captures_of_several_steps_go_by_step(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for step, old, new in ((1, 20, 30), (2, 40, 80)):
            leave(tmp_path / "old", old, step)
            leave(tmp_path / "new", new, step)
        assert cli.main(["report", str(tmp_path / "new"), "--against", str(tmp_path / "old"), "--json"]) == 0
        pairs = json.loads(capsys.readouterr().out)["against"]
        assert [(p["kernels"][0]["before"], p["kernels"][0]["after"]) for p in pairs] == [(20, 30), (40, 80)]

    def test_nothing_that_goes_together(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        leave(tmp_path / "old", step=1)
        leave(tmp_path / "old", step=2)
        trace = write(tmp_path / "other.json", [tokens(1, 2, 1, 0, 5)])
        assert cli.main(["report", str(trace), "--against", str(tmp_path / "old")]) == 2
        assert "give one trace of each" in capsys.readouterr().err
