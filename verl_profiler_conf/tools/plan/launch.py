"""Runs a launch up to the point where its task would start, and brings back what its processes have reported."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_profiler_conf.launch.composition import INSTEAD
from verl_profiler_conf.launch.planning import PLAN_NAME
from verl_profiler_conf.tools.plan.processes import run
from verl_profiler_conf.tools.plan.reach import never_starts_hydra

UNDISCOVERED = (
    "Hydra does not discover the plugin in this Python, so that +profiler=torch_window would be a plain text and"
    " nothing would be profiled: run `{python} -m verl_profiler_conf.tools.cli doctor`, or install verl-profiler-conf"
    " there; +profiler@profiler=torch_window fails loudly instead"
)
LEFT = "; its folder was made, and is left: {folder}"
WITHOUT_HYDRA = (
    "; for a launcher without Hydra, set VERL_PROFILER_CONF in its environment, or call"
    " verl_profiler_conf.tools.plan.plan(cfg)"
)
NO_HYDRA = "the launch ended with status {code}, and no Hydra app started in it: its code has run" + WITHOUT_HYDRA
NEVER_HYDRA = "{script} imports no Hydra, and neither does any module beside it: nothing was run" + WITHOUT_HYDRA
HINTS = (
    (r"Key '\w+' not in '(\w+)'", "this app's config is a dataclass: write {instead} instead of +profiler=..."),
    (
        r"Could not (find|load) '?(profiler/|hydra/callbacks/profiler)",
        "is verl-profiler-conf installed there?",
    ),
    (
        r"Cannot merge DictConfig with ListConfig",
        "if this app has a list at profiler: write +profiler@window=torch_window window.profile_token_start=...",
    ),
    (r"Could not override 'profiler", "this app has no group profiler in its defaults list: write +profiler=..."),
    (r"Multiple values for profiler", "this app selects an option already: write profiler=... without +"),
)
"""What Hydra says of a composition that fails -> what to write instead."""


def run_launch(command: Sequence[str], *, seconds: float) -> dict[str, Any]:
    """The report of a launch: `jobs`, and `problems` where there is none to be had.

    Args:
        command: as it stands after `--`.
        seconds: after which the launch's processes are ended.

    Raises:
        CannotRunError: there is no such command.
    """
    script = never_starts_hydra(command)
    if script is not None:
        return {"jobs": [], "problems": [NEVER_HYDRA.format(script=script)]}
    with tempfile.TemporaryDirectory(prefix="verl-profiler-plan-") as folder:
        reports, site = Path(folder, "reports"), Path(folder, "site")
        reports.mkdir()
        site.mkdir()
        shutil.copyfile(Path(__file__).with_name("guard.py"), site / "sitecustomize.py")
        paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            PLAN_NAME: str(reports),
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        mark = f"{PLAN_NAME}={reports}"
        code, text = run(command, environment, Path(folder, "output"), seconds, mark=mark)
        found = [json.loads(path.read_bytes()) for path in sorted(reports.glob("*.json"))]
    return _judge(found, code, text, seconds)


def _judge(found: list[dict[str, Any]], code: int | None, text: str, seconds: float) -> dict[str, Any]:
    if not found:
        return {"jobs": [], "problems": [*_failure(code, text, seconds)]}
    first = min(found, key=lambda each: (each["rank"], not each["jobs"]))
    report = {**first, "processes": len(found), "problems": []}
    if first.get("undiscovered"):
        left = LEFT.format(folder=first["left"]) if first.get("left") else ""
        report["problems"].append(UNDISCOVERED.format(python=first["python"]) + left)
    elif not first["jobs"]:
        report["problems"].append("rank 0 has reported nothing")
    return report


def _failure(code: int | None, text: str, seconds: float) -> list[str]:
    if code is None:
        return [
            f"no Hydra app has started its job within {seconds:g} s, and the launch was ended, with all that it had"
            " started; until then its code has run as always. --timeout gives it more" + WITHOUT_HYDRA
        ]
    if code == 0:
        return [NO_HYDRA.format(code=code)]
    lines = [line for line in text.splitlines() if line.strip()]
    hint = next((hint for pattern, hint in HINTS if re.search(pattern, text)), None)
    problems = [f"the launch ended with status {code} before its job started: {' / '.join(lines[-4:])}"]
    return problems + ([hint.format(instead=f"{INSTEAD}")] if hint else [])
