"""Stops a planned launch whose Hydra does not call the plan's callback, so that planning never runs a job.

A copy of this file is the `sitecustomize` of the launch's processes. It may run in an environment without this package,
so it imports nothing but the standard library. Where Hydra is about to run a job, the plan's callback was not called:
the plugin is not discovered. Should a release of Hydra start its jobs by other names, then the task function that
`@hydra.main` is given is stopped instead. That is later, when the run's folder has been made.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NoReturn

VARIABLE = "VERL_PROFILER_CONF_PLAN"


def stop(*_: object, **details: object) -> NoReturn:
    """Write the report of this process and end it."""
    rank_text = os.environ.get("RANK", "0")
    rank = int(rank_text) if rank_text.isdigit() else 0
    report = {"python": sys.executable, "argv": sys.argv, "rank": rank, "undiscovered": True, "jobs": []}
    report["left"] = details.get("left")
    Path(os.environ[VARIABLE], f"{rank:06d}-{os.getpid()}.json").write_text(json.dumps(report), encoding="utf-8")
    os._exit(0)


def stop_jobs(module: Any) -> None:
    """Replace what starts a job, and what starts a sweep."""
    if hasattr(module, "run_job"):
        module.run_job = stop
    plugins = getattr(module, "Plugins", None)
    if hasattr(plugins, "instantiate_sweeper"):
        vars_of_class: Any = plugins
        vars_of_class.instantiate_sweeper = stop


def stop_tasks(module: Any) -> None:
    """Replace the task function of `@hydra.main`."""
    main: Callable[..., Any] | None = getattr(module, "main", None)
    if main is None:
        return

    @functools.wraps(main)
    def guarded(*arguments: Any, **named: Any) -> Callable[[Any], Any]:
        decorate = main(*arguments, **named)

        def decorator(task: Any) -> Any:
            @functools.wraps(task)
            def never(*_: object, **__: object) -> NoReturn:
                stop(left=_run_folder())

            return decorate(never)

        return decorator

    module.main = guarded


def _run_folder() -> str:
    try:
        from hydra.core.hydra_config import HydraConfig

        return str(HydraConfig.get().runtime.output_dir)
    except Exception:
        return str(Path.cwd())


GUARDED: dict[str, Callable[[Any], None]] = {"hydra._internal.hydra": stop_jobs, "hydra.main": stop_tasks}
"""Module of Hydra -> what is done to it when it has been imported."""


class Finder:
    """Wraps the loaders of Hydra's modules that run jobs."""

    def __init__(self) -> None:
        self._waiting = dict(GUARDED)

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """The module's own spec, whose loader then replaces what starts a job."""
        change = self._waiting.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run_module = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run_module(module)
                change(module)

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
