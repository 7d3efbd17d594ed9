"""Sweeps that select an option for some of their jobs only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra_app import Run

App = Callable[..., Run]

FILES = {
    "base": "defaults:\n- _self_\n- experiment: null\ntokens: 0\nat: -1\nleave: ''\n",
    "experiment/other": "# @package _global_\nlr: 1\n",
    "experiment/with_profiler": (
        "# @package _global_\ndefaults:\n- /profiler: torch_window\n- _self_\nprofiler: {profile_token_end: 5}\n"
    ),
    "with_params": (
        "defaults:\n- base\n- _self_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n"
        "      experiment: other,with_profiler\n"
    ),
}


@pytest.fixture
def place(tmp_path: Path) -> str:
    for name, text in FILES.items():
        file = tmp_path / "sweep_conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return f"--config-dir={tmp_path / 'sweep_conf'}"


def ends(run: Run) -> list[Any]:
    """The published window's end in each job; None: no window."""
    return [task["job"] and json.loads(task["job"])["profile_token_end"] for task in run.tasks]


@pytest.mark.parametrize(
    ("experiments", "expected"),
    [
        ("other,with_profiler", [None, 5]),
        ("with_profiler,other", [5, None]),
        ("with_profiler,other,with_profiler", [5, None, 5]),
    ],
)
def test_an_experiment_that_selects_the_option(app: App, place: str, experiments: str, expected: list[Any]) -> None:
    run = app("-m", place, "--config-name=base", f"experiment={experiments}")
    assert run.code == 0, run.err
    assert ends(run) == expected
    assert run.after == {"job": None}


def test_in_the_sweepers_own_params(app: App, place: str) -> None:
    run = app(place, "--config-name=with_params")
    assert run.code == 0, run.err
    assert ends(run) == [None, 5]


def test_over_the_options_themselves(app: App) -> None:
    run = app("-m", "+profiler=none,torch_window,torch_memory", "++profiler.profile_token_end=8")
    assert run.code == 0, run.err
    assert ends(run) == [None, 8, 8]


def test_captures_are_those_of_their_jobs(app: App, place: str) -> None:
    pytest.importorskip("torch")
    run = app("-m", place, "--config-name=base", "experiment=other,with_profiler", "tokens=12")
    assert run.code == 0, run.err
    assert [[row["lo"] for row in manifest["rows"]] for manifest in run.manifests()] == [[0, 1, 2, 3, 4]]
    (trace,) = run.folder.rglob("*.pt.trace.json.gz")
    assert trace.parent.parent.name == "1"


@pytest.mark.parametrize("jobs", [1, 2])
def test_with_joblib(app: App, place: str, jobs: int) -> None:
    """In worker processes, which get the callbacks by pickle."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    launcher = ("hydra/launcher=joblib", f"hydra.launcher.n_jobs={jobs}")
    run = app("-m", place, "--config-name=base", *launcher, "experiment=other,with_profiler,other,with_profiler")
    assert run.code == 0, run.err
    assert sorted(ends(run), key=str) == [5, 5, None, None]


def test_a_wrong_window_of_a_later_job_stops_there(app: App, place: str) -> None:
    wrong = "++profiler.profile_token_start=9"
    run = app("-m", place, "--config-name=base", "experiment=with_profiler", wrong)
    assert (run.code, run.tasks) == (1, [])
    assert run.err.splitlines()[-1].startswith("profiler.profile_token_end=5: an empty window")


def test_an_apps_own_callbacks_stay(app: App) -> None:
    run = app("-m", "--config-name=own_callbacks", "+profiler=none,torch_window", "++profiler.profile_token_end=8")
    assert run.code == 0, run.err
    assert (run.out.count("MINE start"), run.out.count("MINE end")) == (2, 2)
    assert ends(run) == [None, 8]


def test_a_hydra_that_keeps_its_callbacks_in_another_way_stops_the_job_with_a_line(
    app: App, place: str, tmp_path: Path
) -> None:
    (tmp_path / "hide").mkdir()
    code = "import hydra._internal.callbacks as c; import builtins; c.Callbacks.__init__.__doc__ = ''\n"
    hide = "import verl_profiler_conf.launch.sweep as s; s._instances = lambda kind: []\n"
    (tmp_path / "hide" / "usercustomize.py").write_text(code + hide)
    (tmp_path / "hide" / "sitecustomize.py").write_text(hide)
    run = app(
        "-m", place, "--config-name=base", "experiment=with_profiler,other", env={"PYTHONPATH": str(tmp_path / "hide")}
    )
    assert (run.code, run.tasks) == (1, [])
    assert run.err.splitlines()[-1].startswith("profiler: this sweep selects an option for some of its jobs")
