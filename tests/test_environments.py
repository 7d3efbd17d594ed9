"""The environments of the engines: a layer is whole or not there, and a stand-in never passes for the real thing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from tests.envs import every_python, make_env
from tests.envs.every_python import Outcome, Python
from tests.envs.make_env import Layer
from verl_profiler_conf.core import releases

STAND_INS = Path(make_env.__file__).parent / "sglang_cpu"


def test_every_engine_has_its_environment_and_its_newest_a_plain_name() -> None:
    aliases = [engine.alias for engine in make_env.ENGINES.values() if engine.alias]
    assert sorted(aliases) == ["sglang", "vllm"]


def test_the_table_of_releases_says_what_is_run_here() -> None:
    for name, tried in (("vllm", releases.VLLM), ("sglang", releases.SGLANG)):
        assert tuple(key.split("-")[1] for key in make_env.ENGINES if key.startswith(f"{name}-")) == tried.run
        assert max([*tried.run, *tried.read], key=Version) == tried.newest


def test_layer_is_another_one_when_what_it_is_made_from_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(make_env, "HERE", tmp_path)
    listed = Layer("needs", listed_in="list.txt")
    (tmp_path / "list.txt").write_text("a==1\n")
    first = listed.folder()
    assert listed.folder() == first
    (tmp_path / "list.txt").write_text("a==2\n")
    second = listed.folder()
    monkeypatch.setattr(make_env, "PIP_ARGS", ["--pre"])
    assert len({first, second, listed.folder(), Layer("needs", spec="a==1").folder()}) == 4


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Layer:
    monkeypatch.setattr(make_env, "CACHE", tmp_path)
    monkeypatch.setattr(make_env, "installer", lambda: ["pip"])
    return Layer("needs", spec="a==1")


def install_one_file(pip: list[str], arguments: list[str]) -> None:
    folder = Path(arguments[arguments.index("--target") + 1])
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("")


def test_layer_is_built_once(monkeypatch: pytest.MonkeyPatch, layer: Layer, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(make_env, "install", install_one_file)
    make_env.build_layer(layer)
    assert (layer.folder() / "a.py").exists()
    assert "installing needs" in capsys.readouterr().out
    make_env.build_layer(layer)
    assert capsys.readouterr().out == ""


def test_interrupted_layer_does_not_count(monkeypatch: pytest.MonkeyPatch, layer: Layer) -> None:
    def interrupted(pip: list[str], arguments: list[str]) -> None:
        install_one_file(pip, arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(make_env, "install", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_env.build_layer(layer)
    assert list(make_env.CACHE.iterdir()) == []


def test_layer_made_by_another_meanwhile_is_taken(monkeypatch: pytest.MonkeyPatch, layer: Layer) -> None:
    def while_another_finishes(pip: list[str], arguments: list[str]) -> None:
        install_one_file(pip, arguments)
        layer.folder().mkdir()
        (layer.folder() / "theirs.py").write_text("")

    monkeypatch.setattr(make_env, "install", while_another_finishes)
    make_env.build_layer(layer)
    assert [path.name for path in make_env.CACHE.rglob("*.py")] == ["theirs.py"]


def with_stand_ins(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import sglang_cpu_stand_ins as s; s.install(); s.install()\n{code}"],
        env={**os.environ, "PYTHONPATH": str(STAND_INS)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_stand_ins_import_decorate_and_describe() -> None:
    done = with_stand_ins(
        "import sys; assert sum(type(f).__name__ == 'AbsentPackages' for f in sys.meta_path) == 1\n"
        "import triton, triton.language as tl\n"
        "from sgl_kernel.anything import some_kernel\n"
        "@triton.jit\n"
        "def kernel(x: tl.constexpr | None): return x\n"
        "@triton.autotune(configs=[triton.Config({})], key=['n'])\n"
        "def tuned(x): return x + 1\n"
        "class Derived(tl.dtype): value = 3\n"
        "assert (kernel(5), tuned(5), Derived().value, triton.cdiv(7, 2)) == (5, 6, 3, 4)\n"
        "import torch.utils._triton as t; assert not t.has_triton_package()\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "launch",
    [
        "from sgl_kernel import some_kernel; some_kernel(1)",
        "from sgl_kernel import some_kernel; some_kernel(print)",
        "from triton import kernel; kernel[(1,)](2)",
        "import xgrammar; xgrammar.Compiler('x')(1)",
    ],
)
def test_stand_in_that_is_really_run_raises(launch: str) -> None:
    done = with_stand_ins(launch)
    assert done.returncode == 1
    assert "NotImplementedError" in done.stderr
    assert "only a stand-in" in done.stderr


def stand_in_for_python(path: Path, version: str, status: int = 0) -> str:
    path.write_text(f"#!/bin/sh\necho {path} {version}\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


def test_of_each_minor_version_the_newest_that_works_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    candidates = [
        stand_in_for_python(tmp_path / "too_old", "3 9 18"),
        stand_in_for_python(tmp_path / "newest", "3 13 2"),
        stand_in_for_python(tmp_path / "older", "3 13 0"),
        stand_in_for_python(tmp_path / "does_not_run", "3 12 4", status=1),
        stand_in_for_python(tmp_path / "oldest", "3 10 1"),
        str(tmp_path / "not_there"),
    ]
    monkeypatch.setattr(every_python, "_candidates", lambda: iter(candidates))
    assert [Path(python.path).name for python in every_python.find_pythons()] == ["oldest", "newest"]


def test_this_python_is_found() -> None:
    assert sys.version_info[:2] in [python.version[:2] for python in every_python.find_pythons()]


@pytest.mark.parametrize("fails", ["environment", "tests", None])
def test_each_python_has_its_line_and_any_that_fails_is_a_failure(
    fails: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pythons = [Python("a", (3, 10, 1)), Python("b", (3, 12, 4))]
    of_tests = {python: Outcome(python, True, "details\n== 9 passed in 1s ==\n") for python in pythons}
    if fails == "tests":
        of_tests[pythons[1]] = Outcome(pythons[1], False, "why\n== 1 failed in 1s ==\n")
    no_environment = Outcome(pythons[1], False, "why\nno environment") if fails == "environment" else None
    monkeypatch.setattr(every_python, "find_pythons", lambda: pythons)
    monkeypatch.setattr(every_python, "make", lambda python: no_environment if python is pythons[1] else None)
    monkeypatch.setattr(every_python, "test", lambda python, arguments: of_tests[python])
    assert every_python.main([], jobs=2) == (fails is not None)
    shown = capsys.readouterr().out.splitlines()
    second = {"environment": "no environment", "tests": "1 failed in 1s", None: "9 passed in 1s"}[fails]
    assert shown[-3:] == [
        "Python 3.10.1: 9 passed in 1s",
        f"Python 3.12.4: {second}",
        "not on this machine: Python 3.11, Python 3.13, Python 3.14",
    ]
    assert ("why" in shown) == (fails is not None)
    assert "details" not in shown
