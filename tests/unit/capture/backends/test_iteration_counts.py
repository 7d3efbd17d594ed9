"""What each iteration did, read from real traces of GPUs (without ranges of ours) and from made-up ones."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from made_trace import START_US, MadeTrace

from verl_profiler_conf.capture.backends.base import IterationCounts
from verl_profiler_conf.capture.backends.iteration_counts import EventCounter, TraceCounts
from verl_profiler_conf.capture.backends.range_counts import Operators
from verl_profiler_conf.capture.ranges import RANGE

REAL = Path(os.environ.get("REAL_TRACES") or Path(__file__).resolve().parents[5] / "shared" / "traces")
real_traces = pytest.mark.skipif(not REAL.is_dir(), reason="the traces of real GPUs are not beside this clone")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def count(text: str | bytes) -> TraceCounts:
    counter = EventCounter()
    counter.feed(text.encode() if isinstance(text, str) else text, closes=True)
    return counter.result()


class TestMadeUpTraces:
    def test_each_iteration_has_what_it_launched(self) -> None:
        trace = MadeTrace()
        trace.iteration(4, operators=3, kernels=2)
        trace.iteration(5, operators=1, kernels=0, graphs=2)
        trace.iteration(6, operators=2, kernels=1, copies=2)
        counts = count(trace.text())
        assert counts.iterations == {
            4: IterationCounts(3, 2, 6_000),
            5: IterationCounts(1, 10, 30_000),  # all kernels of a graph replay share the launch's id
            6: IterationCounts(2, 1, 7_000),
        }
        assert counts.device_events == 2 + 10 + 3
        assert (counts.outside, counts.launches_without_kernel) == (0, 0)

    def test_a_kernel_that_runs_in_the_next_range_belongs_to_the_one_that_launched_it(self) -> None:
        trace = MadeTrace()
        trace.iteration(0, kernels=1)
        trace._device.clear()
        trace.now_us = START_US + 101
        trace.launch("cuLaunchKernelEx", delay=30.0)  # a Triton kernel, by the driver API
        trace.iteration(1, kernels=0)
        assert [found.kernels for found in count(trace.text()).iterations.values()] == [1, 0]

    def test_work_between_the_ranges_belongs_to_none(self) -> None:
        trace = MadeTrace()
        trace.iteration(0)
        trace.launch("cudaLaunchKernel")
        trace.now_us += 10
        trace.iteration(1)
        counts = count(trace.text())
        assert [found.kernels for found in counts.iterations.values()] == [2, 2]
        assert counts.device_events == 5

    @pytest.mark.parametrize("wrong", [-START_US, -1_000.0, 1_000.0])
    def test_wrong_times_are_outside(self, wrong: float) -> None:
        trace = MadeTrace()
        trace.iteration(0, kernels=3)
        trace.launch("cudaLaunchKernel", delay=wrong)
        counts = count(trace.text())
        assert (counts.device_events, counts.outside) == (4, 1)

    def test_lost_records(self) -> None:
        trace = MadeTrace()
        for index in range(3):
            trace.iteration(index)
        lost = trace._device
        trace._device = [event for number, event in enumerate(lost) if '"kernel"' not in event or number % 2]
        found = count(trace.text())
        assert found.launches == 6
        assert found.launches_without_kernel == sum('"kernel"' in event for event in lost) - found.device_events

    def test_what_kineto_logged(self) -> None:
        log = '"WARNING": ["WARNING:2026 1:1 CuptiActivityApi.cpp:326] Dropped 17 activity records"], "INFO": ['
        log += '"INFO: Record counts: Out-of-range = 0, Unexpected CUDA events = 0, GPU stopped early? = 1"]'
        counts = count(log)
        assert (counts.dropped, counts.stopped_early) == (17, True)

    def test_a_range_without_operators(self) -> None:
        trace = MadeTrace()
        trace.iteration(0)
        trace.iteration(1, operators=0)
        assert [found.operators for found in count(trace.text()).iterations.values()] == [2, 0]


def count_slowly(text: str) -> TraceCounts:
    """What must come out: every event read as JSON and held against every range."""
    events = json.loads(text)["traceEvents"]
    whole = [event for event in events if event.get("ph") == "X"]
    ranges = []
    for event in whole:
        if event["cat"] == "user_annotation" and (match := RANGE.match(event["name"])):
            ranges.append((event["ts"], event["ts"] + event["dur"], int(match[3])))
    ranges.sort()

    def at(moment: float) -> int | None:
        position = bisect_right([begin for begin, _, _ in ranges], moment) - 1
        return position if position >= 0 and moment <= ranges[position][1] else None

    calls = {e["args"]["correlation"]: e for e in whole if e["cat"] in ("cuda_runtime", "cuda_driver")}
    in_ranges = {cid for cid, call in calls.items() if at(call["ts"]) is not None}
    launches = {cid for cid in in_ranges if "Launch" in calls[cid]["name"]}
    device = [event for event in whole if event["cat"] in DEVICE]
    first = next((e["ts"] for e in events if e.get("name") == "process_name"), float("-inf")) - 1
    last = next((e["ts"] for e in events if e.get("name") == "Record Window End"), float("inf")) + 1
    found: dict[int, IterationCounts] = {}
    for position, (_, _, index) in enumerate(ranges):
        here = {cid for cid in in_ranges if at(calls[cid]["ts"]) == position}
        work = [event for event in device if event["args"]["correlation"] in here]
        operators = sum(event["cat"] == "cpu_op" and at(event["ts"]) == position for event in whole)
        before = found.get(index, IterationCounts())
        found[index] = IterationCounts(
            before.operators + operators,
            before.kernels + sum(event["cat"] == "kernel" for event in work),
            before.device_ns + round(sum(event["dur"] for event in work) * 1e3),
        )
    return TraceCounts(
        found,
        len(device),
        sum(event["ts"] < first or event["ts"] + event["dur"] > last for event in device),
        len(launches),
        len(launches - {event["args"]["correlation"] for event in device}),
    )


def feed_in_pieces(text: str, events_in_a_piece: int) -> TraceCounts:
    """Count as packing does: each piece begins at an event."""
    counter = EventCounter()
    cuts = [0, *(match.start() for match in re.finditer(r'\{\s*"ph"', text))][::events_in_a_piece]
    for begin, end in zip(cuts, [*cuts[1:], len(text)], strict=True):
        counter.feed(text[begin:end].encode(), closes=end == len(text))
    return counter.result()


class TestAgainstASlowReading:
    """Random traces: nested, empty and interrupted ranges, work between them, late, lost, misplaced and unsorted
    events, other layouts of the same JSON, pieces of any size."""

    @pytest.mark.parametrize("seed", range(60))
    def test_random_traces(self, seed: int) -> None:
        chance = random.Random(seed)
        trace = MadeTrace()
        for _ in range(chance.randrange(12)):
            begin = trace.now_us
            trace.iteration(
                chance.randrange(8),
                operators=chance.randrange(5),
                kernels=chance.randrange(4),
                graphs=chance.randrange(2),
                copies=chance.randrange(2),
            )
            if chance.random() < 0.3:
                trace.now_us = chance.uniform(begin, trace.now_us + 20)  # the next range begins in this one, or later
            if chance.random() < 0.3:
                trace.launch("cuLaunchKernelEx", delay=chance.choice([3.0, 90.0, -START_US, 1e6]), duration=0.125)
        lost = chance.choice([0.0, 0.2])
        trace._device = [event for event in trace._device if chance.random() >= lost]
        if chance.random() < 0.5:
            chance.shuffle(trace._host)
            chance.shuffle(trace._device)
        text = trace.text()
        layout = chance.choice(["as written", "one line", "indented"])
        if layout != "as written":
            text = json.dumps(json.loads(text), indent=None if layout == "one line" else 2)
        expected = count_slowly(text)
        assert feed_in_pieces(text, chance.choice([1, 2, 5, 1000])) == expected


@pytest.mark.parametrize(
    "texts",
    [
        ["5.123", "6.000", "7.500"],
        ["7.500", "5.123", "6.000"],
        ["9.123", "10.12", "10.11", "100.1"],  # equally long, but for the last, and not in the order of their texts
        ["999.12", "1000.1"],
        ["100.12", "1001.5", "101.99"],
        ["9", "10", "100"],
        ["5", "6", "7.5"],
        ["10", "2.5"],
        ["3.25"],
    ],
)
def test_the_first_and_the_last_operator(texts: list[str]) -> None:
    operators = Operators([text.encode() for text in texts])
    numbers = sorted(map(float, texts))
    assert (operators.first_us, operators.last_us) == (numbers[0], numbers[-1])
    assert operators.begins_us() == numbers


@real_traces
class TestRealTraces:
    @pytest.fixture(params=sorted(path.name for path in REAL.glob("*.json.gz")) if REAL.is_dir() else [])
    def raw(self, request: pytest.FixtureRequest) -> bytes:
        return gzip.decompress((REAL / request.param).read_bytes())

    def test_every_event_is_counted_and_none_lies_outside(self, raw: bytes) -> None:
        events = json.loads(raw)["traceEvents"]
        counts = count(raw)
        assert counts.device_events == sum(event.get("cat") in DEVICE for event in events)
        assert counts.outside == 0
        assert counts.iterations == {}

    def test_with_ranges_added(self, raw: bytes) -> None:
        """Ranges of ours are laid over the launches; a slow reading of the JSON says what must come out."""
        trace = json.loads(raw)
        events: list[dict[str, Any]] = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        host = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver", "cpu_op")]
        first = min(event["ts"] for event in host)
        last = max(event["ts"] for event in host) + 1
        edges = [first + (last - first) * part / 7 for part in range(8)]
        spans = [(begin, end - (end - begin) / 5) for begin, end in pairwise(edges)]
        for index, (begin, end) in enumerate(spans):
            name = f"response_tokens[{index}:{index + 1}) iter={index} reqs=1"
            added = {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": begin}
            trace["traceEvents"].append(added | {"dur": end - begin, "args": {"External id": 1}})
        expected = {}
        for index, (begin, end) in enumerate(spans):
            inside = [event for event in host if begin <= event["ts"] <= end]
            ids = {event["args"]["correlation"] for event in inside if event["cat"] != "cpu_op"}
            work = [e for e in events if e.get("cat") in DEVICE and e["args"]["correlation"] in ids]
            expected[index] = IterationCounts(
                sum(event["cat"] == "cpu_op" for event in inside),
                sum(event["cat"] == "kernel" for event in work),
                round(sum(event["dur"] for event in work) * 1e3),
            )
        counts = count(json.dumps(trace))
        assert {index: (c.operators, c.kernels) for index, c in counts.iterations.items()} == {
            index: (c.operators, c.kernels) for index, c in expected.items()
        }
        for index, found in counts.iterations.items():
            assert found.device_ns == pytest.approx(expected[index].device_ns, abs=2)
