"""Hydra or OmegaConf without a private part that is read: that is said once, and the job goes on."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

import verl_profiler_conf.launch.options  # noqa: F401 - makes the schemas known
from verl_profiler_conf.core.logs import forget_logged_texts
from verl_profiler_conf.launch import sweep
from verl_profiler_conf.launch.checking import validate
from verl_profiler_conf.launch.provenance import read_contributions


@pytest.fixture(autouse=True)
def fresh_logs() -> None:
    forget_logged_texts()


@pytest.fixture
def config() -> DictConfig:
    with initialize(version_base=None, config_path=None):
        return compose(overrides=["+profiler=torch_window", "profiler.profile_token_start=20"])


@pytest.mark.parametrize("name", ["_get_parent", "_get_full_key"])
def test_omegaconf_does_not_tell_where_a_node_is(
    name: str, config: DictConfig, caplog: pytest.LogCaptureFixture
) -> None:
    from verl_profiler_conf.schema.resolvers import resolve_iterations

    node = config.profiler.iterations.vllm
    assert resolve_iterations("vllm", "delay_iterations", _parent_=node) is not None
    parent: Any = SimpleNamespace(_get_parent=node._get_parent, _get_full_key=node._get_full_key)
    assert resolve_iterations("vllm", "delay_iterations", _parent_=parent) is not None
    delattr(parent, name)
    values = [resolve_iterations("vllm", "delay_iterations", _parent_=parent) for _ in range(2)]
    assert values == [None, None]
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert name in line


def test_nulls_and_references_are_passed_by(config: DictConfig) -> None:
    plain: Any = OmegaConf.create({"a": [{"b": None}, "${c}"], "c": "???", "profiler": config.profiler})
    settings = validate(plain)
    assert settings is not None
    assert settings.windows[0].start == 20


@pytest.mark.parametrize("lacks", ["module", "class"])
def test_hydra_keeps_its_callbacks_elsewhere(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra._internal import callbacks

    joined: list[Any] = []
    monkeypatch.setattr(sweep, "_instances", lambda kind: joined.append(kind) or [])
    sweep.join_running_sweep()
    assert joined == [callbacks.Callbacks]
    if lacks == "module":
        monkeypatch.setitem(sys.modules, sweep.PLACE, None)
    else:
        monkeypatch.delattr(callbacks, "Callbacks")
    sweep.join_running_sweep()
    assert len(joined) == 1


def test_hydras_loader_does_not_tell_what_it_merged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with initialize(version_base=None, config_path=None):
        config = compose(overrides=["+profiler=torch_window"], return_hydra_config=True)
        assert read_contributions(config, "profiler")
        loader = type(GlobalHydra.instance().config_loader())
        monkeypatch.delattr(loader, "_parse_overrides_and_create_caching_repo")
        assert [read_contributions(config, "profiler") for _ in range(2)] == [None, None]
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.startswith("it was not checked whether an option replaces keys of a config")
