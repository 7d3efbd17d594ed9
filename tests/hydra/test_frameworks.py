"""The generic option on configs of other frameworks, as their released wheels hold them: composed, not trained."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from verl_profiler_conf import validate
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.schema.options import TorchWindow

ConfigsOf = Callable[[str, str], Path]

FSDP = "rlinf/utils/ckpt_convertor/fsdp_convertor/config"


def compose(folder: Path, name: str, *overrides: str) -> DictConfig:
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(folder), version_base=None):
        return hydra.compose(name, list(overrides))


def plain(config: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(config, resolve=False)  # type: ignore[return-value]


def rest_is_unchanged(folder: Path, name: str, *option: str, node: str = "profiler") -> dict[str, Any]:
    """Assert that the option adds a valid window at `node`, and nothing else; the config without it."""
    without = plain(compose(folder, name))
    window = (f"{node}.profile_token_start=20", f"{node}.profile_token_end=80")
    config = compose(folder, name, *option, *window)
    assert OmegaConf.get_type(config, node) is TorchWindow
    settings = validate(config)
    assert settings is not None
    assert settings.windows == (TokenWindow(20, 80),)
    assert {key: value for key, value in plain(config).items() if key != node} == without
    return without


def test_lmms_engine(configs_of: ConfigsOf) -> None:
    """A trainer launched by Hydra, whose own profiler is `trainer_args.enable_profiler`."""
    folder = configs_of("lmms_engine", "0.1.4") / "lmms_engine/launch/config"
    config = rest_is_unchanged(folder, "default_config", "+profiler=torch_window")
    assert config["trainer_args"]["enable_profiler"] is False


@pytest.mark.filterwarnings("ignore:provider=hydra.searchpath")  # there is no __init__.py among the config files
def test_agent_lightning(configs_of: ConfigsOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config is verl's, found on the search path, with keys of its own."""
    monkeypatch.syspath_prepend(str(configs_of("verl", "0.9.1")))
    folder = configs_of("agentlightning", "0.3.0") / "agentlightning/verl"
    config = rest_is_unchanged(folder, "config", "+profiler=torch_window")
    assert config["agentlightning"]["port"] == 9999
    assert config["actor_rollout_ref"]["rollout"]["profiler"]


def test_rlinf_without_appending(configs_of: ConfigsOf) -> None:
    """RLinf's defaults lists hold nothing but overrides; Hydra drops the config that has such a list when a group is
    appended to it."""
    folder = configs_of("rlinf", "0.3.0") / FSDP
    config = rest_is_unchanged(folder, "fsdp_dreamzero_convertor", "hydra/callbacks=profiler")
    assert list(config) == ["convertor"]
    chosen = compose(folder, "fsdp_dreamzero_convertor", "hydra/callbacks=profiler", "profiler=npu_window")
    assert chosen.profiler.level == "level0"
    assert list(compose(folder, "fsdp_dreamzero_convertor", "+profiler=torch_window")) == ["profiler"]


APP = """\
import sys
import hydra

@hydra.main(config_path=sys.argv.pop(1), config_name=sys.argv.pop(1), version_base="1.3")
def main(config):
    print("RAN", sorted(config))

main()
"""


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(folder: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "app.py").write_text(APP)
        command = [sys.executable, "app.py", str(folder), name, *arguments, "profiler.profile_token_end=8"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)

    return run


@pytest.mark.parametrize("mode", [(), ("-m",)])
def test_rlinf_appended_to_is_stopped_and_told_what_to_write(
    mode: tuple[str, ...], configs_of: ConfigsOf, launch: Callable[..., Any]
) -> None:
    folder = configs_of("rlinf", "0.3.0") / FSDP
    done = launch(folder, "fsdp_dreamzero_convertor", *mode, "+profiler=torch_window")
    assert done.returncode == 1
    assert "RAN" not in done.stdout
    (line,) = done.stderr.splitlines()
    assert "Hydra has dropped everything in fsdp_dreamzero_convertor.yaml (convertor), " in line
    assert "; write `hydra/callbacks=profiler profiler=torch_window` instead" in line


def test_rlinf_as_told(configs_of: ConfigsOf, launch: Callable[..., Any]) -> None:
    done = launch(configs_of("rlinf", "0.3.0") / FSDP, "fsdp_dreamzero_convertor", "hydra/callbacks=profiler")
    assert done.returncode == 0, done.stderr
    assert "RAN ['convertor', 'profiler']" in done.stdout
    assert "waiting for response tokens [0, 8)" in done.stdout + done.stderr
