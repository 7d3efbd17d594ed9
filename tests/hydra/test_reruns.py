"""Jobs that are run again from what Hydra has saved of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import hydra
import pytest
from hydra_app import Run

App = Callable[..., Run]

HYDRA_14 = tuple(int(part) for part in hydra.__version__.split(".")[:2]) >= (1, 4)
WORK = ("tokens=12", "hydra.run.dir=first")
PICKLE = () if HYDRA_14 else ("+hydra.callbacks.pickle._target_=hydra.experimental.callbacks.PickleJobInfoCallback",)
"""What makes Hydra 1.3 save a job for its rerun."""


def saved(run: Run) -> tuple[str, str]:
    return f"--config-path={run.folder / 'first' / '.hydra'}", "--config-name=config"


def rows(run: Run, folder: str) -> list[list[int]]:
    manifests = [manifest for manifest in run.manifests() if (run.folder / folder / "profile").exists()]
    return [[row["lo"] for row in manifest["rows"]] for manifest in manifests]


@pytest.mark.parametrize("place", ["profiler", "train.prof"])
def test_a_saved_config_profiles_again(app: App, place: str) -> None:
    pytest.importorskip("torch")
    window = (f"{place}.profile_token_start=2", f"{place}.profile_token_end=5")
    first = app(*WORK, f"+profiler@{place}=torch_window", *window)
    assert first.code == 0, first.err
    again = app(*saved(first), "hydra.run.dir=again")
    assert again.code == 0, again.err
    assert again.settings["save_path"] == str(again.folder / "again" / "profile")
    assert rows(again, "again") == [[2, 3, 4], [2, 3, 4]]
    assert again.settings["run_id"] != first.settings["run_id"]


@pytest.mark.parametrize(
    ("option", "field"), [("npu_window", "level=level1"), ("torch_memory", "track=any"), ("nsys_window", "ranks=[1]")]
)
def test_the_option_is_the_same_and_its_fields_can_be_overridden(app: App, option: str, field: str) -> None:
    first = app("hydra.run.dir=first", f"+profiler={option}", f"profiler.{field}", "profiler.profile_token_end=5")
    again = app(*saved(first), "hydra.run.dir=again", "profiler.profile_token_end=7")
    assert again.code == 0, again.err
    assert again.settings["profile_token_end"] == 7
    changed = ("profile_token_end", "save_path", "run_id")
    assert [{k: v for k, v in run.settings.items() if k not in changed} for run in (again, first)] == [
        {k: v for k, v in first.settings.items() if k not in changed}
    ] * 2
    wrong = app(*saved(first), "profiler.profile_token_end=0")
    assert (wrong.code, wrong.tasks) == (1, [])
    assert wrong.err.splitlines()[-1].startswith("profiler.profile_token_end=0: an empty window")


def test_an_option_on_top_of_a_saved_config_is_refused(app: App) -> None:
    """Its defaults would replace the saved window."""
    first = app(*WORK, "+profiler=torch_window", "profiler.profile_token_end=5")
    again = app(*saved(first), "+profiler=torch_window", "hydra.run.dir=again")
    assert (again.code, again.tasks) == (1, [])
    line = again.err.splitlines()[-1]
    assert "was saved by a job with an option" in line
    assert line.endswith("a saved config needs no option: leave out +profiler=torch_window")


def test_without_appending_it_does_no_harm(app: App) -> None:
    first = app("hydra.run.dir=first", "+profiler=torch_window", "profiler.profile_token_end=5")
    again = app(*saved(first), "hydra/callbacks=profiler", "hydra.run.dir=again")
    assert again.code == 0, again.err
    assert again.settings["profile_token_end"] == 5


@pytest.mark.parametrize("selected", [(), ("+profiler=none",), ("+profiler=torch_window", "profiler.enable=false")])
def test_a_job_that_did_not_profile_does_not_when_it_is_run_again(app: App, selected: tuple[str, ...]) -> None:
    first = app("hydra.run.dir=first", *selected)
    again = app(*saved(first), "hydra.run.dir=again")
    assert again.code == 0, again.err
    assert (again.ours, again.tasks[0]["job"]) == ([], None)


def test_hydras_own_rerun(app: App) -> None:
    """Hydra 1.3 runs the task function of a pickled job and calls no callback; 1.4 repeats the launch."""
    first = app("hydra.run.dir=first", "+profiler=torch_window", "profiler.profile_token_end=5", *PICKLE)
    assert first.code == 0, first.err
    where = "first" if HYDRA_14 else "first/.hydra/config.pickle"
    again = app("--experimental-rerun", where)
    assert again.code == 0, again.err
    if HYDRA_14:
        assert again.settings["profile_token_end"] == 5
        return
    assert again.tasks[0]["job"] is None
    (line,) = [line for line in again.err.splitlines() if "profiler: " in line]
    assert line == (
        "profiler: --experimental-rerun of Hydra 1.3 calls no callback, so nothing is profiled; to profile, rerun with"
        " --config-path RUN/.hydra --config-name config"
    )


def test_a_rerun_of_a_job_that_did_not_profile_says_nothing(app: App) -> None:
    app("hydra.run.dir=first", *PICKLE)
    again = app("--experimental-rerun", "first" if HYDRA_14 else "first/.hydra/config.pickle")
    assert again.code == 0, again.err
    assert "profiler: " not in again.err


def test_an_unreadable_config_is_hydras_to_refuse(app: App, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.yaml").write_text("a: ${verl_profiler_conf.iterations:vllm,x}\nb: [1\n")
    run = app(f"--config-path={tmp_path / 'broken'}", "--config-name=config")
    assert run.code == 1
    assert "options of a saved config cannot be selected again" in run.err
