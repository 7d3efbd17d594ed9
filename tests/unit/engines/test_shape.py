"""What is read of an engine's objects is there in every release that is supported, and asked for in newer ones."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.version import Version
from vllm_schedule import load

from verl_profiler_conf.core.iterations.versions import since
from verl_profiler_conf.core.releases import VLLM
from verl_profiler_conf.core.settings import ENV_NAME
from verl_profiler_conf.engines import shape
from verl_profiler_conf.engines.sglang import release as sglang
from verl_profiler_conf.engines.vllm import release as vllm


@dataclass
class Output:
    rows: list[int]
    total: int = 0

    def finish(self) -> None:
        self.reason = "done"

    @property
    def first(self) -> int:
        return self.rows[0]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("toy_engine")
    module.Output = Output  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_engine", module)
    return module


@pytest.mark.parametrize(
    ("wanted", "lacks"),
    [
        ({"toy_engine:Output": ("rows", "total", "reason", "first", "finish")}, []),
        ({"toy_engine:Output": ("rows", "counts")}, ["Output.counts"]),
        ({"toy_engine:Gone": ("rows",), "toy_engine_too:Output": ()}, ["toy_engine:Gone", "toy_engine_too:Output"]),
    ],
)
def test_what_a_class_lacks_is_named(module: ModuleType, wanted: Any, lacks: list[str]) -> None:
    assert list(shape.missing(wanted)) == lacks


@pytest.mark.parametrize(
    ("version", "newer"), [("0.32.0", False), ("0.33.0", False), ("0.33.0rc1", False), ("0.34.0", True), ("main", True)]
)
def test_a_release_is_newer(version: str, newer: bool) -> None:
    assert shape.is_newer(version, "0.33.0") == newer


@pytest.mark.parametrize("version", VLLM.read)
def test_vllm_releases_have_what_is_read(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    release = load(version)
    output = ModuleType("vllm.v1.core.sched.output")
    for kind in (release.output, release.new, release.cached):
        setattr(output, kind.__name__, kind)
    for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, output.__name__, output)
    assert list(shape.missing(since(vllm.READ_SINCE, Version(version)))) == []
    if version == "0.11.0":
        assert list(shape.missing(vllm.READ_SINCE[-1][1])) == [
            "CachedRequestData.num_output_tokens",
            "CachedRequestData.resumed_req_ids",
        ]


@pytest.mark.parametrize(("engine", "name"), [(vllm, "vllm"), (sglang, "sglang")])
def test_only_newer_releases_are_looked_at(engine: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    module.__version__ = engine.NEWEST  # type: ignore[attr-defined]
    assert engine.lacks() is None
    module.__version__ = "99.0"  # type: ignore[attr-defined]
    assert "SchedulerOutput" in engine.lacks() if name == "vllm" else "Req" in engine.lacks()


def test_a_newer_release_without_it_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm_worker import hooked_class, output

    monkeypatch.setenv(ENV_NAME, json.dumps({"profile_token_start": 0, "save_path": str(tmp_path), "device": "cpu"}))
    module = ModuleType("vllm")
    module.__version__ = "99.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    worker = hooked_class()()
    for made in range(3):
        worker.execute_model(output({"a": 1}, made=made))
    (line,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "vLLM 99.0 is newer than this package knows, and has no vllm.v1.core.sched.output:SchedulerOutput" in line
    assert "mapping: iterations" in line
    (manifest,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.manifest.json"))
    assert "is newer than this package knows" in manifest["notes"][0]
