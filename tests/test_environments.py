"""The environments of the engines: a layer is whole or not there, and a stand-in never passes for the real thing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.envs import make_env
from tests.envs.make_env import Layer

STAND_INS = Path(make_env.__file__).parent / "sglang_cpu"


def test_every_engine_has_its_environment_and_its_newest_a_plain_name() -> None:
    aliases = [engine.alias for engine in make_env.ENGINES.values() if engine.alias]
    assert sorted(aliases) == ["sglang", "vllm"]


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
