"""The module that Hydra imports in every app: it must cost nothing, say nothing and break nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from verl_profiler_conf.core.settings import ENV_NAME
from verl_profiler_conf.launch.options import SCHEMAS, make_part
from verl_profiler_conf.launch.stand_ins import NAMES
from verl_profiler_conf.schema.register import ITERATIONS, LOADED, VERL

APP = """\
import hydra

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    print("ran")

main()
"""

# How broken installations look from the inside: a module cannot be imported.
BROKEN = """\
import sys
sys.modules["verl_profiler_conf.launch.{module}"] = None
sys.argv = ["app.py", *sys.argv[1:]]
exec(open("app.py").read())
"""


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


def test_importing_it_is_light_and_silent(tmp_path: Path) -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'vllm', 'sglang', 'torch_npu', 'ray', 'rich'}"
    code = f"import sys, hydra_plugins.verl_profiler_conf; sys.exit(str({heavy} & set(sys.modules) or ''))"
    done = run("-c", code, cwd=tmp_path)
    assert done.stderr.strip() == ""
    assert done.stdout == ""


def test_stand_ins_are_registered_by_it(tmp_path: Path) -> None:
    done = run("-c", "import hydra_plugins.verl_profiler_conf as p; print(p.registration_error)", cwd=tmp_path)
    assert done.stdout == "None\n", done.stderr


LIGHT = {
    "verl_profiler_conf",
    "verl_profiler_conf.launch",
    "verl_profiler_conf.launch.stand_ins",
    "verl_profiler_conf.schema",
    "verl_profiler_conf.schema.register",
    "verl_profiler_conf.schema.versions",
}
"""All that an app which does not profile imports of the package."""


def test_an_app_that_does_not_profile_imports_the_stand_ins_only(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP.replace('print("ran")', "import sys; print(*sorted(sys.modules))"))
    modules = {name for name in run("app.py", cwd=tmp_path).stdout.split() if name.startswith("verl_profiler_conf")}
    assert modules - {"verl_profiler_conf.conf"} == LIGHT


def test_every_stand_in_has_its_config_and_every_option_its_stand_in() -> None:
    assert set(SCHEMAS) == set(NAMES) - {"callback", "callback_where_inherited", "verl_torch_keys", "verl_npu_keys"}
    for name in NAMES:
        assert (len(make_part(name)) > 0) == (name != "callback_where_inherited")


def test_the_callback_comes_where_a_window_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_NAME, "{}")
    assert make_part("callback_where_inherited") == make_part("callback")


@pytest.mark.parametrize("resolver", [ITERATIONS, VERL, LOADED])
def test_a_resolver_is_there_before_its_module_is_imported(resolver: str, tmp_path: Path) -> None:
    """An app may refer to a computed field before it, or anyone, has loaded an option."""
    call, value = {
        ITERATIONS: ("vllm,max_iterations", "8"),
        VERL: ("continuous", "False"),
        LOADED: ("", "loaded"),
    }[resolver]
    code = (
        "import hydra_plugins.verl_profiler_conf; from omegaconf import OmegaConf\n"
        f"fields = {{'option': 'torch_window', 'profile_token_start': 0, 'profile_token_end': 8}}\n"
        f"fields['iterations'] = {{'vllm': {{'x': '${{{resolver}:{call}}}'}}}}\n"
        "print(OmegaConf.create(fields).iterations.vllm.x)"
    )
    done = run("-c", code, cwd=tmp_path)
    assert done.stdout == f"{value}\n", done.stderr


def test_schemas_are_made_when_they_are_asked_for(tmp_path: Path) -> None:
    code = (
        "import hydra.core.hydra_config; from omegaconf import OmegaConf\n"
        "made = []; real = OmegaConf.structured\n"
        "OmegaConf.structured = lambda *a, **k: made.append(a) or real(*a, **k)\n"
        "import hydra_plugins.verl_profiler_conf; from hydra.core.config_store import ConfigStore; print(len(made))\n"
        "load = ConfigStore.instance().load; load('verl_profiler_conf/torch_window.yaml'); print(len(made))\n"
    )
    done = run("-c", code, cwd=tmp_path)
    assert done.stdout == "0\n1\n", done.stderr


@pytest.mark.parametrize("module", ["options", "stand_ins"])
def test_broken_installation_leaves_other_apps_alone(module: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    done = run("-c", BROKEN.replace("{module}", module), cwd=tmp_path)
    remarks = [line for line in done.stderr.splitlines() if "version_base" not in line]  # of Hydra 1.4, on the app
    assert (done.returncode, done.stdout, remarks) == (0, "ran\n", [])


@pytest.mark.parametrize("module", ["options", "stand_ins"])
def test_broken_installation_is_said_where_the_option_is_asked_for(module: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    done = run("-c", BROKEN.replace("{module}", module), "+profiler=torch_window", cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("the profiler options cannot be used: ") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "ran" not in done.stdout
