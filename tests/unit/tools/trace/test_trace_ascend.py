"""What torch_npu leaves, in the form that msprof and torch_npu write it; no NPU is needed to read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl_profiler_conf.tools.trace.analysis import analyse
from verl_profiler_conf.tools.trace.ascend import AscendKernel, read_kernel_details, trace_file
from verl_profiler_conf.tools.trace.counts import count
from verl_profiler_conf.tools.trace.errors import TraceError

HEAD = "Step Id,Device_id,Model ID,Task ID,Stream ID,Name,Type,OP State,Accelerator Core,Start Time(us),Duration(us)"
BASE = 1_774_670_741_777_000.0


def event(name: str, at: float, dur: float, pid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": pid, "tid": 3, "ts": f"{BASE + at:.3f}", "dur": dur, "args": args}


def process(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


EVENTS = [
    process(1, "Python"),
    process(2, "CANN"),
    process(3, "Ascend Hardware"),
    process(4, "Communication"),
    process(5, "Overlap Analysis"),
    {**event("response_tokens[20:21) iter=7 reqs=2", 0, 100, 1), "cat": "cpu_op"},
    {**event("aten::mm", 10, 40, 1), "cat": "cpu_op"},
    event("Node@launch", 20, 5, 2, level="node", item_id="aclnnMatmul", connection_id=11),
    event("aclnnMatmul_MatMulV3", 150, 60, 3, **{"Task Type": "AI_CORE", "Stream Id": 2, "connection_id": 11}),
    event("Node@launch", 60, 5, 2, level="node", item_id="hcom_allReduce_", connection_id=12),
    event("hcom_allReduce__123_0_1", 200, 30, 4, connection_id=12),
    event("EVENT_WAIT", 0, 200, 3, **{"Task Type": "EVENT_WAIT", "Stream Id": 2, "connection_id": 13}),
    event("NOTIFY_WAIT", 200, 20, 3, **{"Task Type": "NOTIFY_WAIT", "Stream Id": 5, "connection_id": 12}),
    event("SDMA", 225, 2, 3, **{"Task Type": "SDMA", "Stream Id": 5, "connection_id": 12}),
    event("Computing", 150, 60, 5),
    event("Free", 0, 150, 5),
]


def leave(folder: Path, events: list[Any], table: str | None = None) -> Path:
    """A directory as torch_npu leaves it."""
    output = folder / "host_1_2026_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
    output.mkdir(parents=True)
    (output / "trace_view.json").write_text(json.dumps(events))
    if table is not None:
        (output / "kernel_details.csv").write_text(table)
    return output.parent


class TestTrace:
    def test_device_work_communication_and_what_only_waits(self, tmp_path: Path) -> None:
        found = analyse(leave(tmp_path, EVENTS))
        assert [(i.number, i.lo, i.hi) for i in found.iterations] == [(7, 20, 21)]
        device = found.iterations[0].device
        assert device is not None
        assert (device.kernels, device.copies) == (2, 1)
        assert (device.compute_us, device.communication_us, device.exposed_us) == (60, 30, 20)
        assert device.busy_us == 80
        assert found.attribution == "launch"
        assert [(k.name, k.kind) for k in found.kernels] == [
            ("aclnnMatmul_MatMulV3", "compute"),
            ("hcom_allReduce__123_0_1", "communication"),
            ("SDMA", "copy"),
        ]
        assert count(trace_file(tmp_path)).kernels == 2
        assert [o.name for o in found.operators] == ["response_tokens[...]", "aten::mm"]

    def test_the_table_of_kernels_stands_in_for_a_trace_without_them(self, tmp_path: Path) -> None:
        rows = [
            f"1,0,429,1,2,aclnnMatmul,MatMul,dynamic,AI_CORE,{BASE + 30:.3f}\t,25.5",
            f"1,0,429,2,5,hcom_allReduce__1,hcom,N/A,COMMUNICATION,{BASE + 50:.3f}\t,20",
        ]
        found = analyse(leave(tmp_path, EVENTS[:8], "\n".join([HEAD, *rows])))
        assert [(k.name, k.total_us) for k in found.kernels] == [("aclnnMatmul", 25.5), ("hcom_allReduce__1", 20)]
        assert found.device is not None
        assert found.device.busy_us == pytest.approx(40, abs=0.3)
        assert found.attribution == "time"


class TestDirectories:
    def test_the_trace_is_found(self, tmp_path: Path) -> None:
        left = leave(tmp_path, [])
        trace = left / "ASCEND_PROFILER_OUTPUT" / "trace_view.json"
        assert trace_file(left) == trace_file(trace.parent) == trace_file(tmp_path) == trace_file(trace) == trace

    def test_none_and_several(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="a directory without"):
            trace_file(tmp_path)
        (tmp_path / "PROF_000001").mkdir()
        with pytest.raises(TraceError, match="not analysed yet"):
            trace_file(tmp_path)
        for name in "ab":
            leave(tmp_path / name, [])
        for name in "ab":
            (tmp_path / name / "host_1_2026_ascend_pt").rename(tmp_path / f"{name}_ascend_pt")
        with pytest.raises(TraceError, match="2 traces in it"):
            trace_file(tmp_path)


class TestTable:
    def test_rows(self, tmp_path: Path) -> None:
        path = tmp_path / "kernel_details.csv"
        path.write_text(
            '\ufeffName,Accelerator Core,Start Time(us),Duration(us),Input Shapes\n"a,b",AI_CORE,1.5\t,2,"""8,8"""\n\n'
        )
        assert list(read_kernel_details(path)) == [AscendKernel("a,b", "AI_CORE", "", 1.5, 2)]

    @pytest.mark.parametrize(
        ("text", "wrong"),
        [
            (b"", "no table of kernels"),
            (b"a,b,c\n", "no column Name"),
            (b"Name,Duration(us)\nx,1\n", "no column Start Time"),
            (b"Name,Start Time(us),Duration(us)\nx,1\n", "line 2 is cut off"),
            (b"Name,Start Time(us),Duration(us)\nx,1,y\n", "line 2: y is no time"),
            (b"Name,Start Time(us),Duration(us)\nx,1,nan\n", "line 2: nan is no time"),
            (b"Name,Start Time(us),Duration(us)\nx,1e99,1\n", "is no time"),
            (b"Name,Start Time(us),Duration(us)\n\xff,1,1\n", "not UTF-8"),
            (b"Name,Start Time(us),Duration(us)\n" + b"x" * 200_000 + b",1,1\n", "no whole table"),
        ],
    )
    def test_broken_ones_are_told_in_one_line(self, tmp_path: Path, text: bytes, wrong: str) -> None:
        path = tmp_path / "kernel_details.csv"
        path.write_bytes(text)
        with pytest.raises(TraceError, match=wrong) as error:
            list(read_kernel_details(path))
        assert str(error.value).isprintable()

    def test_a_missing_one(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="cannot be read"):
            list(read_kernel_details(tmp_path / "none.csv"))
