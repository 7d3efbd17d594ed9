"""`verl-profiler` as a user types it."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from clone import CLONE, python_path
from rich.console import Console

from verl_profiler_conf.capture.manifest import IterationRecord, Manifest, write_manifest
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.tools import cli
from verl_profiler_conf.tools.doctor import examine
from verl_profiler_conf.tools.plan.counters import plan_table
from verl_profiler_conf.tools.plan.show import print_counters


def run(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """In a process of its own: Hydra's scan for plugins happens once in a process."""
    env = {**os.environ, "PYTHONPATH": python_path(*([Path(path)] if path else []), CLONE)}
    command = [sys.executable, "-m", "verl_profiler_conf.tools.cli", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


class TestReport:
    @pytest.fixture
    def capture(self, tmp_path: Path) -> Path:
        name = "response_tokens[2:3) iter=2 reqs=1"
        events = [{"ph": "X", "cat": "user_annotation", "name": name, "ts": 1, "dur": 5}]
        trace = tmp_path / "vllm_tokens2-3_rank0_pid1_1.pt.trace.json.gz"
        trace.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
        row = IterationRecord(2, 2, 3, 1, 1, 1_000_000, request="a")
        manifest = Manifest(TokenWindow(2, 3), "vllm", "0.32.0", 0, "lead", rows=[row], closed_by="window")
        manifest.trace = trace.name
        write_manifest(manifest, tmp_path / "vllm_tokens2-3_rank0_pid1_1")
        return trace

    def test_a_capture(self, capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["report", str(capture.parent), "--iterations"]) == 0
        out = capsys.readouterr().out
        assert "vllm 0.32.0" in out
        assert "[2, 3)" in out
        assert str(capture) in out

    def test_a_trace_cut_in_half_is_named_and_is_no_traceback(
        self, capture: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        capture.write_bytes(capture.read_bytes()[:40])
        assert cli.main(["report", str(capture.parent)]) == 1
        err = capsys.readouterr().err
        assert err.startswith(f"{capture}: cut off")
        assert err.count("\n") == 1

    def test_a_trace_of_several_gzip_members_is_read(self, capture: Path) -> None:
        data = gzip.decompress(capture.read_bytes())
        capture.write_bytes(gzip.compress(data[:20]) + gzip.compress(data[20:]))
        assert cli.main(["report", str(capture.parent)]) == 0

    def test_a_window_that_was_never_reached_is_one_line_and_an_exit_status(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_manifest(Manifest(TokenWindow(50, 60), "vllm", "1", 0, "lead", furthest_token=47), tmp_path / "x_1")
        assert cli.main(["report", str(tmp_path)]) == 1
        err = capsys.readouterr().err
        assert err == ("missing: vllm rank 0: tokens 50-59 of [50, 60): never reached; the furthest token was 47\n")

    @pytest.mark.parametrize("path", ["nothing-here", "."])
    def test_nothing_to_report(
        self, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert cli.main(["report", path]) == 2
        assert path in capsys.readouterr().err


class TestCompletion:
    def test_a_script_that_bash_takes_and_that_completes(self, tmp_path: Path) -> None:
        pytest.importorskip("shtab")
        done = run("--print-completion", "bash")
        assert done.returncode == 0, done.stderr
        (tmp_path / "trace.json").touch()
        script = (
            f'{done.stdout}\ncomp() {{ COMP_WORDS=(verl-profiler "$@"); COMP_CWORD=$#; COMPREPLY=();'
            ' _shtab_verl_profiler verl-profiler "${COMP_WORDS[COMP_CWORD]}"; echo "${COMPREPLY[@]}"; }\n'
            "comp rep; comp report --aga; comp report tra\n"
        )
        shell = subprocess.run(
            ["bash", "--norc", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert shell.stdout.split() == ["report", "--against", "trace.json"], shell.stderr

    def test_without_shtab_the_extra_is_named(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "shtab", None)
        with pytest.raises(SystemExit) as stopped:
            cli.main(["--print-completion", "bash"])
        assert stopped.value.code == 2
        assert "of verl-profiler-conf>[report]" in capsys.readouterr().err


class TestPlan:
    def test_counters_and_verdicts(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["plan", "--start", "20", "--end", "30", "--engine", "vllm"]) == 0
        out = capsys.readouterr().out
        assert "delay_iterations=21" in out
        assert "[19, 29)" in out

    def test_a_narrow_terminal_gets_whole_words(self, capsys: pytest.CaptureFixture[str]) -> None:
        rows = plan_table(Settings(windows=(TokenWindow(20, 30),)))
        print_counters(Console(width=80, file=sys.stdout), rows)
        lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert max(map(len, lines)) <= 80
        assert lines[0].startswith("vllm ")
        assert lines[1:3] == [
            "  window              [20, 30)",
            "  counters            delay_iterations=21 max_iterations=10",
        ]

    def test_a_bad_window_is_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["plan", "--start", "5", "--end", "3"]) == 2
        assert capsys.readouterr().err.count("\n") == 1


class TestDoctor:
    def test_all_is_well(self) -> None:
        done = run("doctor")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "the plugin is discovered" in done.stdout
        assert "+profiler=torch_window composes" in done.stdout

    def test_a_stranger_that_hides_all_plugins_is_named(self, tmp_path: Path) -> None:
        stranger = tmp_path / "hydra_plugins" / "__init__.py"
        stranger.parent.mkdir()
        stranger.touch()
        done = run("doctor", path=str(tmp_path))
        assert done.returncode == 1
        assert str(stranger) in done.stdout.replace("\n", "")
        assert "delete that file" in done.stdout

    def test_an_option_that_would_be_a_text_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "hydra_plugins").mkdir()
        (tmp_path / "hydra_plugins" / "__init__.py").touch()
        assert "nothing would be profiled" in run("doctor", path=str(tmp_path)).stdout

    def test_a_window_in_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VERL_PROFILER_CONF", '{"profile_token_end": 0}')
        wrong = [finding for finding in examine() if finding.about == "VERL_PROFILER_CONF"]
        assert [finding.state for finding in wrong] == ["error"]
        assert "profile_token_end=0" in wrong[0].text

    @pytest.mark.parametrize(
        ("engine", "switch", "everything"),
        [("vllm", "VLLM_PLUGINS", None), ("verl", "VERL_USE_EXTERNAL_PLUGINS", "auto")],
    )
    def test_a_filter_that_keeps_the_hook_out(
        self, engine: str, switch: str, everything: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from verl_profiler_conf.tools import doctor

        monkeypatch.setattr(doctor, "installed_version", lambda name: "0.9.1" if name == engine else None)
        monkeypatch.setattr(doctor, "entry_points", lambda group: [type("Point", (), {"name": "verl_profiler_conf"})()])
        monkeypatch.setenv(switch, "other")
        assert [(f.about, f.state) for f in doctor._engines()] == [(engine, "error")]
        monkeypatch.setenv(switch, "other, verl_profiler_conf")
        assert [(f.about, f.state) for f in doctor._engines()] == [(engine, "ok")]
        monkeypatch.delenv(switch)
        assert [(f.about, f.state) for f in doctor._engines()] == [(engine, "ok")]
        if everything:
            monkeypatch.setenv(switch, everything)
            assert [(f.about, f.state) for f in doctor._engines()] == [(engine, "ok")]

    def test_a_check_that_fails_is_a_finding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from verl_profiler_conf.tools import doctor

        def broken() -> None:
            raise RuntimeError("no such luck")

        monkeypatch.setattr(doctor, "CHECKS", (broken,))
        assert [(f.state, f.text) for f in examine()] == [("error", "the check failed: RuntimeError: no such luck")]
