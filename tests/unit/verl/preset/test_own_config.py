"""What a launch's own config file says of the keys that a verl preset sets: kept, or refused, and never lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest
from clone import CLONE, python_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.launch.checking import validate
from verl_profiler_conf.launch.stand_ins import register
from verl_profiler_conf.verl.preset import launch_config

PRESET = (
    "+profiler=verl_torch_window",
    "profiler.profile_token_start=20",
    "profiler.profile_token_end=30",
    "actor_rollout_ref.rollout.name=vllm",
    "profiler.engine.name=vllm",
    "profiler.engine.version=0.32.0",
)
ROLLOUT = "actor_rollout_ref.rollout.profiler"

pytestmark = pytest.mark.one_python

Launch = Callable[..., Any]


@pytest.fixture
def launch(
    verl_package: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., DictConfig]]:
    """Own keys, as YAML, and overrides -> the config as a launch has it, with its `hydra` node."""
    root = verl_package("0.9.1")
    monkeypatch.syspath_prepend(str(root))
    launch_config.installed_verl.cache_clear()
    register()

    def compose(own: str, *overrides: str, defaults: str = "[ppo_trainer, _self_]") -> DictConfig:
        (tmp_path / "mine.yaml").write_text(f"defaults: {defaults}\n{own}\n")
        path = f"hydra.searchpath=[file://{root}/verl/trainer/config]"
        GlobalHydra.instance().clear()
        hydra.initialize_config_dir(str(tmp_path), version_base=None)
        return hydra.compose("mine", [*overrides, path], return_hydra_config=True)

    yield compose
    GlobalHydra.instance().clear()
    monkeypatch.undo()
    launch_config.installed_verl.cache_clear()
    register()


@pytest.mark.parametrize(
    ("own", "key", "field"),
    [
        ("global_profiler: {steps: [5, 6]}", "global_profiler.steps=[5, 6]", "profiler.steps"),
        ("global_profiler: {save_path: /mine}", "global_profiler.save_path='/mine'", "profiler.save_path"),
        ("critic: {profiler: {enable: true}}", "critic.profiler.enable=True", "profiler.roles"),
        ("actor_rollout_ref: {rollout: {profiler: {ranks: [3]}}}", f"{ROLLOUT}.ranks=[3]", "profiler.ranks"),
        ("global_profiler: {tool: nsys}", "global_profiler.tool='nsys'", "profiler, which needs 'torch'"),
    ],
)
def test_a_file_that_says_otherwise_is_refused_and_not_overwritten(
    launch: Launch, own: str, key: str, field: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(launch(own, *PRESET))
    assert str(refused.value).startswith(f"{key}: contradicts {field}")


def test_a_file_that_says_the_same_is_not(launch: Launch) -> None:
    own = "global_profiler: {tool: torch, steps: [6, 5], save_path: /mine}"
    settings = validate(launch(own, *PRESET, "profiler.steps=[5,6]", "profiler.save_path=/mine"))
    assert settings.save_path == "/mine"


def test_nor_one_that_says_nothing_of_it(launch: Launch) -> None:
    assert validate(launch("trainer: {total_epochs: 2}", *PRESET)).enable


def test_disabled_it_would_lose_what_a_file_says_and_tells_what_to_write(launch: Launch) -> None:
    preset = ("+profiler=verl_torch_window", "profiler.enable=false")
    with pytest.raises(ConfigError) as refused:
        validate(launch("global_profiler: {steps: [5, 6]}", *preset))
    assert str(refused.value) == (
        "global_profiler.steps=[5, 6]: would be verl's default under profiler.enable=false: write +profiler=none"
    )
    assert launch("global_profiler: {steps: [5, 6]}", "+profiler=none").global_profiler.steps == [5, 6]
    assert not validate(launch("trainer: {total_epochs: 2}", *preset)).enable
    going_back = launch("", *preset, "global_profiler.steps=[7]", f"{ROLLOUT}.ranks=[1]")
    assert not validate(going_back).enable
    assert going_back.global_profiler.steps == [7]


def test_a_preset_in_the_files_own_list_is_held_against_it_too(launch: Launch) -> None:
    listed = "[ppo_trainer, profiler: verl_torch_window, _self_]"
    own = "profiler: {profile_token_start: 20, profile_token_end: 30}\n"
    assert validate(launch(own, *PRESET[3:], defaults=listed)).windows[0].start == 20
    with pytest.raises(ConfigError, match=r"global_profiler\.steps=\[5, 6\]: contradicts profiler\.steps"):
        validate(launch(f"{own}global_profiler: {{steps: [5, 6]}}", *PRESET[3:], defaults=listed))
    first = "[ppo_trainer, _self_, profiler: verl_torch_window]"
    with pytest.raises(ConfigError, match=r"global_profiler\.steps=\[5, 6\]: contradicts profiler\.steps"):
        validate(launch("global_profiler: {steps: [5, 6]}", *PRESET[1:], defaults=first))


@pytest.mark.parametrize("value", ["${hydra:runtime.output_dir}/p", "/share/${now:%Y}"])
def test_what_an_actor_cannot_resolve_is_refused_in_the_driver(launch: Launch, value: str) -> None:
    config = launch("", *PRESET, f"profiler.save_path='{value}'")
    HydraConfig.instance().set_config(config)  # as in a job
    try:
        with pytest.raises(ConfigError, match="cannot be read in verl's Ray actors"):
            validate(config)
    finally:
        HydraConfig.instance().cfg = None


@pytest.mark.parametrize("tool", ["npu", "nsys"])
def test_the_rollouts_own_tool(launch: Launch, tool: str) -> None:
    with pytest.raises(ConfigError, match=rf"{ROLLOUT}\.tool='{tool}': contradicts profiler, which needs 'torch'"):
        validate(launch("", *PRESET, f"{ROLLOUT}.tool={tool}"))
    with pytest.raises(ConfigError, match=rf"{ROLLOUT}\.save_path='/other': contradicts profiler\.save_path"):
        validate(launch("", *PRESET, f"{ROLLOUT}.save_path=/other"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("profiler.ranks=[64]",), r"profiler.ranks: [64] do not exist: the rollout has 8 GPUs"),
        (("profiler.ranks=[5]",), ""),
    ],
)
def test_ranks_that_are_not_what_they_seem(
    launch: Launch, more: tuple[str, ...], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    validate(launch("", *PRESET, "actor_rollout_ref.rollout.tensor_model_parallel_size=2", *more))
    assert said in caplog.text
    assert bool(caplog.records) == bool(said)


def test_a_launch_that_does_not_compose_without_its_preset_is_told_of(
    launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A group that is chosen by the profiler's name has no `none`."""
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "verl_torch_window.yaml").write_text("x: 1")
    defaults = "[ppo_trainer, _self_, profiler: verl_torch_window, 'tuned@tuned': '${profiler}']"
    with caplog.at_level("WARNING", "verl_profiler_conf"):
        assert validate(launch("global_profiler: {steps: [5]}", *PRESET[1:], defaults=defaults)).enable
    (line,) = caplog.messages
    assert line.startswith("mine.yaml does not compose without the preset (MissingConfigException: ")
    assert "replaced unchecked" in line


def test_where_captures_go_is_shown_before_the_job(verl_package: Callable[[str], Path], tmp_path: Path) -> None:
    """In a process of Hydra's own, which then runs nothing."""
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\n")
    root = verl_package("0.9.1")
    app = tmp_path / "app.py"
    decorator = "@hydra.main(config_path=None, config_name='mine', version_base=None)"
    app.write_text(f"import hydra\n{decorator}\ndef main(cfg): ...\nmain()\n")
    search = f"hydra.searchpath=[file://{root}/verl/trainer/config]"
    command = [sys.executable, str(app), "--config-dir", str(tmp_path), *PRESET, search, "hydra.run.dir=/runs/7"]
    shown = subprocess.run(
        [*command, "--cfg", "job", "--resolve", "--package", "global_profiler"],
        env={**os.environ, "PYTHONPATH": python_path(CLONE, root)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "save_path: /runs/7/profile" in shown


def test_overrides_are_composed_again_as_they_were_written(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    """One whose interpolation leads from the place that it is set at, and nowhere from Hydra's list of overrides."""
    config = launch("own: {dir: a}", *PRESET, "+own.file=${.dir}/b")
    assert validate(config) is not None
    assert "does not compose" not in caplog.text
    with pytest.raises(ConfigError, match=r"global_profiler\.tool='nsys'"):
        validate(launch("own: {dir: a}\nglobal_profiler: {tool: nsys}", *PRESET, "+own.file=${.dir}/b"))
