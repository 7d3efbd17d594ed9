"""The commands that make a trace from a trace, and the server by which Perfetto reads one."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from verl_profiler_conf.core.install import pip_install
from verl_profiler_conf.tools import cli, progress
from verl_profiler_conf.tools.serving import PERFETTO, FileServer

pytest.importorskip("msgspec")
pytest.importorskip("numpy")


def event(name: str, begin: float, length: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": begin, "dur": length, **more}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten iterations of 100 us, each with one operator that bears its number."""
    events = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]
    for token in range(10):
        begin = 1000.0 + 100 * token
        events.append(
            event(f"response_tokens[{token}:{token + 1}) iter={token} reqs=1", begin, 90, cat="user_annotation")
        )
        events.append(event(f"op{token}", begin + 10, 50))
    path = tmp_path / "t.pt.trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def operators(path: Path) -> list[str]:
    return [found["name"] for found in json.loads(path.read_text())["traceEvents"] if found.get("cat") == "cpu_op"]


def test_slice_by_tokens(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "s.json"
    assert cli.main(["slice", str(trace), "--start", "3", "--end", "6", "-o", str(out)]) == 0
    assert operators(out) == ["op3", "op4", "op5"]
    assert "3 iterations" in capsys.readouterr().out


def test_slice_by_time_in_milliseconds(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    assert cli.main(["slice", str(trace), "--time", "0.1", "0.3", "-o", str(out)]) == 0
    assert operators(out) == ["op1", "op2"]


def test_slice_of_one_iteration(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    assert cli.main(["slice", str(trace), "--like-iteration", "7", "-o", str(out)]) == 0
    assert operators(out) == ["op7"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["slice", "{missing}", "-o", "{out}"], "cannot be read: No such file or directory"),
        (["slice", "{trace}", "--start", "6", "--end", "3", "-o", "{out}"], "end is 3; must be beyond the start, 6"),
        (["slice", "{trace}", "--start", "3", "--time", "0", "1", "-o", "{out}"], "one of them"),
        (["slice", "{trace}", "-o", "{trace}"], "exists"),
        (["merge", "{trace}", "{missing}", "-o", "{out}"], "cannot be read: No such file or directory"),
        (["open", "{missing}"], "No such file or directory"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], line: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = trace.read_bytes()
    names = {"trace": str(trace), "missing": str(tmp_path / "missing.json"), "out": str(tmp_path / "out.json")}
    assert cli.main([argument.format(**names) for argument in arguments]) == 1
    said = capsys.readouterr().err
    assert line in said
    assert said.startswith(f"verl-profiler {arguments[0]}: ")
    assert said.count("\n") == 1
    assert trace.read_bytes() == before
    assert not (tmp_path / "out.json").exists()


def test_force_writes_over(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    out.write_text("older")
    assert cli.main(["slice", str(trace), "--start", "9", "-o", str(out), "--force"]) == 0
    assert operators(out) == ["op9"]


def test_merge(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for rank in range(2):
        raw = json.loads(trace.read_text())
        raw["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 2}
        path = tmp_path / f"rank{rank}.json"
        path.write_text(json.dumps(raw))
        paths.append(str(path))
    out = tmp_path / "m.json"
    assert cli.main(["merge", *paths, "-o", str(out)]) == 0
    assert sorted(operators(out)) == sorted(2 * [f"op{number}" for number in range(10)])
    assert "rank 1: clock moved by" in capsys.readouterr().out


class TestServing:
    def test_the_file_alone_and_then_the_end(self, trace: Path) -> None:
        with FileServer(trace, port=0) as server:
            thread = threading.Thread(target=server.serve_once)
            thread.start()
            for other in ("/", "/../t.pt.trace.json", "/etc/passwd"):
                with pytest.raises(urllib.error.HTTPError, match="404"):
                    urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}{other}")
            assert thread.is_alive()
            with urllib.request.urlopen(server.url) as answer:  # noqa: S310 - of loopback
                assert answer.read() == trace.read_bytes()
                assert answer.headers["Access-Control-Allow-Origin"] == PERFETTO
            thread.join(60)
            assert not thread.is_alive()

    def test_on_loopback_only(self, trace: Path) -> None:
        with FileServer(trace, port=0) as server:
            assert server.server_address[0] == "127.0.0.1"
            assert server.viewer == f"{PERFETTO}/#!/?url=http://127.0.0.1:{server.server_port}/t.pt.trace.json"

    def test_open_without_a_browser_says_how(self, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["open", str(trace)]) == 0
        said = capsys.readouterr().out
        assert f"choose {trace.absolute()}" in said
        assert "chrome://tracing" in said

    def test_open_serves_what_the_browser_asks_for(self, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        read: list[bytes] = []
        threads: list[threading.Thread] = []

        def browser(url: str) -> bool:
            address = url.partition("?url=")[2]
            get = urllib.request.urlopen
            threads.append(threading.Thread(target=lambda: read.append(get(address).read())))
            threads[0].start()
            return True

        monkeypatch.setattr("webbrowser.open", browser)
        monkeypatch.setattr("verl_profiler_conf.tools.serving.PORT", 0)
        monkeypatch.setattr(FileServer.__init__, "__defaults__", (0,))
        assert cli.main(["open", "--browser", str(trace)]) == 0
        threads[0].join(60)
        assert read == [trace.read_bytes()]


def test_no_bar_where_no_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    with progress.progress_bar("reading") as advance:
        assert advance is None


def test_a_bar_on_a_terminal_that_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress.progress_bar("reading t.json") as advance:
        assert advance is not None
        advance(50, 100)
        advance(100, 100)
    assert "reading t.json" in capsys.readouterr().err


def test_without_the_extra_slice_names_it_in_one_line(trace: Path, tmp_path: Path) -> None:
    blocked = "import sys\nfor name in ('msgspec', 'numpy', 'isal'): sys.modules[name] = None\n"
    code = blocked + "from verl_profiler_conf.tools import cli\nsys.exit(cli.main(sys.argv[1:]))"
    arguments = ["slice", str(trace), "--start", "3", "-o", str(tmp_path / "out.json")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"numpy: {pip_install('report')}" in done.stderr
    assert done.stderr.count("\n") == 1
