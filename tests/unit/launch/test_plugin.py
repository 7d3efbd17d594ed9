"""The module that Hydra imports in every app: it must cost nothing, say nothing and break nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

APP = """\
import hydra

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    print("ran")

main()
"""

# what a broken installation looks like from the inside: the module with the schemas cannot be imported
BROKEN = """\
import sys
sys.modules["verl_profiler_conf.launch.options"] = None
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


def test_schemas_are_registered_by_it(tmp_path: Path) -> None:
    done = run("-c", "import hydra_plugins.verl_profiler_conf as p; print(p.registration_error)", cwd=tmp_path)
    assert done.stdout == "None\n", done.stderr


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


def test_broken_installation_leaves_other_apps_alone(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    done = run("-c", BROKEN, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")


def test_broken_installation_is_said_where_the_option_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    done = run("-c", BROKEN, "+profiler=torch_window", cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("the profiler options cannot be used: ") == 1, done.stderr
    assert "ran" not in done.stdout
