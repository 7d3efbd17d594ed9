"""`verl-profiler plan -- COMMAND` on real Hydra apps: it tells what would be profiled, runs nothing, leaves nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import hydra
import psutil
import pytest
from clone import CLONE, python_path
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra_app import APPS
from waiting import wait_until

from verl_profiler_conf.capture.manifest import IterationRecord, Manifest, write_manifest
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.tools.launch_checks import device_findings
from verl_profiler_conf.tools.plan import plan, processes
from verl_profiler_conf.tools.plan.launch import run_launch
from verl_profiler_conf.tools.plan.reach import never_starts_hydra

APP = APPS / "app.py"
WINDOW = ("+profiler=torch_window", "profiler.profile_token_start=20", "profiler.profile_token_end=80")
DATACLASS_APP = """\
from dataclasses import dataclass

import hydra
from hydra.core.config_store import ConfigStore


@dataclass
class App:
    n: int = 12


ConfigStore.instance().store(name="app", node=App)


@hydra.main(version_base=None, config_path=None, config_name="app")
def main(cfg):
    open("RAN", "w").close()


try:
    main()
except SystemExit:
    open("WENT_ON", "w").close()
"""
BLOCKS_DISCOVERY = """\
import sys


class Finder:
    def find_spec(self, name, *_):
        if name == "hydra_plugins":
            raise ModuleNotFoundError(name)


sys.meta_path.insert(0, Finder())
"""


def run(
    folder: Path, *command: str, options: tuple[str, ...] = ("--json",), env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    work = folder / "work"
    work.mkdir(exist_ok=True)
    environ = {key: value for key, value in os.environ.items() if not key.startswith("VERL_PROFILER_CONF")}
    return subprocess.run(
        [sys.executable, "-m", "verl_profiler_conf.tools.cli", *("plan", *options, "--", *command)],
        cwd=work,
        env={**environ, "PYTHONPATH": python_path(CLONE), **(env or {})},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "work").iterdir() if path.name != "app.py")


def python(folder: Path, text: str) -> tuple[str, str]:
    (folder / "work").mkdir(exist_ok=True)
    (folder / "work" / "app.py").write_text(text)
    return sys.executable, "app.py"


def test_a_yaml_app(tmp_path: Path) -> None:
    done = run(tmp_path, sys.executable, str(APP), *WINDOW, "hydra.run.dir=mine")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    (job,) = report["jobs"]
    assert job["windows"] == [[20, 80]]
    assert job["save_path"] == str(tmp_path / "work" / "mine" / "profile")
    origins = {row["key"]: row["from"] for row in job["fields"]}
    start = "profiler.profile_token_start"
    assert origins[start] == f"command line: {start}=20"
    assert origins["profiler.track"] == "default of torch_window"
    assert all("_tokens20-80_rank0_pid<pid>_<n>.pt.trace.json.gz" in name for name in job["files"])
    assert Settings.from_json(job["environment"]).windows == (TokenWindow(20, 80),)
    assert job["estimate"]["iterations"] == 60
    assert "TASK" not in done.stdout
    assert left(tmp_path) == []


def test_a_value_of_a_config_names_that_config(tmp_path: Path) -> None:
    done = run(tmp_path, sys.executable, str(APP), "--config-name", "own_window")
    (job,) = json.loads(done.stdout)["jobs"]
    origins = {row["key"]: row["from"] for row in job["fields"]}
    end = "profiler.profile_token_end"
    assert origins[end] == "config own_window"


def test_tables_and_the_line_to_paste(tmp_path: Path) -> None:
    done = run(tmp_path, sys.executable, str(APP), *WINDOW, options=())
    assert done.returncode == 0
    assert "export VERL_PROFILER_CONF='{" in done.stdout
    assert "[20, 80)" in done.stdout


def test_a_refused_config_is_told_in_its_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, sys.executable, str(APP), *WINDOW, "profiler.profile_token_end=8", options=())
    assert done.returncode == 1
    assert (
        "problem: profiler.profile_token_end=8: an empty window; must be greater than profiler.profile_token_start=20"
        in done.stdout
    )
    assert left(tmp_path) == []


@pytest.mark.parametrize("option", [(), ("profiler@window=none",)])
def test_an_app_without_the_option_is_not_run(option: tuple[str, ...], tmp_path: Path) -> None:
    given = [f"+{each}" for each in option]
    done = run(tmp_path, sys.executable, str(APP), *given)
    assert done.returncode == 1
    (job,) = json.loads(done.stdout)["jobs"]
    assert job["spelling"] == "+profiler=torch_window"
    assert left(tmp_path) == []


def test_a_dataclass_app_gets_its_spelling_and_cannot_go_on(tmp_path: Path) -> None:
    app = python(tmp_path, DATACLASS_APP)
    done = run(tmp_path, *app)
    assert json.loads(done.stdout)["jobs"][0]["spelling"] == "hydra/callbacks=profiler"
    done = run(tmp_path, *app, "hydra/callbacks=profiler", "profiler.profile_token_end=5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["jobs"][0]["windows"] == [[0, 5]]
    assert left(tmp_path) == []


def test_a_composition_that_fails_tells_what_to_write(tmp_path: Path) -> None:
    app = python(tmp_path, DATACLASS_APP.replace("except SystemExit", "except ZeroDivisionError"))
    done = run(tmp_path, *app, "+profiler=torch_window")
    assert done.returncode == 1
    problems = json.loads(done.stdout)["problems"]
    assert "Key 'profiler' not in 'App'" in problems[0]
    assert "write hydra/callbacks=profiler instead" in problems[1]


@pytest.mark.parametrize("mode", [(), ("-m", "tokens=1,2")])
def test_an_undiscovered_plugin_runs_nothing(mode: tuple[str, ...], tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(BLOCKS_DISCOVERY)
    env = {"PYTHONPATH": python_path(site, CLONE)}
    done = run(tmp_path, sys.executable, str(APP), *mode, "+profiler=torch_window", env=env)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert "Hydra does not discover the plugin" in report["problems"][0]
    assert left(tmp_path) == []


def test_every_job_of_a_sweep(tmp_path: Path) -> None:
    done = run(tmp_path, sys.executable, str(APP), "-m", *WINDOW[:2], "profiler.profile_token_end=30,40")
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = json.loads(done.stdout)["jobs"]
    assert [job["windows"] for job in jobs] == [[[20, 30]], [[20, 40]]]
    assert [Path(job["run_dir"]).name for job in jobs] == ["0", "1"]
    assert left(tmp_path) == []


def test_a_sweep_over_options(tmp_path: Path) -> None:
    done = run(
        tmp_path, sys.executable, str(APP), "-m", "+profiler=none,torch_window", "++profiler.profile_token_end=4"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [job["option"] for job in json.loads(done.stdout)["jobs"]] == [None, "torch_window"]
    assert left(tmp_path) == []


def test_a_large_sweep_says_that_it_is_cut(tmp_path: Path) -> None:
    tokens = ",".join(map(str, range(30, 47)))
    done = run(tmp_path, sys.executable, str(APP), "-m", *WINDOW[:2], f"tokens={tokens}")
    report = json.loads(done.stdout)
    assert (len(report["jobs"]), report["cut_at"]) == (16, 16)


def test_a_sweeper_that_chooses_its_jobs_while_it_runs(tmp_path: Path) -> None:
    """Nothing of it is made, so that it need not be installed."""
    optuna = "hydra.sweeper._target_=hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"
    given = (str(APP), "-m", *WINDOW, "tokens=1,2", optuna)
    done = run(tmp_path, sys.executable, *given)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (len(report["jobs"]), report["base_of"]) == (1, optuna.partition("=")[2])
    assert report["jobs"][0]["windows"] == [[20, 80]]
    said = run(tmp_path, sys.executable, *given, options=()).stdout
    assert f"{report['base_of']} chooses the values of its jobs while it runs: this is the config without them" in said
    assert left(tmp_path) == []


def test_a_launch_without_hydra(tmp_path: Path) -> None:
    done = run(tmp_path, sys.executable, "-c", "pass")
    assert done.returncode == 1
    assert "no Hydra app started in it: its code has run" in json.loads(done.stdout)["problems"][0]


def test_a_script_that_surely_starts_no_hydra_app_is_not_run(tmp_path: Path) -> None:
    app = python(tmp_path, "import json\nimport torch\nimport beside.module\nopen('RAN', 'w').close()\n")
    beside = tmp_path / "work" / "beside"
    beside.mkdir()
    (beside / "module.py").write_text("from os import path\n")
    (beside / "__init__.py").touch()
    done = run(tmp_path, *app)
    assert done.returncode == 1
    (problem,) = json.loads(done.stdout)["problems"]
    assert problem.startswith(f"{tmp_path / 'work' / 'app.py'} imports no Hydra, and neither does any module beside it")
    assert left(tmp_path) == ["beside"]


@pytest.mark.parametrize(
    "text",
    [
        "import hydra",
        "import beside",
        "from beside import module",
        "import unknown_package",
        "from . import other",
        "__import__('hydra')",
        "import subprocess\nsubprocess.run(['train'])",
        "import os\nos.execv('train', ['train'])",
        "no) Python",
    ],
)
def test_a_script_that_may_start_one_is_run(text: str, tmp_path: Path) -> None:
    command = python(tmp_path, text)
    for name, code in {
        "beside/__init__.py": "",
        "beside/module.py": "import hydra",
        "beside.py": "import yaml, hydra",
    }.items():
        file = tmp_path / "work" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(code)
    assert never_starts_hydra([command[0], str(tmp_path / "work" / command[1])]) is None


@pytest.mark.parametrize("command", [["torchrun", "app.py"], ["python", "-m", "app"], ["python"], ["python", "no.py"]])
def test_other_commands_are_run(command: list[str]) -> None:
    assert never_starts_hydra(command) is None


LEAVES_A_DAEMON = """\
import subprocess, sys
child = "import os, threading; open('DAEMON', 'w').write(str(os.getpid())); threading.Event().wait()"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc here")
def test_what_has_left_the_launchs_session_is_ended(tmp_path: Path) -> None:
    wait = "import os, time\nwhile not os.path.exists('DAEMON') or not open('DAEMON').read(): time.sleep(0.01)\n"
    app = python(tmp_path, LEAVES_A_DAEMON + wait + "raise SystemExit(3)\n")
    done = run(tmp_path, *app)
    assert done.returncode == 1
    assert "ended with status 3" in json.loads(done.stdout)["problems"][0]
    number = int((tmp_path / "work" / "DAEMON").read_text())
    wait_until(lambda: has_ended(number), "the end of what left the session", 20)


def has_ended(number: int) -> bool:
    try:
        return psutil.Process(number).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_launch_that_never_comes_to_its_job_is_ended(tmp_path: Path) -> None:
    wait = "import threading; threading.Event().wait()"
    done = run(tmp_path, sys.executable, "-c", wait, options=("--json", "--timeout", "1"))
    assert done.returncode == 1
    (problem,) = json.loads(done.stdout)["problems"]
    assert "within 1 s" in problem
    assert "until then its code has run as always" in problem
    assert done.stderr == ""


def test_a_launch_that_takes_long_is_spoken_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "SAID_AFTER", 0.1)
    report = run_launch([sys.executable, "-c", "import threading; threading.Event().wait()"], seconds=1)
    assert "within 1 s" in report["problems"][0]
    assert "its code runs as always; it is ended after 1 s (--timeout), or by Ctrl-C" in capsys.readouterr().err


COMPOSES = """\
from hydra import compose, initialize_config_dir
from verl_profiler_conf import activate

with initialize_config_dir(version_base=None, config_dir={folder!r}):
    cfg = compose("plain", overrides=["+profiler=torch_window", "profiler.profile_token_end=8"])
open("BEFORE", "w").close()
with activate(cfg):
    open("RAN", "w").close()
"""


def test_a_launch_that_composes_ends_where_it_would_activate(tmp_path: Path) -> None:
    done = run(tmp_path, *python(tmp_path, COMPOSES.format(folder=str(APPS / "conf"))))
    assert done.returncode == 0, done.stdout + done.stderr
    (job,) = json.loads(done.stdout)["jobs"]
    assert (job["windows"], job["save_path"]) == ([[0, 8]], str(tmp_path / "work" / "profile"))
    assert left(tmp_path) == ["BEFORE"]


@pytest.mark.parametrize("mode", [(), ("-m", "tokens=1,2")])
def test_a_hydra_that_starts_jobs_by_another_name(mode: tuple[str, ...], tmp_path: Path) -> None:
    """An undiscovered plugin, in a copy of Hydra without `run_job` and `instantiate_sweeper`: no task is run."""
    site = tmp_path / "site"
    shutil.copytree(Path(hydra.__file__).parent, site / "hydra", ignore=shutil.ignore_patterns("__pycache__"))
    for file in (site / "hydra").rglob("*.py"):
        text = file.read_text()
        changed = re.sub(r"\brun_job\b", "start_job", text).replace("instantiate_sweeper", "make_sweeper")
        if changed != text:
            file.write_text(changed)
    (site / "sitecustomize.py").write_text(BLOCKS_DISCOVERY)
    env = {"PYTHONPATH": python_path(site, CLONE)}
    done = run(tmp_path, sys.executable, str(APP), *mode, "+profiler=torch_window", "hydra.run.dir=made", env=env)
    assert done.returncode == 1, done.stderr
    (problem,) = json.loads(done.stdout)["problems"]
    assert "Hydra does not discover the plugin" in problem
    assert "its folder was made, and is left: " in problem
    assert "TASK" not in done.stdout + done.stderr


def test_no_such_command(tmp_path: Path) -> None:
    done = run(tmp_path, "there-is-no-such-command")
    assert done.returncode == 2
    assert "there-is-no-such-command" in done.stderr


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run(tmp_path, sys.executable, *torchrun, str(APP), *WINDOW, "profiler.all_ranks=true")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["world"], report["processes"]) == (2, 2)
    assert report["jobs"][0]["ranks"] == [0, 1]
    assert left(tmp_path) == []


def composed(*overrides: str) -> Any:
    with initialize_config_dir(version_base=None, config_dir=str(APPS / "conf")):
        config = compose("plain", overrides=list(overrides))
    GlobalHydra.instance().clear()
    return config


def test_a_config_of_compose_and_the_cost_of_an_earlier_run(tmp_path: Path) -> None:
    rows = [IterationRecord(index, index, index + 1, 1, 1, 10) for index in range(4)]
    manifest = Manifest(TokenWindow(0, 4), "vllm", "0", 0, "lead", rows=rows, trace="t", trace_bytes=4000, stall_ns=8)
    write_manifest(manifest, tmp_path / "one")
    config = composed(*WINDOW, f"profiler.save_path={tmp_path / 'new' / 'profile'}")
    job = plan(config, like=tmp_path, max_size=59_999)
    assert job["estimate"]["trace_bytes"] == 60_000
    assert [line for line in job["problems"] if "--max-size" in line]
    assert not plan(config, like=tmp_path, max_size=60_000)["problems"]
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_the_estimate_is_near_what_a_rollout_takes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    app = (sys.executable, str(CLONE / "examples" / "rollout.py"), "model.num_hidden_layers=6", "response_tokens=40")
    window = ("+profiler=torch_window", "profiler.profile_token_start=20", "profiler.profile_token_end=30")
    done = run(tmp_path, *app, *window, "profiler.engine.name=transformers", options=("--json", "--layers", "6"))
    assert done.returncode == 0, done.stdout + done.stderr
    expected = json.loads(done.stdout)["jobs"][0]["estimate"]["trace_bytes"]
    subprocess.run([*app, *window, "hydra.run.dir=ran"], cwd=tmp_path, check=True, capture_output=True)
    (trace,) = (tmp_path / "ran").rglob("*.pt.trace.json.gz")
    assert 0.5 < expected / trace.stat().st_size < 2


def test_a_number_of_layers_that_is_none(tmp_path: Path) -> None:
    done = run(tmp_path, sys.executable, str(APP), *WINDOW, options=("--layers", "0"))
    assert (done.returncode, done.stderr) == (2, "verl-profiler plan: --layers=0: must be at least 1\n")


def test_doctor_of_a_launch_names_what_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "verl_profiler_conf.tools.cli", "doctor", "--", sys.executable, str(APP), *WINDOW]
    done = subprocess.run(
        [*command, "profiler.profile_token_end=8"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "profiler.profile_token_end=8: an empty window" in done.stdout
    assert not list(tmp_path.iterdir())


def test_doctor_finds_cann_and_another_profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With made-up device nodes and processes."""
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH"):
        monkeypatch.delenv(name, raising=False)
    dev, process = tmp_path / "dev", tmp_path / "proc" / "7"
    dev.mkdir()
    process.mkdir(parents=True)
    (dev / "davinci0").touch()
    (process / "comm").write_text("nv-hostengine\n")
    found = list(device_findings(dev, tmp_path / "proc"))
    assert [(finding.about, finding.state) for finding in found] == [("CANN", "error"), ("CUPTI", "warning")]
    assert all(finding.fix for finding in found)
