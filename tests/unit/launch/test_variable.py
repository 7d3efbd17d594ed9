"""The variable that carries the window: an outer job's is withheld from a job that says no, and it has to hold all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_profiler_conf import ConfigError, Settings, activate
from verl_profiler_conf.core.settings import ENV_NAME
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.engines import in_process
from verl_profiler_conf.launch.options import NoWindow
from verl_profiler_conf.launch.variable import MOST_BYTES, check_size
from verl_profiler_conf.schema.options import TorchWindow
from verl_profiler_conf.verl.ray_env import JOB_CONFIG, with_variable

OUTER = json.dumps({"profile_token_end": 3})
NO = {"none": NoWindow(), "disabled": TorchWindow(enable=False, profile_token_end=3)}


@pytest.fixture(autouse=True)
def outer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv(ENV_NAME, OUTER)
    monkeypatch.delenv(JOB_CONFIG, raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    in_process.put_in_force(None)


def config(node: Any) -> Any:
    return OmegaConf.create({"profiler": OmegaConf.structured(node)})


@pytest.mark.parametrize("how", list(NO))
def test_no_means_no_inside_another_job(how: str) -> None:
    with activate(config(NO[how])):
        assert ENV_NAME not in os.environ
        assert in_process.current_settings() is None
        child = subprocess.run(
            [sys.executable, "-c", f"import os; print(os.environ.get({ENV_NAME!r}))"], capture_output=True, text=True
        )
        assert child.stdout == "None\n"
    assert os.environ[ENV_NAME] == OUTER
    found = in_process.current_settings()
    assert found is not None
    assert found.windows == (TokenWindow(0, 3),)


def test_closed_twice_it_is_put_back_once() -> None:
    job = activate(config(NO["none"]))
    job.close()
    os.environ[ENV_NAME] = "another"
    job.close()
    assert os.environ[ENV_NAME] == "another"


def test_the_window_in_force_in_this_process_is_withheld_too(tmp_path: Path) -> None:
    with activate(config(TorchWindow(profile_token_end=8, device="cpu"))) as around:
        with activate(config(NO["none"])):
            assert in_process.current_settings() is None
        assert in_process.current_settings() == around.settings


def test_ray_hands_it_on_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    before = with_variable(json.dumps({"x": 1, "runtime_env": {"env_vars": {"A": "b"}}}), ENV_NAME, OUTER)
    monkeypatch.setenv(JOB_CONFIG, before)
    with activate(config(NO["none"])):
        assert json.loads(os.environ[JOB_CONFIG]) == {"x": 1, "runtime_env": {"env_vars": {"A": "b"}}}
    assert os.environ[JOB_CONFIG] == before


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"runtime_env": null}', '{"runtime_env": {"env_vars": []}}'])
def test_what_is_not_rays_is_left_alone(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB_CONFIG, text)
    with activate(config(NO["none"])):
        assert os.environ[JOB_CONFIG] == text


@pytest.mark.parametrize("cfg", [{}, {"profiler": {"of": "somebody else"}}])
def test_a_config_that_says_nothing_leaves_it_alone(cfg: dict[str, Any]) -> None:
    with activate(OmegaConf.create(cfg)):
        assert os.environ[ENV_NAME] == OUTER


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"ranks": tuple(range(30_000))}, "p.ranks='30000 entries': too many: the settings take "),
        ({"save_path": "/" + "x" * 130_000}, "p.save_path='/xxx"),
        (
            {"windows": tuple(TokenWindow(2 * i, 2 * i + 1) for i in range(9_500))},
            "p.profile_token_windows='9500 windows': too many: the settings take ",
        ),
    ],
)
def test_the_longest_setting_is_named_where_they_do_not_fit(fields: dict[str, Any], line: str) -> None:
    settings = Settings(**{"windows": (TokenWindow(0, 1),), **fields})
    with pytest.raises(ConfigError) as caught:
        check_size(settings, "p.")
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
    assert f"an environment variable has {MOST_BYTES:,}" in str(caught.value)


def test_what_is_published_starts_a_process() -> None:
    """The largest settings that are accepted."""
    count = next(n for n in range(9_500, 0, -50) if _fits(n))
    settings = Settings(windows=tuple(TokenWindow(2 * i, 2 * i + 1) for i in range(count)))
    text = with_variable(None, ENV_NAME, settings.to_json())
    env = {**os.environ, ENV_NAME: settings.to_json(), JOB_CONFIG: text}
    assert subprocess.run([sys.executable, "-c", ""], env=env, check=False).returncode == 0


def _fits(count: int) -> bool:
    try:
        check_size(Settings(windows=tuple(TokenWindow(2 * i, 2 * i + 1) for i in range(count))), "", over_ray=True)
    except ConfigError:
        return False
    return True


def test_rays_variable_has_to_hold_what_is_in_it_already(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(windows=(TokenWindow(0, 1),))
    monkeypatch.setenv(JOB_CONFIG, json.dumps({"x": "y" * MOST_BYTES}))
    check_size(settings, "")
    with pytest.raises(ConfigError, match="too long"):
        check_size(settings, "", over_ray=True)
    monkeypatch.setenv(JOB_CONFIG, "{")
    check_size(settings, "", over_ray=True)
