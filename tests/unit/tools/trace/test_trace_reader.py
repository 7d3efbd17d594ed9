"""Every form of trace gives the events that the standard library finds in it; every broken one gives one line."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_files import NAMES, complete, load, real_trace, write

from verl_profiler_conf.tools.trace import chunks
from verl_profiler_conf.tools.trace.counts import count
from verl_profiler_conf.tools.trace.events import Event, PlainDecoder, TypedDecoder
from verl_profiler_conf.tools.trace.reader import TraceError, TraceReader

EVENTS = [complete("cpu_op", f"aten::op{i}", i * 10.0, 5, **{"External id": i}) for i in range(9)]
PLAIN = json.dumps({"traceEvents": EVENTS}).encode()

# what a name or an argument may hold, and what would end an event if strings were not looked at
AWKWARD = ['}, {"ph', "]}", '"', "\\", '\\"}, {', "{[", "é", "\u2028", "\U0001f600", "a" * 3000, "\n", ""]


def read(path: Path, piece_bytes: int = chunks.PIECE_BYTES, decoder: Any = None) -> list[Event]:
    reader = TraceReader(path, piece_bytes=piece_bytes)
    return [event for events in reader.pieces(decoder or TypedDecoder()) for event in events]


def seen(events: list[Event]) -> list[tuple[Any, ...]]:
    return [(e.ph, e.cat, e.name, e.ts, e.dur, e.pid, e.tid, e.id) for e in events]


def expected(events: list[Any]) -> list[tuple[Any, ...]]:
    rows = [e for e in events if isinstance(e, dict)]
    return [
        (
            e.get("ph", ""),
            e.get("cat", ""),
            e.get("name", ""),
            float(e.get("ts", 0)),
            float(e.get("dur", 0)),
            e.get("pid", 0),
            e.get("tid", 0),
            e.get("id"),
        )
        for e in rows
    ]


class TestRealTraces:
    @pytest.mark.parametrize("decoder", [TypedDecoder, PlainDecoder])
    @pytest.mark.parametrize("name", NAMES)
    def test_the_events_are_those_of_the_standard_library(self, name: str, decoder: Any) -> None:
        path = real_trace(name)
        whole = load(path)
        assert seen(read(path, decoder=decoder())) == expected(whole["traceEvents"])

    @pytest.mark.parametrize("piece_bytes", [64, 1000, 1 << 14])
    @pytest.mark.parametrize("name", ["cuda_simple_add", "cuda_nccl_sampled_rank0", "rocm_mi250_training"])
    def test_pieces_of_any_size_hold_the_same_events(self, name: str, piece_bytes: int) -> None:
        path = real_trace(name)
        assert seen(read(path, piece_bytes)) == seen(read(path))

    @pytest.mark.parametrize("name", NAMES)
    def test_what_stands_beside_the_events_is_kept_as_it_is(self, name: str) -> None:
        path = real_trace(name)
        reader = TraceReader(path)
        for _ in reader.events():
            pass
        whole = load(path)
        assert {key: json.loads(raw) for key, raw in reader.members.items()} == {
            key: value for key, value in whole.items() if key != "traceEvents"
        }

    @pytest.mark.parametrize("name", ["cuda_nccl_with_config", "rocm_mi250_training", "cuda_triton"])
    def test_arguments_that_join_events(self, name: str) -> None:
        path = real_trace(name)
        for event, raw in zip(read(path), load(path)["traceEvents"], strict=True):
            args = raw.get("args")
            assert (event.args is None) == (args is None)
            if event.args is not None:
                assert event.args.correlation == args.get("correlation")
                assert event.args.external == args.get("External id")


class TestForms:
    @pytest.mark.parametrize(
        "data",
        [
            PLAIN,
            json.dumps({"traceEvents": EVENTS}, indent=2).encode(),
            json.dumps({"traceEvents": EVENTS}, separators=(",", ":")).encode(),
            json.dumps(EVENTS).encode(),
            json.dumps(EVENTS, indent=1).encode() + b"\n\n",
            b"\xef\xbb\xbf" + PLAIN,
            b" \r\n\t" + PLAIN.replace(b"}, {", b"}  \n, \r\n {"),
            json.dumps({"a": {"traceEvents": [1]}, "traceEvents": EVENTS, "b": [[], {}, "]"], "c": 1e9}).encode(),
            gzip.compress(PLAIN, mtime=0),
            gzip.compress(PLAIN[:100], mtime=0)
            + gzip.compress(PLAIN[100:300], mtime=0)
            + gzip.compress(PLAIN[300:], mtime=0),
            gzip.compress(PLAIN, mtime=0) + b"\0" * 512,
        ],
        ids=["spaces", "indented", "dense", "array", "lines", "mark", "loose", "around", "gzip", "members", "padded"],
    )
    @pytest.mark.parametrize("piece_bytes", [7, 1 << 18])
    @pytest.mark.parametrize("suffix", [".json", ".json.gz"])
    def test_the_same_events_in_every_form(self, tmp_path: Path, data: bytes, piece_bytes: int, suffix: str) -> None:
        path = tmp_path / f"t{suffix}"
        path.write_bytes(data)
        assert seen(read(path, piece_bytes)) == expected(EVENTS)

    def test_no_events_at_all(self, tmp_path: Path) -> None:
        for form in (b'{"traceEvents": []}', b"[]", b'{"traceEvents": [ ], "x": 1}'):
            path = tmp_path / "t.json"
            path.write_bytes(form)
            assert read(path) == []

    @pytest.mark.parametrize("piece_bytes", [16, 1 << 18])
    def test_lists_of_objects_inside_events(self, tmp_path: Path, piece_bytes: int) -> None:
        events = [{**e, "args": {"list": [{"a": 1}, {"b": [{}, {}]}], "correlation": 5}} for e in EVENTS]
        found = read(write(tmp_path / "t.json", events), piece_bytes)
        assert seen(found) == expected(events)
        assert all(event.args is not None and event.args.correlation == 5 for event in found)

    def test_times_in_text_as_ascend_writes_them(self, tmp_path: Path) -> None:
        events = [{**e, "ts": f"{e['ts']:.3f}", "dur": str(e["dur"])} for e in EVENTS]
        assert seen(read(write(tmp_path / "t.json", events), 500)) == expected(EVENTS)

    def test_what_is_not_quite_json_or_not_of_the_usual_types(self, tmp_path: Path) -> None:
        path = tmp_path / "t.json"
        path.write_bytes(
            b'{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "args": {"est. achieved occupancy %": NaN}},'
            b' 3, null, {"ph": "X", "name": null, "cat": 7, "ts": 2, "dur": null, "pid": 1.5, "args": [1]},'
            b' {"ph": "X", "name": "c", "ts": 3, "args": {"correlation": 99999999999999999999, "External id": "12"}}]}'
        )
        found = read(path)
        assert [(e.name, e.cat, e.ts, e.dur, e.pid) for e in found] == [
            ("a", "", 1, 0, 0),
            ("", "7", 2, 0, "1.5"),
            ("c", "", 3, 0, 0),
        ]
        assert found[1].args is None
        assert found[2].args is not None
        assert (found[2].args.correlation, found[2].args.external) == (None, 12)

    @settings(max_examples=150, deadline=None)
    @given(
        events=st.lists(
            st.fixed_dictionaries(
                {"ph": st.sampled_from("XsfM"), "name": st.sampled_from(AWKWARD), "ts": st.integers(0, 2**40)},
                optional={
                    "args": st.recursive(
                        st.sampled_from(AWKWARD) | st.integers() | st.none(),
                        lambda inner: (
                            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(AWKWARD), inner, max_size=3)
                        ),
                        max_leaves=8,
                    )
                },
            ),
            max_size=12,
        ),
        form=st.sampled_from([{"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}]),
        piece_bytes=st.integers(1, 400),
        is_array=st.booleans(),
    )
    def test_any_events_in_pieces_of_any_size(
        self, tmp_path_factory: pytest.TempPathFactory, events: Any, form: Any, piece_bytes: int, is_array: bool
    ) -> None:
        path = tmp_path_factory.mktemp("any") / "t.json"
        path.write_text(json.dumps(events if is_array else {"x": "[", "traceEvents": events, "y": "]"}, **form))
        assert seen(read(path, piece_bytes)) == expected(events)
        assert seen(read(path, piece_bytes, PlainDecoder())) == expected(events)


class TestBrokenFiles:
    @pytest.mark.parametrize(
        ("name", "data", "wrong"),
        [
            ("t.json", b"", "empty"),
            ("t.json", b" \n ", "nothing in it but white space"),
            ("t.json.gz", gzip.compress(b"", mtime=0), "nothing in it but white space"),
            ("t.json", b"<html>", "not whole JSON"),
            ("t.json.gz", b"not gzip at all", "not whole gzip data"),
            ("t.json.gz", gzip.compress(PLAIN, mtime=0)[:-30], "cut off"),
            ("t.json.gz", gzip.compress(PLAIN, mtime=0)[:9] + b"\xff" * 40, "not whole gzip data"),
            ("t.json", b"3", "no list of traceEvents"),
            ("t.json", b'"text"', "no list of traceEvents"),
            ("t.json", b"{}", "no list of traceEvents"),
            ("t.json", b'{"traceEvents": {}}', "no list of traceEvents"),
            ("t.json", b'{"traceEvents": [{"ph": "X"}', "cut off"),
            ("t.json", b'{"traceEvents": [{"ph": "X",}]}', "not whole JSON"),
            ("t.json", b'{"traceEvents": [{"ph": "X"} {"ph": "X"}]}', "not whole JSON"),
            ("t.json", b'{"traceEvents": [{"ph": "X"},]}', "not whole JSON"),
            ("t.json", b'{"traceEvents": []} {}', "more follows"),
            ("t.json", b'{"traceEvents": [] "a": 1}', "not whole JSON"),
            ("t.json", b'{"traceEvents": [], 5: 1}', "not whole JSON"),
            ("t.json", b'{"traceEvents": [], "a" 1}', "not whole JSON"),
            ("t.json", b'{"traceEvents": [], "a": }', "not whole JSON"),
            ("t.json", PLAIN.decode().encode("utf-16"), "not UTF-8"),
            ("t.json", PLAIN.decode().encode("utf-16-le"), "not UTF-8"),
            ("t.json", PLAIN.replace(b"op3", b"\xff\xfe"), "not UTF-8"),
            ("t.json", PLAIN.replace(b'"ts": 30.0', b'"ts": 1e999'), "no time"),
            ("t.json", PLAIN.replace(b'"ts": 30.0', b'"ts": ' + b"9" * 400), "no time"),
            ("t.json", PLAIN.replace(b'"ts": 30.0', b'"ts": ' + b"9" * 9000), "not whole JSON"),
            ("t.json", PLAIN.replace(b'"ts": 30.0', b'"ts": NaN'), "no time"),
            ("t.json", PLAIN.replace(b'"dur": 5', b'"dur": 1e17'), "no time"),
            ("t.json", b'{"traceEvents": [{"args": ' + b"[" * 200_000 + b"]" * 200_000 + b"}]}", "nested too deeply"),
            ("t.json", b'{"traceEvents": [{"args": ' + b'{"a":' * 99_999 + b"1" + b"}" * 100_000 + b"]}", "nested"),
            ("t.json", b"[" * 500_000, "cut off"),
        ],
    )
    def test_one_line_that_names_the_file(self, tmp_path: Path, name: str, data: bytes, wrong: str) -> None:
        path = tmp_path / name
        path.write_bytes(data)
        for decoder in (TypedDecoder(), PlainDecoder()):
            with pytest.raises(TraceError, match=wrong) as error:
                read(path, decoder=decoder)
            assert str(error.value).startswith(f"{path}: ")
            assert "\n" not in str(error.value)
            assert len(str(error.value)) < 600

    def test_gzip_without_isal(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("verl_profiler_conf.tools.trace.compression._ISAL", None)
        path = tmp_path / "t.json.gz"
        path.write_bytes(gzip.compress(PLAIN[:50], mtime=0) + gzip.compress(PLAIN[50:], mtime=0))
        assert seen(read(path)) == expected(EVENTS)
        for data, wrong in (
            (gzip.compress(PLAIN, mtime=0)[:-30], "cut off"),
            (gzip.compress(PLAIN, mtime=0)[:9] + b"\xff" * 40, "not whole gzip"),
        ):
            path.write_bytes(data)
            with pytest.raises(TraceError, match=wrong):
                read(path)

    def test_missing_and_a_folder(self, tmp_path: Path) -> None:
        for path in (tmp_path / "none.json", tmp_path):
            with pytest.raises(TraceError, match="cannot be read"):
                read(path)

    def test_a_file_name_that_would_break_the_line(self, tmp_path: Path) -> None:
        path = tmp_path / "a\nb\x1b[31m.json"
        path.write_bytes(b"{")
        with pytest.raises(TraceError) as error:
            read(path)
        assert str(error.value).isprintable()

    def test_cut_off_anywhere(self, tmp_path: Path) -> None:
        whole = json.dumps({"a": [1, {"b": "c"}], "traceEvents": EVENTS[:3], "z": -1.5}, indent=1).encode()
        for end in range(len(whole)):
            path = tmp_path / "t.json"
            path.write_bytes(whole[:end])
            with pytest.raises(TraceError):
                read(path, 50)

    def test_damaged_anywhere_it_is_read_or_refused(self, tmp_path: Path) -> None:
        rng = random.Random(5)
        whole = json.dumps({"a": [1, {"b": "c"}], "traceEvents": EVENTS, "z": -1.5}).encode()
        path = tmp_path / "t.json"
        for _ in range(500):
            damaged = bytearray(whole)
            damaged[rng.randrange(len(whole))] = rng.randrange(256)
            path.write_bytes(damaged)
            try:
                read(path, 100)
            except TraceError as error:
                assert str(error).isprintable()  # noqa: PT017

    @pytest.mark.parametrize(
        ("begin", "middle"),
        [(b"", b" "), (b'{"', b"a"), (b'{"a": "', b"a"), (b'[{"name": "', b"a"), (b"[", b"1,"), (b'{"a": [', b"1,")],
        ids=["white space", "a name", "a value", "an event", "numbers", "a list"],
    )
    def test_a_gzip_bomb_is_refused_in_bounded_memory(self, tmp_path: Path, begin: bytes, middle: bytes) -> None:
        path = tmp_path / "t.json.gz"
        with gzip.open(path, "wb", compresslevel=1) as file:
            file.write(begin)
            for _ in range(150):
                file.write(middle * (1_000_000 // len(middle)))
        tracemalloc.start()
        try:
            with pytest.raises(TraceError):
                read(path)
            assert tracemalloc.get_traced_memory()[1] < 100_000_000
        finally:
            tracemalloc.stop()


class TestMemory:
    def test_it_does_not_grow_with_the_file(self, tmp_path: Path) -> None:
        peaks = []
        for number in (10_000, 100_000):
            path = write(tmp_path / f"{number}.json", [complete("cpu_op", "aten::mm", i, 1) for i in range(number)])
            tracemalloc.start()
            try:
                for _ in TraceReader(path).events():
                    pass
                peaks.append(tracemalloc.get_traced_memory()[1])
            finally:
                tracemalloc.stop()
        assert peaks[1] < 1.2 * peaks[0]

    def test_what_stands_beside_the_events_is_kept_to_a_limit(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t.json", EVENTS, **{f"m{i}": "x" * (chunks.MAX_MEMBERS_BYTES // 3) for i in range(9)})
        reader = TraceReader(path)
        assert sum(map(len, reader.events())) == len(EVENTS)
        assert sum(map(len, reader.members.values())) <= chunks.MAX_MEMBERS_BYTES
        assert "m8" in reader.omitted


class TestProgress:
    @pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
    def test_it_ends_at_the_size_of_the_file(self, tmp_path: Path, name: str) -> None:
        path = write(tmp_path / name, EVENTS * 3000)
        told: list[tuple[int, int]] = []
        for _ in TraceReader(path, progress=lambda read, size: told.append((read, size))).events():
            pass
        assert told == sorted(told)
        assert told[-1] == (path.stat().st_size, path.stat().st_size)


class TestWithoutTheExtra:
    def run(self, code: str) -> str:
        blocked = "import sys\nfor name in ('msgspec', 'numpy', 'isal'): sys.modules[name] = None\n"
        done = subprocess.run([sys.executable, "-c", blocked + code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def test_what_a_trace_holds_is_counted_all_the_same(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t.json.gz", [*EVENTS, complete("kernel", "k", 1, 1)])
        code = (
            "from pathlib import Path\nfrom verl_profiler_conf.tools.trace.counts import count\n"
            f"c = count(Path({str(path)!r}))\n"
        )
        assert self.run(code + "print(c.events, c.operators, c.kernels)") == "10 9 1"
        with_extra = count(path)
        assert (with_extra.events, with_extra.operators, with_extra.kernels) == (10, 9, 1)

    def test_the_analysis_names_the_extra_in_one_line(self) -> None:
        code = "try:\n import verl_profiler_conf.tools.trace.analysis\nexcept ValueError as error: print(error)"
        said = self.run(code)
        assert "of verl-profiler-conf>[report]" in said
        assert "\n" not in said
