"""The variable that Ray reads: what is put into it, and whether the installed Ray reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl_profiler_conf.verl import ray_env
from verl_profiler_conf.verl.ray_env import JOB_CONFIG, READER, job_config_is_read, with_variable


@pytest.mark.parametrize("text", [None, "{}", '{"runtime_env": null}', '{"runtime_env": {"env_vars": null}}'])
def test_the_variable_goes_into_whatever_ray_was_given(text: str | None) -> None:
    assert json.loads(with_variable(text, "A", "b")) == {"runtime_env": {"env_vars": {"A": "b"}}}


@pytest.mark.parametrize(
    ("source", "is_read"),
    [(f'if "{JOB_CONFIG}" in os.environ: ...', True), ("def init(): ...", False), (None, False)],
    ids=["reads it", "dropped it", "moved"],
)
def test_a_ray_that_drops_it_is_noticed(
    source: str | None, is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ray" / READER
    file.parent.mkdir(parents=True)
    (tmp_path / "ray" / "__init__.py").touch()
    if source is not None:
        file.write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert job_config_is_read() is is_read


def test_without_ray_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_env, "find_spec", lambda _: None)
    assert job_config_is_read()
