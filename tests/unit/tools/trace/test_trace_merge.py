"""Ranks in one trace: every event once, processes and arrows apart, clocks laid over one another, strangers refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from trace_files import complete, launched, load, real_trace, tokens, write

from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.tools.trace import rewrite
from verl_profiler_conf.tools.trace.errors import MERGED as MEMBER
from verl_profiler_conf.tools.trace.errors import TraceError
from verl_profiler_conf.tools.trace.merging import merge_folder, merge_traces
from verl_profiler_conf.tools.trace.project import Manifest
from verl_profiler_conf.tools.trace.rewrite import moved
from verl_profiler_conf.tools.trace.select import Selection
from verl_profiler_conf.tools.trace.slicing import slice_trace


def rank(folder: Path, number: int, *, late_us: float = 0, numbers: Any = (5, 6, 7), **members: Any) -> Path:
    """The trace of one rank: three iterations of 100 microseconds, a kernel and an arrow in each."""
    events: list[Any] = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "pid": 1, "tid": 0, "ts": 0, "args": {"labels": "CPU"}},
        {"ph": "M", "name": "process_sort_index", "pid": 1, "tid": 0, "ts": 0, "args": {"sort_index": 1}},
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "ts": 0, "args": {"labels": f"GPU {number}"}},
        {"ph": "M", "name": "process_sort_index", "pid": 0, "tid": 0, "ts": 0, "args": {"sort_index": 5000000}},
        {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "ts": 0, "args": {"name": "without events"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "ts": 0, "args": {"name": "stream 7"}},
    ]
    for at, iteration in enumerate(numbers):
        begin = 1000 + late_us + at * 110
        events.append(tokens(iteration, iteration + 1, iteration, begin, 100))
        events += launched(at + 1, "k", begin + 5, begin + 10, 50)
    info = {"backend": "nccl", "rank": number, "world_size": 2, **members.pop("distributedInfo", {})}
    return write(folder / f"rank{number}.json", events, distributedInfo=info, **members)


def begins(whole: Any) -> dict[str, list[float]]:
    """When the iterations begin, by the name of the process."""
    events = whole["traceEvents"]
    process = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    found: dict[str, list[float]] = {}
    for event in events:
        if event["name"].startswith("response_tokens"):
            found.setdefault(process[event["pid"]], []).append(event["ts"])
    return found


class TestMerged:
    def test_every_event_of_every_rank_once(self, tmp_path: Path) -> None:
        paths = [real_trace(f"cuda_nccl_sampled_rank{r}") for r in (0, 1)]
        done = merge_traces(paths, tmp_path / "m.json.gz")
        whole = load(tmp_path / "m.json.gz")["traceEvents"]

        def told(events: list[Any]) -> Counter[str]:
            kept = ({k: v for k, v in e.items() if k != "pid"} for e in events if not e["name"].startswith("process_"))
            return Counter(json.dumps(event, sort_keys=True) for event in kept)

        both = told([e for path in paths for e in load(path)["traceEvents"]])
        merged = told(whole)
        assert all(json.loads(lost)["ph"] == "M" for lost in both - merged)
        assert not merged - both
        assert done.events == len(whole)

    def test_processes_are_apart_named_and_sorted_by_rank(self, tmp_path: Path) -> None:
        merge_traces([rank(tmp_path, 1), rank(tmp_path, 0)], tmp_path / "m.json")
        events = load(tmp_path / "m.json")["traceEvents"]
        named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
        assert [named[pid] for pid in sorted(named, key=lambda pid: order[pid])] == [
            "rank 0: python (1)",
            "rank 0: python GPU 0",
            "rank 1: python (1)",
            "rank 1: python GPU 1",
        ]
        assert {e["pid"] for e in events} == set(named)
        assert len({(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}) == 2

    def test_arrows_stay_inside_their_rank(self, tmp_path: Path) -> None:
        merge_traces([rank(tmp_path, 0), rank(tmp_path, 1)], tmp_path / "m.json")
        ends: dict[Any, list[str]] = {}
        for event in load(tmp_path / "m.json")["traceEvents"]:
            if event["ph"] in "sf":
                ends.setdefault(event["id"], []).append(event["ph"])
        assert len(ends) == 6
        assert all(sorted(phases) == ["f", "s"] for phases in ends.values())
        assert all(0 <= key < 2**53 for key in ends)

    def test_ids_that_are_text(self, tmp_path: Path) -> None:
        for number in (0, 1):
            path = rank(tmp_path, number)
            path.write_text(path.read_text().replace('"id": 1,', '"id": "0x1",').replace('"id": 2,', f'"id": {2**60},'))
        merge_traces([tmp_path / "rank0.json", tmp_path / "rank1.json"], tmp_path / "m.json")
        ids = {str(e["id"]) for e in load(tmp_path / "m.json")["traceEvents"] if e["ph"] == "s"}
        assert {"0:0x1", "1:0x1", f"0:{2**60}", f"1:{2**60}"} < ids

    def test_what_it_says_of_itself(self, tmp_path: Path) -> None:
        merge_traces([rank(tmp_path, 0), rank(tmp_path, 1)], tmp_path / "m.json")
        whole = load(tmp_path / "m.json")
        assert [(r["rank"], r["file"]) for r in whole[MEMBER]] == [(0, "rank0.json"), (1, "rank1.json")]
        assert "distributedInfo" not in whole

    def test_by_the_standard_library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        paths = [rank(tmp_path, 0), rank(tmp_path, 1, late_us=0.25, baseTimeNanoseconds=0)]
        merge_traces(paths, tmp_path / "a.json")
        monkeypatch.setattr(rewrite, "HAS_MSGSPEC", False)
        merge_traces(paths, tmp_path / "b.json")
        assert load(tmp_path / "a.json") == load(tmp_path / "b.json")

    def test_pids_that_are_text_or_not_there(self, tmp_path: Path) -> None:
        for number in (0, 1):
            path = rank(tmp_path, number)
            whole = load(path)
            whole["traceEvents"] += [
                {**complete("Trace", "PyTorch Profiler (0)", 1, 2), "pid": 'Spans "x"'},
                {"ph": "i", "name": "mark", "ts": 1100},
                {**complete("cpu_op", "a", 1100, 1), "pid": None},
            ]
            path.write_text(json.dumps(whole))
        merge_traces([tmp_path / "rank0.json", tmp_path / "rank1.json"], tmp_path / "m.json")
        events = load(tmp_path / "m.json")["traceEvents"]
        for name in ("PyTorch Profiler (0)", "mark", "a"):
            assert len({e["pid"] for e in events if e["name"] == name}) == 2

    def test_slices_of_ranks_merge(self, tmp_path: Path) -> None:
        slices = []
        for number in (0, 1):
            slices.append(tmp_path / f"slice{number}.json.gz")
            slice_trace(rank(tmp_path, number), slices[-1], Selection(start=6, end=7))
        merge_traces(slices, tmp_path / "m.json")
        assert begins(load(tmp_path / "m.json")) == {"rank 0: python (1)": [1110], "rank 1: python (1)": [1110]}
        with pytest.raises(TraceError, match="slice those of the ranks"):
            slice_trace(tmp_path / "m.json", tmp_path / "n.json", Selection(start=6, end=7))


class TestClocks:
    def test_what_they_count_from(self, tmp_path: Path) -> None:
        merge_traces(
            [
                rank(tmp_path, 0, baseTimeNanoseconds=1_000_000_000_000),
                rank(tmp_path, 1, late_us=-500, baseTimeNanoseconds=1_000_000_501_250),
            ],
            tmp_path / "m.json",
        )
        whole = load(tmp_path / "m.json")
        assert begins(whole) == {
            "rank 0: python (1)": [1000, 1110, 1220],
            "rank 1: python (1)": [1001.25, 1111.25, 1221.25],
        }
        assert whole["baseTimeNanoseconds"] == 1_000_000_000_000
        assert whole[MEMBER][1]["shift_us"] == 501.25

    def test_what_only_one_of_them_says_moves_none(self, tmp_path: Path) -> None:
        done = merge_traces([rank(tmp_path, 0, baseTimeNanoseconds=10**18), rank(tmp_path, 1)], tmp_path / "m.json")
        assert [r.shift_us for r in done.ranks] == [0, 0]
        assert "baseTimeNanoseconds" not in load(tmp_path / "m.json")

    def test_a_rank_that_is_late_stays_late(self, tmp_path: Path) -> None:
        done = merge_traces([rank(tmp_path, 0), rank(tmp_path, 1, late_us=30)], tmp_path / "m.json")
        assert begins(load(tmp_path / "m.json"))["rank 1: python (1)"] == [1030, 1140, 1250]
        assert [r.aligned_by for r in done.ranks] == ["clock", "clock"]

    def test_clocks_that_disagree_are_laid_over_one_another(self, tmp_path: Path) -> None:
        done = merge_traces([rank(tmp_path, 0), rank(tmp_path, 1, late_us=240.5)], tmp_path / "m.json")
        assert begins(load(tmp_path / "m.json"))["rank 1: python (1)"] == [1000, 1110, 1220]
        assert [(r.shift_us, r.aligned_by) for r in done.ranks] == [(0, "clock"), (-240.5, "iterations")]

    def test_only_iterations_that_both_ran_count(self, tmp_path: Path) -> None:
        merge_traces([rank(tmp_path, 0), rank(tmp_path, 1, late_us=110, numbers=(6, 7, 8))], tmp_path / "m.json")
        assert begins(load(tmp_path / "m.json"))["rank 1: python (1)"] == [1110, 1220, 1330]

    @pytest.mark.parametrize(
        ("text", "shift_ns", "later"),
        [
            (b"4458676522690.655", 1, b"4458676522690.656"),
            (b"1695835542514261", 999, b"1695835542514261.999"),
            (b"1.5", -2000, b"-0.500"),
            (b"-1.5", 500, b"-1.000"),
            (b'"12.250"', 750, b"13.000"),
            (b"1e3", 1000, b"1001.000"),
            (b"0.1234", 0, b"0.123"),
        ],
    )
    def test_no_digit_is_lost(self, text: bytes, shift_ns: int, later: bytes) -> None:
        assert moved(text, shift_ns) == later


class TestRefused:
    def refused(self, paths: list[Path], out: Path, wrong: str) -> None:
        with pytest.raises(TraceError, match=wrong) as error:
            merge_traces(paths, out)
        assert "\n" not in str(error.value)
        assert not out.exists()

    def test_other_ranks_than_one_capture_has(self, tmp_path: Path) -> None:
        (tmp_path / "b").mkdir()
        first, same = rank(tmp_path, 0), rank(tmp_path / "b", 0)
        self.refused([first, same], tmp_path / "m.json", "both are of rank 0")
        self.refused([first], tmp_path / "m.json", "one trace alone")

    def test_other_worlds(self, tmp_path: Path) -> None:
        paths = [rank(tmp_path, 0), rank(tmp_path, 1, distributedInfo={"world_size": 4})]
        self.refused(paths, tmp_path / "m.json", "world sizes are 2 and 4")

    def test_other_iterations(self, tmp_path: Path) -> None:
        self.refused(
            [rank(tmp_path, 0), rank(tmp_path, 1, numbers=(50, 51))], tmp_path / "m.json", "no iteration in common"
        )
        self.refused(
            [rank(tmp_path, 0), rank(tmp_path, 1, numbers=())], tmp_path / "m.json", "no events|has iterations"
        )

    def test_other_times(self, tmp_path: Path) -> None:
        paths = [rank(tmp_path, 0), rank(tmp_path, 1, late_us=1e9)]
        self.refused(paths, tmp_path / "m.json", "of different times")

    def test_a_rank_that_nothing_says(self, tmp_path: Path) -> None:
        paths = [rank(tmp_path, 0), rank(tmp_path, 1)]
        nameless = tmp_path / "x.json"
        nameless.write_text(paths[1].read_text().replace('"rank": 1', '"r": 1'))
        self.refused([paths[0], nameless], tmp_path / "m.json", "which rank it is")

    def test_merged_already(self, tmp_path: Path) -> None:
        paths = [rank(tmp_path, 0), rank(tmp_path, 1)]
        merge_traces(paths, tmp_path / "m_rank3.json")
        self.refused([paths[0], tmp_path / "m_rank3.json"], tmp_path / "n.json", "merged already")

    def test_a_broken_rank(self, tmp_path: Path) -> None:
        paths = [rank(tmp_path, 0), rank(tmp_path, 1)]
        paths[1].write_bytes(paths[1].read_bytes()[:-9])
        self.refused(paths, tmp_path / "m.json", "cut off")

    def test_over_another_file(self, tmp_path: Path) -> None:
        paths = [rank(tmp_path, 0), rank(tmp_path, 1)]
        (tmp_path / "m.json").write_text("mine")
        with pytest.raises(FileExistsError):
            merge_traces(paths, tmp_path / "m.json")
        merge_traces(paths, tmp_path / "m.json", replace=True)
        assert MEMBER in load(tmp_path / "m.json")


class TestFolder:
    def leave(self, folder: Path, number: int, **fields: Any) -> Path:
        path = rank(folder, number, late_us=fields.pop("late_us", 0))
        fields = {"run_id": "r", "trace": path.name, **fields}
        manifest = Manifest(fields.pop("window", TokenWindow(5, 8)), "vllm", "0.32.0", number, "lead", **fields)
        (folder / f"{path.stem}.manifest.json").write_text(manifest.to_json())
        return path

    def test_the_ranks_of_its_one_capture(self, tmp_path: Path) -> None:
        self.leave(tmp_path, 0)
        self.leave(tmp_path, 1)
        assert [r.rank for r in merge_folder(tmp_path, tmp_path / "m.json").ranks] == [0, 1]
        assert [r.rank for r in merge_folder(tmp_path, tmp_path / "m.json", replace=True).ranks] == [0, 1]

    def test_without_manifests_all_traces_of_it(self, tmp_path: Path) -> None:
        rank(tmp_path, 0)
        rank(tmp_path, 1)
        assert len(merge_folder(tmp_path, tmp_path / "m.json").ranks) == 2
        assert len(merge_folder(tmp_path, tmp_path / "m.json", replace=True).ranks) == 2

    def test_several_captures_are_named(self, tmp_path: Path) -> None:
        self.leave(tmp_path, 0)
        self.leave(tmp_path, 1, window=TokenWindow(50, 60))
        with pytest.raises(TraceError, match=r"2 captures \(vllm \[5, 8\) part 1, vllm \[50, 60\) part 1\)"):
            merge_folder(tmp_path, tmp_path / "m.json")

    def test_files_whose_manifests_are_of_two_runs(self, tmp_path: Path) -> None:
        paths = [self.leave(tmp_path, 0), self.leave(tmp_path, 1, run_id="other")]
        with pytest.raises(TraceError, match="run r and run other"):
            merge_traces(paths, tmp_path / "m.json")

    def test_hosts_of_one_run_may_have_clocks_far_apart(self, tmp_path: Path) -> None:
        self.leave(tmp_path, 0)
        self.leave(tmp_path, 1, late_us=5e6)
        assert merge_folder(tmp_path, tmp_path / "m.json").ranks[1].shift_us == -5e6

    def test_a_folder_without_any(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="no trace in it"):
            merge_folder(tmp_path, tmp_path / "m.json")
