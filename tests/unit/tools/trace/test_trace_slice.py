"""A slice holds what its stretch of time launched, whole arrows, and all names; each event as it stood."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from trace_files import NAMES, complete, launched, load, real_trace, tokens, write

from verl_profiler_conf.tools.trace import raw
from verl_profiler_conf.tools.trace.analysis import analyse
from verl_profiler_conf.tools.trace.errors import TraceError
from verl_profiler_conf.tools.trace.select import TYPICAL, Selection
from verl_profiler_conf.tools.trace.slicing import MEMBER, Sliced, slice_trace

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "cuda_sync")
LAUNCHES = ("cuda_runtime", "cuda_driver")


def cut(path: Path, out: Path, **selection: Any) -> tuple[Sliced, Any]:
    done = slice_trace(path, out, Selection(**selection))
    return done, load(out)


def names(whole: Any) -> list[str]:
    events = whole["traceEvents"] if isinstance(whole, dict) else whole
    return [e["name"] for e in events if e["ph"] == "X"]


def belonging(events: list[Any], windows: list[tuple[float, float]]) -> list[Any]:
    """What belongs to a slice, said once more in the plainest way."""

    def inside(event: Any) -> bool:
        return any(begin <= event["ts"] < end for begin, end in windows)

    def join(event: Any) -> Any:
        return event.get("args", {}).get("correlation")

    launches = [e for e in events if e.get("cat") in LAUNCHES and join(e) is not None]
    started = {join(e) for e in launches if inside(e)}
    annotated = {e["args"].get("External id") for e in events if e.get("cat") == "user_annotation" and inside(e)}
    arrows: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf" and "id" in event:
            arrows[event.get("cat"), event["name"], event["id"]].append(event)

    def keep(event: Any) -> bool:
        if event["ph"] == "M":
            return True
        if event["ph"] in "stf" and "id" in event:
            ends = arrows[event.get("cat"), event["name"], event["id"]]
            if not {"s", "f"} <= {e["ph"] for e in ends}:
                return False
            tails = [e for e in ends if e["ph"] == "s"]
            return any(map(inside, tails)) if event["cat"] == "ac2g" else all(map(inside, ends))
        if event.get("cat") in DEVICE and launches and join(event) is not None:
            return join(event) in started
        if event.get("cat") == "gpu_user_annotation" and "External id" in event.get("args", {}):
            return event["args"]["External id"] in annotated
        return inside(event)

    return [event for event in events if keep(event)]


class TestRealTraces:
    @pytest.mark.parametrize("keep_rows", [20, 1 << 19])
    @pytest.mark.parametrize(
        ("name", "selection"),
        [
            ("cuda_nccl_with_config", {"start": 1, "end": 2}),
            ("cuda_nccl_with_config", {"like": TYPICAL}),
            ("cuda_nccl_with_config", {"time_us": (10_000, 20_000)}),
            ("rocm_mi250_training", {"end": 1}),
            ("rocm_mi250_training", {"time_us": (500, 5_000)}),
            ("cuda_nccl_sampled_rank0", {"start": 1}),
            ("cuda_nccl_sampled_rank1", {"like": 551}),
            ("cuda_alexnet_training", {"time_us": (30e6, 35e6)}),
            ("cuda_event_sync_two_streams", {"time_us": (0, 700)}),
            ("cpu_only_rank34.pt.trace", {"start": 0}),
        ],
    )
    def test_exactly_what_belongs_to_it(
        self, tmp_path: Path, name: str, selection: dict[str, Any], keep_rows: int
    ) -> None:
        path = real_trace(name)
        done = slice_trace(path, tmp_path / "s.json.gz", Selection(**selection), keep_rows=keep_rows)
        whole, part = load(path), load(tmp_path / "s.json.gz")
        events = whole["traceEvents"]
        host = [e for e in events if e["ph"] == "X" and e.get("cat") not in (*DEVICE, "Trace", "gpu_user_annotation")]
        first = min(e["ts"] for e in host)
        windows = [(first + begin, first + end) for begin, end in done.windows]
        assert part["traceEvents"] == belonging(events, windows)
        assert 0 < len(part["traceEvents"]) < len(events)
        assert (done.events, done.of_events) == (len(part["traceEvents"]), len(events))
        assert {k: v for k, v in part.items() if k not in ("traceEvents", MEMBER)} == {
            k: v for k, v in whole.items() if k != "traceEvents"
        }

    @pytest.mark.parametrize("name", NAMES)
    def test_all_of_it_keeps_all_whole_arrows(self, tmp_path: Path, name: str) -> None:
        path = real_trace(name)
        _, part = cut(path, tmp_path / "s.json", time_us=(0, 1e12))
        events = load(path)["traceEvents"]
        lost = [e for e in events if e not in part["traceEvents"]] if len(events) < 5000 else []
        assert all(e["ph"] in "sf" or e.get("cat") in (*DEVICE, "Trace") or e["ph"] == "i" for e in lost)

    def test_its_figures_are_those_of_the_iteration_in_the_whole(self, tmp_path: Path) -> None:
        path = real_trace("cuda_nccl_with_config")
        cut(path, tmp_path / "s.json", start=1, end=2)
        whole, part = analyse(path).iterations[1].device, analyse(tmp_path / "s.json").iterations[0].device
        assert whole is not None
        assert part is not None
        assert (part.kernels, part.copies) == (whole.kernels, whole.copies)
        assert part.work_us == pytest.approx(whole.work_us)
        assert part.busy_us == pytest.approx(whole.busy_us, rel=1e-3)


def three(tmp_path: Path) -> Path:
    """Three decoding iterations; what the second launches runs in the third."""
    return write(
        tmp_path / "t.json",
        [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "worker"}},
            tokens(20, 21, 5, 100, 90),
            *launched(1, "first", 110, 120, 50),
            complete("cpu_op", "between", 192, 3),
            tokens(21, 22, 6, 200, 90),
            *launched(2, "second", 210, 350, 50),
            complete("python_function", "f", 220, 3),
            tokens(22, 23, 7, 300, 90),
            *launched(3, "third", 310, 450, 50),
            {"ph": "s", "id": 7, "pid": 1, "tid": 1, "ts": 215, "cat": "fwdbwd", "name": "fwdbwd"},
            {"ph": "f", "id": 7, "pid": 1, "tid": 2, "ts": 315, "cat": "fwdbwd", "name": "fwdbwd"},
            {"ph": "i", "name": "mark", "pid": 1, "tid": 1, "ts": 250, "s": "t"},
            complete("Trace", "PyTorch Profiler (0)", 0, 500),
        ],
    )


class TestSelections:
    def test_tokens(self, tmp_path: Path) -> None:
        done, part = cut(three(tmp_path), tmp_path / "s.json", start=21, end=22)
        assert names(part) == ["response_tokens[21:22) iter=6 reqs=2", "cudaLaunchKernel", "second", "f"]
        assert [e["id"] for e in part["traceEvents"] if "id" in e] == [2, 2]
        assert [e["name"] for e in part["traceEvents"] if e["ph"] in "iM"] == ["process_name", "mark"]
        assert (done.iterations, done.windows) == (1, ((100, 190),))
        assert part[MEMBER]["tokens"] == [21, 22]
        assert part[MEMBER]["of"] == "t.json"

    def test_an_annotation_on_the_device_goes_with_that_of_the_host(self, tmp_path: Path) -> None:
        events = load(three(tmp_path))["traceEvents"]
        for at, external, name in ((210, 31, "inside"), (310, 32, "later")):
            events.append(complete("user_annotation", name, at, 5, **{"External id": external}))
            late = complete(
                "gpu_user_annotation", f"{name} on the device", at + 140, 50, pid=0, **{"External id": external}
            )
            events.append(late)
        events.append(complete("gpu_user_annotation", "of no annotation", 250, 5, pid=0))
        _, part = cut(write(tmp_path / "u.json", events), tmp_path / "s.json", start=21, end=22)
        assert [name for name in names(part) if "device" in name or "annotation" in name] == [
            "inside on the device",
            "of no annotation",
        ]

    def test_neighbours_with_what_lies_between_them(self, tmp_path: Path) -> None:
        done, part = cut(three(tmp_path), tmp_path / "s.json", end=22)
        assert "between" in names(part)
        assert {"first", "second"} <= set(names(part))
        assert (done.iterations, done.windows) == (2, ((0, 190),))

    def test_an_arrow_with_an_end_outside_is_left_out(self, tmp_path: Path) -> None:
        _, part = cut(three(tmp_path), tmp_path / "s.json", start=21, end=22)
        assert not [e for e in part["traceEvents"] if e.get("cat") == "fwdbwd"]
        _, both = cut(three(tmp_path), tmp_path / "both.json", start=21)
        assert len([e for e in both["traceEvents"] if e.get("cat") == "fwdbwd"]) == 2

    def test_like_an_iteration(self, tmp_path: Path) -> None:
        assert cut(three(tmp_path), tmp_path / "a.json", like=7)[0].windows == ((200, 290),)
        events = [tokens(i, i + 1, i, i * 100, dur) for i, dur in enumerate([90, 50, 10, 30])]
        path = write(tmp_path / "u.json", events)
        assert names(cut(path, tmp_path / "b.json", like=TYPICAL)[1]) == [events[3]["name"]]

    def test_tokens_that_a_request_waited_between(self, tmp_path: Path) -> None:
        events = [tokens(1, 2, 1, 0, 9), tokens(2, 2, 2, 10, 9), tokens(2, 3, 3, 20, 9), tokens(3, 4, 4, 30, 9)]
        path = write(tmp_path / "t.json", events)
        assert len(names(cut(path, tmp_path / "a.json", start=1, end=3)[1])) == 3
        assert len(names(cut(path, tmp_path / "b.json", start=2, end=3)[1])) == 1

    @pytest.mark.parametrize("form", ["execute_context_0(0)_generation_8(8)", "step[DECODE bs=8]"])
    def test_an_engines_own_ranges_go_on_to_the_next(self, tmp_path: Path, form: str) -> None:
        events = [complete("user_annotation", form, i * 100, 60) for i in range(5)]
        events += [complete("cpu_op", f"sample {i}", i * 100 + 80, 5) for i in range(5)]
        path = write(tmp_path / "t.json", events)
        done, part = cut(path, tmp_path / "s.json", start=1, end=3)
        assert names(part) == [form, form, "sample 1", "sample 2"]
        assert done.windows == ((100, 300),)

    def test_a_kind_of_range_may_be_asked_for(self, tmp_path: Path) -> None:
        events = [tokens(5, 6, 1, 10, 20), complete("user_annotation", "ProfilerStep#1", 0, 50)]
        path = write(tmp_path / "t.json", events)
        assert cut(path, tmp_path / "s.json", source="profiler_step", start=0, end=1)[0].windows == ((0, 50),)

    def test_device_work_without_a_launch_counts_by_time(self, tmp_path: Path) -> None:
        events = [tokens(i, i + 1, i, i * 100, 90) for i in range(3)]
        events += [complete("kernel", f"k{i}", i * 100 + 50, 5, pid=0) for i in range(3)]
        assert names(cut(write(tmp_path / "t.json", events), tmp_path / "s.json", start=1, end=2)[1]) == [
            events[1]["name"],
            "k1",
        ]

    def test_ascend_work_is_joined_to_its_launch(self, tmp_path: Path) -> None:
        def ascend(name: str, ts: float, **args: Any) -> dict[str, Any]:
            return {"ph": "X", "name": name, "pid": 3, "tid": 4, "ts": f"{ts:.3f}", "dur": 5, "args": args}

        events = [
            {**tokens(1, 2, 1, 0, 90), "cat": "cpu_op", "ts": "0.000"},
            {**tokens(2, 3, 2, 100, 90), "cat": "cpu_op", "ts": "100.000"},
            ascend("Node@launch", 10, level="node", connection_id=1),
            ascend("MatMul", 150, **{"Task Type": "AI_CORE", "connection_id": 1}),
            ascend("Node@launch", 110, level="node", connection_id=2),
            ascend("hcom_allReduce_", 250, connection_id=2),
        ]
        path = tmp_path / "trace_view.json"
        path.write_text(json.dumps(events))
        done, part = cut(path, tmp_path / "s.json", end=2)
        assert isinstance(part, list)
        assert [e["name"] for e in part] == [events[0]["name"], "Node@launch", "MatMul"]
        assert done.iterations == 1
        assert names(cut(path, tmp_path / "t.json", start=2)[1])[-1] == "hcom_allReduce_"

    @pytest.mark.parametrize(
        ("selection", "wrong"),
        [
            ({"start": 30, "end": 40}, r"response tokens \[30, 40\) are not in it: it has \[20, 23\)"),
            ({"like": 99}, "iteration 99 is not in it: it has 5 to 7"),
            ({"source": "vllm"}, "no iterations in it"),
        ],
    )
    def test_what_is_not_in_it(self, tmp_path: Path, selection: dict[str, Any], wrong: str) -> None:
        with pytest.raises(TraceError, match=wrong) as error:
            cut(three(tmp_path), tmp_path / "s.json", **selection)
        assert str(error.value).startswith(str(tmp_path / "t.json"))
        assert not (tmp_path / "s.json").exists()

    @pytest.mark.parametrize(
        "selection",
        [
            {"start": -1},
            {"start": 5, "end": 5},
            {"end": 0},
            {"time_us": (5, 5)},
            {"time_us": (-1, 5)},
            {"like": "usual"},
            {"start": 1, "like": 5},
            {"end": 1, "time_us": (0, 1)},
        ],
    )
    def test_what_means_nothing(self, selection: dict[str, Any]) -> None:
        with pytest.raises(TraceError):
            Selection(**selection)


class TestFiles:
    def test_never_over_another_file(self, tmp_path: Path) -> None:
        out = tmp_path / "s.json"
        out.write_text("mine")
        with pytest.raises(FileExistsError):
            slice_trace(three(tmp_path), out, Selection())
        assert out.read_text() == "mine"
        slice_trace(three(tmp_path), out, Selection(), replace=True)
        assert len(load(out)["traceEvents"]) > 5

    def test_over_the_trace_itself_when_told_to(self, tmp_path: Path) -> None:
        path = three(tmp_path)
        slice_trace(path, path, Selection(start=21, end=22), replace=True)
        assert "second" in names(load(path))

    def test_nothing_is_left_of_a_trace_that_breaks(self, tmp_path: Path) -> None:
        path = three(tmp_path)
        path.write_bytes(path.read_bytes()[:-40])
        with pytest.raises(TraceError):
            slice_trace(path, tmp_path / "s.json", Selection())
        assert [p.name for p in tmp_path.iterdir()] == ["t.json"]

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match="No such file"):
            slice_trace(three(tmp_path), tmp_path / "none" / "s.json", Selection())

    def test_compressed_by_name_and_the_same_each_time(self, tmp_path: Path) -> None:
        for name in ("a.json.gz", "b.json.gz", "c.json"):
            slice_trace(three(tmp_path), tmp_path / name, Selection(end=22))
        a, b, c = ((tmp_path / name).read_bytes() for name in ("a.json.gz", "b.json.gz", "c.json"))
        assert a == b
        assert gzip.decompress(a) == c

    def test_what_is_not_quite_json_is_copied_as_it_stands(self, tmp_path: Path) -> None:
        path = tmp_path / "t.json"
        events = json.dumps([tokens(1, 2, 1, 0, 9), complete("cpu_op", 'a "} , {[ name', 1, 1)])
        path.write_text(
            f'{{"traceEvents": {events[:-1]}, {{"ph": "X", "cat": "cpu_op", "ts": 2, "x":  [NaN, {{}}]}}]}}'
        )
        slice_trace(path, tmp_path / "s.json", Selection())
        assert '{"ph": "X", "cat": "cpu_op", "ts": 2, "x":  [NaN, {}]}' in (tmp_path / "s.json").read_text()
        assert len(load(tmp_path / "s.json")["traceEvents"]) == 3

    def test_without_msgspec(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with_it = cut(three(tmp_path), tmp_path / "a.json", start=21, end=22)
        monkeypatch.setattr(raw, "HAS_MSGSPEC", False)
        without = cut(three(tmp_path), tmp_path / "b.json", start=21, end=22)
        assert without[1] == with_it[1]

    def test_pieces_far_from_the_slice_are_not_decoded_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        events = [
            e
            for i in range(9000)
            for e in (tokens(i, i + 1, i, i * 100, 90), *launched(i, "k", i * 100, i * 100 + 5, 9))
        ]
        path = write(tmp_path / "t.json.gz", events)
        decoded = []
        fast = raw.RawDecoder.fast
        monkeypatch.setattr(raw.RawDecoder, "fast", lambda self, data: decoded.append(len(data)) or fast(self, data))
        done, part = cut(path, tmp_path / "s.json", start=4000, end=4010)
        size = len(gzip.decompress(path.read_bytes()))
        assert sum(decoded) < 1.3 * size
        assert done.events == len(part["traceEvents"]) == 50


class TestSplit:
    def test_elements_of_an_array(self) -> None:
        elements = [b'{"a": [1, {"b": "},{"}]}', b"3", b'"x,]"', b"[]", b"{}"]
        assert raw.split(b"[ " + b" ,\n".join(elements) + b" ]") == elements
        assert raw.split(b"[]") == []
