"""The figures of traces: of small ones worked out by hand, and of real ones held against another way to count."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from trace_files import NAMES, complete, launched, load, real_trace, tokens, write

from verl_profiler_conf.tools.trace.analysis import analyse
from verl_profiler_conf.tools.trace.collect import Collected
from verl_profiler_conf.tools.trace.errors import TraceError
from verl_profiler_conf.tools.trace.events import PlainDecoder
from verl_profiler_conf.tools.trace.figures import Analysis, Spread
from verl_profiler_conf.tools.trace.names import OTHER, Names, kind_of
from verl_profiler_conf.tools.trace.reader import TraceReader

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def figures(path: Path, events: list[Any], **members: Any) -> Analysis:
    return analyse(write(path / "t.json", events, **members))


def union(pairs: list[tuple[float, float]]) -> float:
    covered, until = 0.0, float("-inf")
    for begin, end in sorted(pairs):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


class TestIterations:
    def test_device_work_counts_where_it_was_launched_not_where_it_ran(self, tmp_path: Path) -> None:
        found = figures(
            tmp_path,
            [
                tokens(0, 1, 10, 0, 100),
                tokens(1, 2, 11, 100, 100),
                *launched(1, "prefill", 50, 60, 70),
                *launched(2, "late", 90, 130, 40),
                *launched(3, "decode", 150, 170, 20),
                *launched(4, "outside", 220, 230, 5),
            ],
        )
        first, second = found.iterations
        assert (first.number, first.lo, first.hi, first.requests, first.phase) == (10, 0, 1, 2, "prefill")
        assert (first.wall_us, first.period_us, second.period_us) == (100, 100, None)
        assert first.device is not None
        assert second.device is not None
        assert (first.device.kernels, first.device.busy_us, first.device.idle_us) == (2, 110, 0)
        assert (first.device.first_us, first.device.last_us) == (60, 170)
        assert (second.device.kernels, second.device.busy_us) == (1, 20)
        assert found.outside is not None
        assert (found.outside.kernels, found.outside.idle_us) == (1, 40)
        assert found.attribution == "launch"

    def test_a_graph_is_launched_once_for_all_of_its_kernels(self, tmp_path: Path) -> None:
        kernels = [complete("kernel", "k", 200 + i * 10, 5, pid=0, correlation=9) for i in range(20)]
        launch = complete("cuda_runtime", "cudaGraphLaunch", 10, 30, correlation=9)
        found = figures(tmp_path, [tokens(4, 5, 1, 0, 50), tokens(5, 6, 2, 60, 400), *kernels, launch])
        assert [i.device.kernels for i in found.iterations if i.device] == [20, 0]

    def test_without_launches_device_work_counts_where_it_began(self, tmp_path: Path) -> None:
        kernels = [complete("kernel", "k", at, 5, pid=0) for at in (10, 20, 70)]
        found = figures(tmp_path, [tokens(4, 5, 1, 0, 50), tokens(5, 6, 2, 60, 50), *kernels])
        assert [i.device.kernels for i in found.iterations if i.device] == [2, 1]
        assert found.attribution == "time"
        assert any("no launches" in note for note in found.notes)

    def test_a_period_does_not_reach_over_a_hole(self, tmp_path: Path) -> None:
        found = figures(tmp_path, [tokens(1, 2, 1, 0, 5), tokens(2, 3, 2, 10, 5), tokens(9, 10, 9, 500, 5)])
        assert [i.period_us for i in found.iterations] == [10, None, None]
        assert [i.number for i in found.iterations] == [1, 2, 9]

    def test_the_accelerators_copy_of_a_range_is_no_iteration(self, tmp_path: Path) -> None:
        copy = {**tokens(1, 2, 1, 3, 5), "cat": "gpu_user_annotation"}
        assert len(figures(tmp_path, [tokens(1, 2, 1, 0, 5), copy]).iterations) == 1

    def test_the_parts_add_up_to_the_whole(self) -> None:
        found = analyse(real_trace("cuda_nccl_with_config"))
        assert found.device is not None
        assert found.outside is not None
        parts = [found.outside, *(i.device for i in found.iterations if i.device)]
        for name in (
            "kernels",
            "copies",
            "work_us",
            "busy_us",
            "compute_us",
            "communication_us",
            "exposed_us",
            "idle_us",
        ):
            assert sum(getattr(part, name) for part in parts) == pytest.approx(getattr(found.device, name), abs=1e-3)


class TestDeviceTime:
    def test_streams_that_overlap_are_busy_once(self, tmp_path: Path) -> None:
        found = figures(
            tmp_path,
            [
                *launched(1, "gemm", 0, 10, 30),
                *launched(2, "ncclDevKernel_AllReduce", 5, 20, 40, stream=8),
                *launched(3, "gemm", 40, 70, 10),
                complete("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 75, 15, pid=0, tid=9),
            ],
        ).device
        assert found is not None
        assert (found.kernels, found.copies, found.work_us) == (3, 1, 95)
        assert (found.busy_us, found.idle_us, found.gaps, found.longest_gap_us) == (70, 10, 1, 10)
        assert (found.compute_us, found.communication_us, found.copy_us) == (40, 40, 15)
        assert found.exposed_us == 20
        assert found.hidden_share == pytest.approx(0.5)
        assert found.busy_share == pytest.approx(70 / 80)

    def test_a_device_that_waits_for_launches(self, tmp_path: Path) -> None:
        events = [e for i in range(20) for e in launched(i, "k", i * 50, i * 50 + 6, 10)]
        found = figures(tmp_path, events).device
        assert found is not None
        assert found.launch_bound
        assert found.launch_wait_us == found.idle_us == 19 * 40
        assert found.queued_us == pytest.approx(4)

    def test_a_device_that_waits_for_something_else(self, tmp_path: Path) -> None:
        events = [e for i in range(20) for e in launched(i, "k", i, 100 + i * 50, 10)]
        found = figures(tmp_path, events).device
        assert found is not None
        assert not found.launch_bound
        assert found.launch_wait_us == 0
        assert found.idle_us == 19 * 40

    def test_a_busy_device(self, tmp_path: Path) -> None:
        found = figures(tmp_path, [e for i in range(20) for e in launched(i, "k", i, 100 + i * 10, 9.5)]).device
        assert found is not None
        assert not found.launch_bound
        assert found.busy_share == pytest.approx(0.95, abs=0.01)

    @pytest.mark.parametrize("name", NAMES)
    def test_against_another_way_to_count(self, name: str) -> None:
        path = real_trace(name)
        work = [e for e in load(path)["traceEvents"] if e.get("cat") in DEVICE and e["ph"] == "X"]
        found = analyse(path)
        if not work:
            assert found.device is None
            return
        assert found.device is not None
        pairs = [(e["ts"], e["ts"] + e["dur"]) for e in work]
        assert found.device.busy_us == pytest.approx(union(pairs), rel=1e-6, abs=0.01)
        span = max(end for _, end in pairs) - min(begin for begin, _ in pairs)
        assert found.device.busy_us + found.device.idle_us == pytest.approx(span, rel=1e-6, abs=0.01)
        sums: dict[str, list[float]] = defaultdict(list)
        for event in work:
            sums[event["name"]].append(event["dur"])
        assert {k.name: (k.calls, pytest.approx(k.total_us, rel=1e-6)) for k in found.kernels} == {
            name: (len(times), sum(times)) for name, times in sums.items()
        }
        for kernel in found.kernels:
            times = sums[kernel.name]
            assert (kernel.smallest_us, kernel.largest_us) == pytest.approx((min(times), max(times)))
        compute = [
            pair
            for pair, e in zip(pairs, work, strict=True)
            if e["cat"] == "kernel" and "nccl" not in e["name"].lower()
        ]
        communication = [pair for pair, e in zip(pairs, work, strict=True) if "nccl" in e["name"].lower()]
        assert found.device.compute_us == pytest.approx(union(compute), rel=1e-6, abs=0.01)
        assert found.device.communication_us == pytest.approx(union(communication), rel=1e-6, abs=0.01)
        hidden = union(compute) + union(communication) - union(compute + communication)
        assert found.device.communication_us - found.device.exposed_us == pytest.approx(hidden, abs=0.01)


class TestMemory:
    @pytest.mark.parametrize("name", ["cuda_nccl_with_config", "cuda_nccl_sampled_rank0", "rocm_mi250_training"])
    def test_what_goes_through_a_temporary_file_gives_the_same_figures(self, name: str) -> None:
        path = real_trace(name)
        assert asdict(analyse(path, keep_rows=50)) == asdict(analyse(path))

    def test_the_same_figures_by_the_standard_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        path = real_trace("cuda_nccl_sampled_rank1")
        fast = asdict(analyse(path))
        monkeypatch.setattr("verl_profiler_conf.tools.trace.reader.decoder", PlainDecoder)
        assert asdict(analyse(path)) == fast

    def test_it_does_not_grow_with_what_a_hostile_trace_makes_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("verl_profiler_conf.tools.trace.names._MAX_NAMES", 50)
        monkeypatch.setattr("verl_profiler_conf.tools.trace.operators.MAX_THREADS", 60)
        monkeypatch.setattr("verl_profiler_conf.tools.trace.collect._MAX_STREAMS", 70)
        monkeypatch.setattr("verl_profiler_conf.tools.trace.collect.MAX_RANGES", 80)
        events = []
        for i in range(500):
            events += [
                complete("cpu_op", f"op {i}", i, 1, tid=i),
                complete("kernel", f"kernel {i}", i, 1, pid=0, tid=i),
                tokens(i, i + 1, i, i, 1),
            ]
        collected = Collected()
        for piece in TraceReader(write(tmp_path / "t.json", events)).events():
            collected.add(piece)
        collected.finish()
        assert len(collected.names.texts) == 51
        assert len(collected.operators._threads) == 61
        assert (len(collected.streams), len(collected.ranges)) == (70, 80)
        found = figures(tmp_path, events)
        assert found.kernels_count == 500
        assert sum(k.calls for k in found.kernels) == 500
        assert any(OTHER in note for note in found.notes)

    def test_more_names_than_are_kept_count_as_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("verl_profiler_conf.tools.trace.names._MAX_NAMES", 3)
        names = Names()
        assert [names.number(name) for name in "abcdea"] == [0, 1, 2, 3, 3, 0]
        assert names.texts == ["a", "b", "c", OTHER]


class TestHost:
    def test_own_time_is_without_the_operators_inside(self, tmp_path: Path) -> None:
        found = figures(
            tmp_path,
            [
                complete("cpu_op", "outer", 0, 100, **{"External id": 1}),
                complete("cpu_op", "inner", 10, 30, **{"External id": 2}),
                complete("cpu_op", "leaf", 15, 5),
                complete("cpu_op", "inner", 50, 20),
                complete("cpu_op", "other thread", 20, 50, tid=2),
                complete("kernel", "k", 60, 7, pid=0, **{"External id": 2}),
            ],
        )
        assert {o.name: (o.calls, o.total_us, o.self_us, o.device_us) for o in found.operators} == {
            "outer": (1, 100, 50, 0),
            "inner": (2, 50, 45, 7),
            "leaf": (1, 5, 5, 0),
            "other thread": (1, 50, 50, 0),
        }
        assert found.operators_ordered
        assert found.operators_count == 5

    def test_an_operator_that_only_calls_one_of_its_own_name_is_one_call(self, tmp_path: Path) -> None:
        found = figures(
            tmp_path,
            [
                *(complete("cpu_op", "aten::sum", begin, dur) for begin, dur in ((0, 100), (5, 90), (6, 80))),
                complete("cpu_op", "aten::fill_", 10, 20),
                *(complete("cpu_op", "aten::to", begin, dur) for begin, dur in ((200, 100), (210, 10), (230, 10))),
            ],
        )
        assert {o.name: (o.calls, o.total_us, o.self_us) for o in found.operators} == {
            "aten::sum": (1, 100, 80),
            "aten::fill_": (1, 20, 20),
            "aten::to": (3, 120, 100),
        }

    def test_an_order_of_no_use_is_told(self, tmp_path: Path) -> None:
        found = figures(tmp_path, [complete("cpu_op", "b", 50, 5), complete("cpu_op", "a", 0, 100)])
        assert not found.operators_ordered
        assert any("no order" in note for note in found.notes)

    def test_annotations_are_marked_and_iterations_share_a_name(self, tmp_path: Path) -> None:
        found = figures(tmp_path, [tokens(i, i + 1, i, i * 10, 5) for i in range(9)])
        assert [(o.name, o.is_annotation, o.calls) for o in found.operators] == [("response_tokens[...]", True, 9)]
        assert found.operators_count == 0

    def test_torchs_own_averages(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.GELU())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for _ in range(5):
                with torch.profiler.record_function("my range"):
                    layer(torch.randn(8, 64)).sum().backward()
        profiler.export_chrome_trace(str(tmp_path / "t.json"))
        found = {o.name: o for o in analyse(tmp_path / "t.json").operators}
        averages = {a.key: a for a in profiler.key_averages()}
        assert len(averages) > 20
        assert set(found) == set(averages)
        for name, average in averages.items():
            assert found[name].calls == average.count
            assert found[name].total_us == pytest.approx(average.cpu_time_total, abs=0.002 * average.count + 0.01)
            assert found[name].self_us == pytest.approx(average.self_cpu_time_total, abs=0.01 * average.count + 0.01)


class TestFacts:
    def test_of_the_whole_trace(self) -> None:
        found = analyse(real_trace("cuda_nccl_with_config"))
        assert (found.rank, found.world_size, found.backend) == (0, 2, "nccl")
        assert found.base_ns == 1711964646000000000
        assert set(found.devices) == {"NVIDIA A100-PG509-200"}
        assert (found.source, len(found.iterations)) == ("profiler_step", 3)
        assert (found.kernels_count, found.copies_count) == (2700, 1074)
        assert found.events == 40573

    def test_counters_instead_of_kernels_are_told(self) -> None:
        found = analyse(real_trace("cuda_cupti_counters"))
        assert found.device is None
        assert any("cuda_profiler_range" in note for note in found.notes)

    def test_a_strip_is_of_the_typical_decoding_iteration(self, tmp_path: Path) -> None:
        events = [tokens(0, 1, 0, 0, 90), *launched(0, "prefill", 1, 5, 80)]
        for i, dur in ((1, 10), (2, 30), (3, 20)):
            events += [tokens(i, i + 1, i, i * 100, 50), *launched(i, "decode", i * 100 + 1, i * 100 + 5, dur)]
        found = figures(tmp_path, events)
        assert found.strip_iteration == 3
        assert [(w.name, w.begin_us, w.dur_us, w.stream) for w in found.strip] == [("decode", 305, 20, "7")]
        assert found.by_iteration == {"prefill": (80, 0, 0, 0), "decode": (0, 10, 30, 20)}
        assert [i.number for i in found.phase("decode")] == [1, 2, 3]

    def test_it_is_plain_data(self) -> None:
        text = json.dumps(analyse(real_trace("cuda_nccl_sampled_rank0")).as_data())
        assert json.loads(text)["world_size"] == 128

    def test_a_merged_trace_is_refused(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t.json", [tokens(1, 2, 1, 0, 5)], verl_profiler_merge=[])
        with pytest.raises(TraceError, match="several ranks in one trace"):
            analyse(path)

    def test_an_empty_trace(self, tmp_path: Path) -> None:
        found = figures(tmp_path, [])
        assert (found.events, found.device, found.iterations, found.span_us) == (0, None, (), 0)

    def test_times_on_a_clock_of_a_million_years_are_kept_apart(self, tmp_path: Path) -> None:
        events = [complete("kernel", "k", at, 1e13, pid=0) for at in (-4e15, 0, 4e15)]
        found = figures(tmp_path, events).device
        assert found is not None
        assert found.busy_us == pytest.approx(3e13)


class TestKinds:
    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
            ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>", "communication"),
            ("hcom_allReduce__123_0_1", "communication"),
            ("void multimem_all_reduce_kernel<float>", "communication"),
            ("Memcpy DtoD (Device -> Device)", "copy"),
            ("Memset (Device)", "copy"),
            ("void at::native::reduce_kernel<512, 1>", "compute"),
            ("flash_fwd_splitkv_kernel", "compute"),
        ],
    )
    def test_by_name(self, name: str, kind: str) -> None:
        assert kind_of(name) == kind


class TestSpread:
    def test_of_values(self) -> None:
        assert Spread.of(range(11)) == Spread(11, 5, 1, 9, 0, 10)

    def test_of_none(self) -> None:
        assert Spread.of([]) is None
