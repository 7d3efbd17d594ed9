"""Stops a planned launch whose Hydra does not discover the plugin, so that planning never runs a job.

A copy of this file is the `sitecustomize` of the launch's processes. It may run in an environment without this package,
so it imports nothing but the standard library. Where Hydra is about to run a job, the plan's callback was not called.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NoReturn

VARIABLE = "VERL_PROFILER_CONF_PLAN"
MODULE = "hydra._internal.hydra"


def stop(*_: object, **__: object) -> NoReturn:
    """Write the report of this process and end it."""
    said = os.environ.get("RANK", "0")
    rank = int(said) if said.isdigit() else 0
    report = {"python": sys.executable, "argv": sys.argv, "rank": rank, "undiscovered": True, "jobs": []}
    Path(os.environ[VARIABLE], f"{rank:06d}-{os.getpid()}.json").write_text(json.dumps(report), encoding="utf-8")
    os._exit(0)


class Finder:
    """Wraps the loader of Hydra's module that runs jobs."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """The module's own spec, whose loader then replaces what starts a job."""
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run_module = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run_module(module)
                module.run_job = stop
                module.Plugins.instantiate_sweeper = stop

            vars(spec.loader)["exec_module"] = exec_module
        return spec


def run_next() -> None:
    """The `sitecustomize` that this one stands before."""
    here = Path(__file__).absolute().parent
    rest = [entry for entry in sys.path if Path(entry).absolute() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize" and VARIABLE in os.environ:
    sys.meta_path.insert(0, Finder())
    run_next()
