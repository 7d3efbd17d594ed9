"""What is known of a job from its composed config, as plain values: the content of a plan.

Works in a launch, under the callback, and on a config of compose(). Nothing is started, written or left behind.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_profiler_conf.capture.backends.detect import detect_device, torch_built_for
from verl_profiler_conf.capture.files import stem
from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.place import label_of
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.counters.plan import counter_plan, installed_version
from verl_profiler_conf.engines.torch_rank import torch_place
from verl_profiler_conf.launch.checking import Checked, check_config
from verl_profiler_conf.launch.composition import INSTEAD, composition_loss
from verl_profiler_conf.launch.folder import local_folder, open_remote, write_problem
from verl_profiler_conf.launch.provenance import read_contributions
from verl_profiler_conf.schema.nodes import COMPUTED, NONE, OPTION, WindowNode, find_windows
from verl_profiler_conf.schema.overrides import written_overrides
from verl_profiler_conf.schema.register import OPTIONS
from verl_profiler_conf.verl.preset.facts import ENGINE_KEY
from verl_profiler_conf.verl.preset.launch_config import TOOLS, read_launch

ENGINES = ("vllm", "sglang", "transformers", "tensorrt_llm", "verl")
HOOKS = {
    "vllm": ("vllm.general_plugins", "VLLM_PLUGINS"),
    "sglang": ("sglang.srt.plugins", "SGLANG_PLUGINS"),
    "verl": ("verl.plugins", "VERL_USE_EXTERNAL_PLUGINS"),
}
"""Engine -> group of its entry points, and the variable that says which of them it loads."""

ENTRY_POINT = "verl_profiler_conf"
SUFFIXES = {"npu_window": "_ascend_pt/", "torch_memory": ".pickle", "nsys_window": ""}
TRACE = ".pt.trace.json.gz"


def describe(config: DictConfig) -> dict[str, Any]:
    """Everything that is known of a job, as plain values. `problems` is empty where it would start."""
    report: dict[str, Any] = {"problems": [], "warnings": [], "option": None, "spelling": None}
    node = next((each for each in find_windows(config) if each.option != NONE), None)
    loss = composition_loss(config) if "hydra" in config else None
    if loss is not None:
        report["problems"].append(loss)
    if node is None:
        if loss is None:
            report["spelling"] = spelling(config)
            report["problems"].append(f"no option is selected: nothing is profiled; write {report['spelling']}")
        return report
    report |= {"option": node.option, "node": node.path, "device": detect_device(), "torch": torch_built_for()}
    report["fields"] = [dict(zip(("key", "value", "from"), row, strict=True)) for row in origins(config, node)]
    with _Warnings() as warnings:
        try:
            checked = check_config(config)
        except ConfigError as error:
            report["problems"].append(str(error))
            checked = None
    report["warnings"] = warnings.lines
    if checked is not None and checked.settings is not None:
        report |= _of_settings(config, node, checked, report)
    return report


def _of_settings(config: DictConfig, node: WindowNode, checked: Checked, report: dict[str, Any]) -> dict[str, Any]:
    settings = checked.settings
    if settings is None:
        return {}
    run_dir = OmegaConf.select(config, "hydra.runtime.output_dir", throw_on_missing=False)
    folder = local_folder(settings, run_dir)
    settings = replace(settings, save_path=str(folder))
    found: dict[str, Any] = {
        "enable": settings.enable,
        "windows": [[window.start, window.end] for window in settings.windows],
        "device": detect_device(settings.device),
        "save_path": str(folder),
        "run_dir": run_dir,
        "max_iterations": settings.max_iterations,
        "max_captures": settings.max_captures,
        "contents": list(settings.contents),
        "engine": settings.engine.get("name"),
        "environment": settings.to_json(),
        "engines": list(engines(settings)),
    }
    problem = None
    try:
        remote = open_remote(checked.settings or settings, f"{node.prefix}save_path")
        found["remote"] = None if remote is None else remote.url
    except ConfigError as error:
        report["problems"].append(str(error))
    if settings.enable:
        problem = write_problem(folder, keep=False)
    if problem is not None:
        report["problems"].append(f"{node.prefix}save_path={str(folder)!r}: cannot be written: {problem}")
    world = torch_place()[1]
    found["ranks"] = list(range(world)) if settings.all_ranks and world > 1 else list(settings.ranks)
    found["all_ranks"] = settings.all_ranks
    if checked.asked is not None:
        asked = checked.asked
        found["steps"], found["replicas"] = list(asked.steps), sorted(set(asked.replicas.values()))
        found["captures"] = len(list(asked.captures()))
        found["owners"] = dict(asked.replicas)
    else:
        found["captures"] = len(found["ranks"]) * len(settings.windows) * (settings.max_captures or 1)
    if node.option in TOOLS:
        launch = read_launch(config, node)
        found["verl_save_path"] = launch.facts.save_path
        found["rollout"] = launch.values[ENGINE_KEY]
        found["replica_size"] = launch.facts.replica_size
    found["files"] = list(files(settings, found)) if settings.enable else []
    return {**found, "problems": report["problems"]}


def engines(settings: Settings) -> Iterator[dict[str, Any]]:
    """The engines of this environment, and how each would be windowed. None of them is imported."""
    for name in ENGINES:
        version = installed_version(name)
        if version is None:
            continue
        blocked = None
        if name in HOOKS:
            blocked = kept_out(name)
        counters = None
        if name in ("vllm", "sglang", "tensorrt_llm"):
            counters = "; ".join(str(counter_plan(settings, name, window=window)) for window in settings.windows)
        how = "hook"
        if blocked is not None or settings.mapping == "iterations" or name == "tensorrt_llm":
            how = "counters" if counters is not None else "none"
        yield {"engine": name, "version": version, "how": how, "why": blocked, "counters": counters}


def kept_out(engine: str) -> str | None:
    """Why an engine would not load the hook; None: it does."""
    group, variable = HOOKS[engine]
    if not any(point.name == ENTRY_POINT for point in entry_points(group=group)):
        return f"no entry point in {group}: reinstall verl-profiler-conf"
    return kept_out_by(engine, os.environ.get(variable))


def kept_out_by(engine: str, allowed: str | None) -> str | None:
    """Why the value of an engine's variable keeps the hook out, and what to do; None: it does not."""
    if allowed is None or (engine == "verl" and allowed == "auto"):
        return None
    if ENTRY_POINT in [part.strip() for part in allowed.split(",")]:
        return None
    return f"{HOOKS[engine][1]}={allowed} keeps the hook out: add {ENTRY_POINT} to it, or unset it"


def files(settings: Settings, found: dict[str, Any]) -> Iterator[str]:
    """Names of the traces, with a placeholder for what only the run knows."""
    names = [each["engine"] for each in found["engines"] if each["how"] == "hook" and each["engine"] != "verl"]
    named = found.get("rollout") or settings.engine.get("name")
    places: list[tuple[int, str | None]] = [(rank, None) for rank in found["ranks"]]
    if found.get("owners"):
        size = found["replica_size"]
        steps = found["steps"]
        owners = [(rank - replica * size, replica) for rank, replica in found["owners"].items()]
        places = [(rank, label_of(step, replica)) for step in steps for rank, replica in owners] or [
            (rank, None) for rank, _ in owners
        ]
    for engine in [named] if named not in (None, "auto") else names or ["loop"]:
        for window in settings.windows:
            for rank, label in places:
                name = stem(str(engine), window, rank, 0, label).replace("_pid0", "_pid<pid>", 1)
                yield f"{name}_<n>{SUFFIXES.get(settings.option, TRACE)}"


def origins(config: DictConfig, node: WindowNode) -> Iterator[tuple[str, Any, str]]:
    """Each field of a window node: key, resolved value, and where that value comes from."""
    contributions = read_contributions(config, node.path) or []
    written = written_overrides(config, "task") or []
    for key in map(str, node.node):
        if key in (COMPUTED, OPTION):
            continue
        path = node.prefix + key
        given = [text for text in written if text.lstrip("+~").startswith((f"{path}=", f"{path}."))]
        holders = [each for each in contributions if key in each.keys]
        if given:
            origin = f"command line: {given[-1]}"
        elif not holders:
            origin = "unknown"
        elif holders[-1].is_option:
            origin = f"default of {node.option}"
        else:
            origin = f"config {holders[-1].config}"
        try:
            value = node.plain(key)
        except ConfigError as error:
            value = f"cannot be resolved: {error}"
        yield path, value, origin


def spelling(config: DictConfig, option: str = "torch_window") -> str:
    """How this app selects an option: by the shape of its primary config."""
    choices = OmegaConf.select(config, "hydra.runtime.choices") or {}
    if any(str(group) == "profiler" and (choice is None or choice in OPTIONS) for group, choice in choices.items()):
        return f"profiler={option}"
    if OmegaConf.get_type(config) is not dict and "profiler" not in config:
        return INSTEAD if option == "torch_window" else f"{INSTEAD} profiler={option}"
    if config.get("profiler") is not None:
        return f"+profiler@window={option}"
    return f"+profiler={option}"


class _Warnings(logging.Handler):
    """Collects what the checks warn of, instead of logging it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self._logger = logging.getLogger("verl_profiler_conf")

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() not in self.lines:
            self.lines.append(record.getMessage())

    def __enter__(self) -> _Warnings:
        self._was = self._logger.propagate
        self._logger.addHandler(self)
        self._logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = self._was
