"""Jobs as users launch them: RUN, MULTIRUN, launchers, the app's own callbacks, and the command line's queries."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import pytest
from clone import CLONE
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError

from verl_profiler_conf.schema.options import TorchWindow

App = Callable[..., Any]

HYDRA_14 = tuple(int(part) for part in hydra.__version__.split(".")[:2]) >= (1, 4)
WINDOW = ("profiler.profile_token_start=20", "profiler.profile_token_end=80")
BAD = "profiler.profile_token_end=5: an empty window; must be greater than profiler.profile_token_start=20"


def test_run_publishes_the_window_and_takes_it_back(app: App) -> None:
    run = app("+profiler=torch_window", *WINDOW, "child=true")
    assert run.code == 0, run.err
    settings = run.settings
    assert (settings["profile_token_start"], settings["profile_token_end"]) == (20, 80)
    assert settings["profiler"] == "torch_window"
    assert settings["run_id"]
    assert Path(settings["save_path"]).is_absolute()
    assert Path(settings["save_path"]).name == "profile"
    assert Path(settings["save_path"]).parent.parent.parent == run.folder / "outputs"
    child = next(line for line in run.out.splitlines() if line.startswith("CHILD "))
    assert json.loads(child.removeprefix("CHILD ")) == settings
    assert run.after == {"job": None}
    assert not run.tasks[0]["torch"]


def test_what_stood_in_the_environment_is_put_back(app: App) -> None:
    mine = '{"profile_token_end": 3}'
    run = app("+profiler=torch_window", *WINDOW, env={"VERL_PROFILER_CONF": mine})
    assert run.settings["profile_token_end"] == 80
    assert run.after == {"job": mine}


def test_no_engine_is_said_once(app: App) -> None:
    run = app("+profiler=torch_window", *WINDOW)
    warnings = [line for line in run.ours if "WARNING" in line]
    assert len(warnings) == 1
    assert "tokens [20, 80): no capture, because no engine reported an iteration" in warnings[0]
    assert "verl-profiler doctor" in warnings[0]


def test_open_window_is_warned_of_at_the_start(app: App) -> None:
    run = app("+profiler=torch_window", "profiler.profile_token_start=40")
    assert run.code == 0
    assert any("the window [40, end) has no end" in line for line in run.ours)


def test_bad_window_stops_a_run_in_one_line(app: App) -> None:
    run = app("+profiler=torch_window", "profiler.profile_token_start=20", "profiler.profile_token_end=5")
    assert run.code == 1
    assert run.tasks == []
    assert said(run) == [BAD]


def said(run: Any) -> list[str]:
    """Lines on stderr but Hydra 1.4's remark on the app's `version_base`."""
    return [line for line in run.err.splitlines() if "Warning" not in line and not line.startswith(("Omit ", "  @"))]


def test_multirun_stops_at_the_bad_window(app: App) -> None:
    run = app("-m", "+profiler=torch_window", "profiler.profile_token_start=20", "profiler.profile_token_end=80,5")
    assert run.code == 1
    assert [task["cfg"]["profiler"]["profile_token_end"] for task in run.tasks] == [80]
    assert run.err.splitlines()[-1] == BAD
    assert "Traceback" not in run.err


def test_multirun_gives_each_job_its_own_window_and_folder(app: App) -> None:
    run = app("-m", "+profiler=torch_window", "profiler.profile_token_start=20", "profiler.profile_token_end=80,90")
    assert run.code == 0, run.err
    first, second = (json.loads(task["job"]) for task in run.tasks)
    assert (first["profile_token_end"], second["profile_token_end"]) == (80, 90)
    assert first["run_id"] != second["run_id"]
    assert [Path(settings["save_path"]).parent.name for settings in (first, second)] == ["0", "1"]
    assert run.after == {"job": None}


def test_multirun_over_the_options_of_an_app_that_selects_one(app: App) -> None:
    run = app("-m", "--config-name=own_window", "profiler=none,torch_window,torch_memory", "hydra.verbose=false")
    assert run.code == 0, run.err
    options = [task["job"] and json.loads(task["job"])["profiler"] for task in run.tasks]
    assert options == [None, "torch_window", "torch_memory"]


def test_multirun_over_enable(app: App) -> None:
    run = app("-m", "+profiler=torch_window", "profiler.profile_token_end=8", "profiler.enable=true,false")
    assert run.code == 0, run.err
    assert [task["job"] is None for task in run.tasks] == [False, True]


def test_resolved_hydra_node_can_be_shown(app: App) -> None:
    run = app("--cfg", "hydra", "--resolve", "-p", "hydra.job.env_set", "+profiler=torch_window")
    assert run.code == 0, run.err
    assert "VERL_PROFILER_CONF_CALLBACK: loaded" in run.out


@pytest.mark.parametrize("end", ["80,90", "80,5"])
def test_joblib_launcher(app: App, end: str) -> None:
    pytest.importorskip("joblib")
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    run = app(
        "-m",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=1",
        "+profiler=torch_window",
        "profiler.profile_token_start=20",
        f"profiler.profile_token_end={end}",
    )
    ends = [json.loads(task["job"])["profile_token_end"] for task in run.tasks]
    if end == "80,90":
        assert run.code == 0, run.err
        assert ends == [80, 90]
    else:
        assert run.code == 1
        assert ends == [80]
        assert run.err.splitlines()[-1] == BAD


def test_joblib_launcher_in_worker_processes(app: App) -> None:
    """The callback and the configs travel to workers by pickle."""
    pytest.importorskip("joblib")
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    arguments = ("-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "+profiler=torch_window")
    run = app(*arguments, "profiler.profile_token_start=20", "profiler.profile_token_end=80,90,5")
    assert run.code == 1
    assert BAD in run.err + run.out
    assert 5 not in [json.loads(task["job"])["profile_token_end"] for task in run.tasks]
    run = app(*arguments, "profiler.profile_token_end=80,90")
    assert run.code == 0, run.err
    assert sorted(json.loads(task["job"])["profile_token_end"] for task in run.tasks) == [80, 90]


# -- apps of other shapes ----------------------------------------------------------------------------------------------


def test_relocated(app: App) -> None:
    run = app(
        "+profiler@train.prof=torch_window", "train.prof.profile_token_start=20", "train.prof.profile_token_end=80"
    )
    assert run.code == 0, run.err
    assert run.settings["profile_token_end"] == 80
    run = app("+profiler@train.prof=torch_window", "train.prof.profile_token_end=0")
    assert run.code == 1
    assert run.err.splitlines()[-1].startswith("train.prof.profile_token_end=0: an empty window")


def test_app_with_its_own_callbacks(app: App) -> None:
    run = app("--config-name=own_callbacks", "+profiler=torch_window", *WINDOW)
    assert run.code == 0, run.err
    assert "MINE start" in run.out
    assert "MINE end" in run.out
    assert run.settings["profile_token_start"] == 20


@pytest.mark.parametrize(("name", "argument"), [("with_null", "profiler"), ("own_node", "profiler@train.prof")])
def test_app_with_the_group_in_its_defaults(app: App, name: str, argument: str) -> None:
    node = argument.partition("@")[2] or "profiler"
    run = app(f"--config-name={name}", f"{argument}=torch_window", f"{node}.profile_token_end=8")
    assert run.code == 0, run.err
    assert run.settings["profile_token_end"] == 8
    assert app(f"--config-name={name}").tasks[0]["job"] is None


@pytest.mark.parametrize("base", ["none", "1.1", "1.3", "omitted"])
def test_version_base(app: App, base: str) -> None:
    if HYDRA_14 and base == "1.1":
        pytest.skip("Hydra 1.4 has dropped it")
    run = app("+profiler=torch_window", *WINDOW, base=base)
    assert run.code == 0, run.err
    folder = Path(run.settings["save_path"]).parent
    assert folder.parents[1] == run.folder / "outputs"
    changed = base == "1.1" and not HYDRA_14  # there Hydra changes into the run's folder
    assert run.tasks[0]["cwd"] == str(folder if changed or (base == "omitted" and not HYDRA_14) else run.folder)


def test_chdir(app: App) -> None:
    run = app("+profiler=torch_window", *WINDOW, "hydra.job.chdir=true")
    assert run.settings["save_path"] == run.tasks[0]["cwd"] + "/profile"
    run = app("+profiler=torch_window", *WINDOW, "hydra.job.chdir=true", "profiler.save_path=traces")
    assert run.settings["save_path"] == run.tasks[0]["cwd"] + "/traces"


def test_save_path_of_ones_own(app: App) -> None:
    run = app("+profiler=torch_window", *WINDOW, "profiler.save_path=traces")
    assert run.settings["save_path"] == str(run.folder / "traces")


def test_two_windows_in_one_config(app: App) -> None:
    both = ("+profiler=torch_window", "+profiler@train.prof=torch_memory")
    run = app(*both)
    assert run.code == 1
    assert run.err.splitlines()[-1] == (
        "profiler.enable=True: a job has one window, and train.prof is another; set enable=false in one of them"
    )
    run = app(*both, "profiler.enable=false", "train.prof.profile_token_end=8")
    assert run.code == 0, run.err
    assert run.settings["profiler"] == "torch_memory"


# -- nothing selected, nothing done ------------------------------------------------------------------------------------


@pytest.mark.parametrize("selected", [("+profiler=none",), ("+profiler=torch_window", "profiler.enable=false"), ()])
def test_off_leaves_the_job_alone(app: App, selected: tuple[str, ...]) -> None:
    run = app(*selected)
    assert run.code == 0, run.err
    assert run.ours == []
    assert run.tasks[0]["job"] is None
    assert not run.tasks[0]["torch"]
    assert list(run.folder.rglob("profile")) == []


@pytest.mark.parametrize("written", ["+profiler.profile_token_end=8", "+profiler={profile_token_end: 8}"])
def test_fields_without_an_option_are_said_to_profile_nothing(app: App, written: str) -> None:
    run = app(written)
    assert run.code == 0, run.err
    (line,) = (line for line in run.err.splitlines() if "selects no option" in line)
    assert line.startswith(f"{written} sets a plain value and selects no option, so that it profiles nothing")
    assert "selects no option" not in app("+profiler=torch_window", "profiler.profile_token_end=8").err
    assert "selects no option" not in app("+profiler=torch_window", "++profiler.profile_token_end=8").err


@pytest.mark.parametrize("selected", [("+profiler=none",), ("+profiler=torch_window", "profiler.enable=false")])
def test_off_is_obeyed_inside_another_job(app: App, selected: tuple[str, ...]) -> None:
    outer = json.dumps({"profile_token_end": 3})
    run = app(*selected, "child=true", "tokens=5", env={"VERL_PROFILER_CONF": outer})
    assert run.code == 0, run.err
    assert run.tasks[0]["job"] is None
    assert "CHILD None" in run.out
    assert run.manifests() == []
    assert run.after == {"job": outer}
    run = app("-m", "+profiler=none,torch_window", "++profiler.profile_token_end=8", env={"VERL_PROFILER_CONF": outer})
    assert [bool(task["job"]) for task in run.tasks] == [False, True]


def test_an_app_that_says_nothing_is_part_of_the_job_around_it(app: App) -> None:
    outer = json.dumps({"profile_token_end": 3, "device": "cpu"})
    run = app("tokens=5", env={"VERL_PROFILER_CONF": outer})
    assert run.tasks[0]["job"] == outer
    assert len(run.manifests()) == 1


def test_off_is_validated_all_the_same(app: App) -> None:
    run = app("+profiler=torch_window", "profiler.enable=false", "profiler.profile_token_end=0")
    assert run.code == 1
    assert run.err.splitlines()[-1].startswith("profiler.profile_token_end=0: ")


HIDE = """\
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("hydra_plugins.verl_profiler_conf"):
            raise ImportError(name)
sys.meta_path.insert(0, Hidden())
import pkgutil
walk = pkgutil.walk_packages
pkgutil.walk_packages = lambda *a, **k: (m for m in walk(*a, **k) if "verl_profiler_conf" not in m.name)
import importlib.metadata as metadata
plain = metadata.entry_points
metadata.entry_points = lambda **k: [] if k.get("group") == "hydra.plugins" else plain(**k)
"""


def test_unused_is_byte_for_byte_the_same(app: App, tmp_path: Path) -> None:
    """Against a run in which Hydra cannot see the plugin."""
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "sitecustomize.py").write_text(HIDE)
    hidden = {"PYTHONPATH": f"{tmp_path / 'hide'}:{CLONE}"}
    seen = {"PYTHONPATH": str(CLONE)}
    assert "VerlProfilerConf" not in app("--info", "plugins", env=hidden).out
    assert "VerlProfilerConf" in app("--info", "plugins", env=seen).out
    for arguments in (("--cfg", "all"), ("--cfg", "job", "--resolve"), ()):
        without, with_us = (app(*arguments, "hydra.run.dir=run", env=env) for env in (hidden, seen))
        assert with_us.code == 0
        assert without_search_path_entry(with_us.out) == without_search_path_entry(without.out)
        assert with_us.err == without.err


def without_search_path_entry(text: str) -> str:
    """Hydra lists every place that configs can come from in its own node; ours is one."""
    return re.sub(r" *- path: verl_profiler_conf\.conf\n.*\n.*\n", "", text)


# -- queries of the command line ---------------------------------------------------------------------------------------


def test_cfg_job_resolve(app: App) -> None:
    run = app("--cfg", "job", "--resolve", "+profiler=torch_window", *WINDOW)
    assert run.code == 0, run.err
    assert "    vllm:\n      delay_iterations: 21\n      max_iterations: 60\n" in run.out
    assert run.ours == []


@pytest.mark.parametrize("query", [("--cfg", "job"), ("--cfg=all",), ("-c", "job")])
def test_wrong_value_in_a_query_is_one_line(app: App, query: tuple[str, ...]) -> None:
    run = app(*query, "--resolve", "+profiler=torch_window", *WINDOW[:1], "profiler.profile_token_end=5")
    assert run.code == 1
    assert said(run) == [BAD]


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("${nothing}", "Interpolation key 'nothing' not found"),
        (
            "${oc.env:NOT_SET}",
            "KeyError raised while resolving interpolation: \"Environment variable 'NOT_SET' not found\"",
        ),
        (
            "${data.text}",
            "While dereferencing interpolation '${data.text}': Value 'sixty-four' of type 'str' could not be",
        ),
        ("${profiler.profile_token_end}", "Recursive interpolation detected"),
    ],
)
def test_reference_that_leads_nowhere_in_a_query_is_one_line(app: App, written: str, reason: str) -> None:
    run = app("--cfg", "job", "--resolve", "+profiler=torch_window", f"profiler.profile_token_end={written}")
    assert run.code == 1
    (line,) = run.err.splitlines()
    assert line.startswith(f"profiler.profile_token_end='{written}': cannot be resolved: {reason}")


def test_wrong_value_outside_a_query_ends_nobodys_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one whose own arguments look like a query."""
    monkeypatch.setattr("sys.argv", ["app.py", "--cfg", "job", "--resolve"])
    node = OmegaConf.structured(TorchWindow(profile_token_end=0))
    with pytest.raises(InterpolationResolutionError, match="profile_token_end=0: an empty window"):
        OmegaConf.resolve(node)


def test_info_defaults_tree(app: App) -> None:
    run = app("--info", "defaults-tree", "+profiler=torch_window")
    assert run.code == 0, run.err
    assert "profiler: torch_window" in run.out
    assert "verl_profiler_conf/callback" in run.out


def test_info_searchpath_and_plugins(app: App) -> None:
    assert "pkg://verl_profiler_conf.conf" in app("--info", "searchpath").out
    assert "VerlProfilerConfSearchPath" in app("--info", "plugins").out


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("+profiler=", {"none", "npu_window", "nsys_window", "torch_memory", "torch_window"}),
        ("+profiler=torch_window profiler.profile_token_s", {"profiler.profile_token_start="}),
        ("+profiler=torch_window profiler.eng", {"profiler.engine."}),
    ],
)
def test_shell_completion(app: App, line: str, offered: set[str]) -> None:
    run = app("-sc", "query=bash", env={"COMP_LINE": f"python app.py {line}", "COMP_POINT": str(14 + len(line))})
    assert run.code == 0, run.err
    words = {word.removeprefix("+profiler=") for word in run.out.split()}
    assert offered <= words, run.out
