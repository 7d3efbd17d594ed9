"""`verl-profiler doctor`: find what would prevent a capture, before the job is launched.

Each check yields findings. A finding about something wrong says how to fix it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

from verl_profiler_conf.core.install import NAME, pip_install
from verl_profiler_conf.counters.plan import installed_version
from verl_profiler_conf.tools.finding import Finding
from verl_profiler_conf.tools.launch_checks import device_findings

PLUGIN = "hydra_plugins.verl_profiler_conf"


def examine() -> list[Finding]:
    """Run every check. A check that raises becomes a finding."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings.extend(check())
        except Exception as error:  # A broken installation is what this command has to report.
            name = check.__name__.replace("_", " ").strip()
            findings.append(Finding(name, "error", f"the check failed: {type(error).__name__}: {error}"))
    return findings


def _versions() -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("python", "ok", python)
    for name in (NAME, "hydra-core", "omegaconf"):
        found = installed_version(name)
        if found is None:
            yield Finding(
                name,
                "error",
                "not installed as a distribution",
                pip_install() if name == NAME else f"pip install {name}",
            )
        else:
            yield Finding(name, "ok", found)


def _discovery() -> Iterator[Finding]:
    """Without a discovered plugin, Hydra silently takes `+profiler=torch_window` for a plain text."""
    about = "discovery by Hydra"
    blockers = [path for path in _package_files() if path.is_file()]
    for path in blockers:
        owner = _owner(path)
        of = owner or "of no installed package"
        yield Finding(
            about,
            "error",
            f"{path} ({of}) makes hydra_plugins a regular package and hides other plugins",
            f"delete that file{f', or uninstall {owner}' if owner else ''}; hydra_plugins must have no __init__.py",
        )
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    names = {plugin.__module__ for plugin in Plugins.instance().discover(SearchPathPlugin)}
    if any(name.startswith(PLUGIN) for name in names):
        yield Finding(about, "ok", "the plugin is discovered")
        return
    if blockers:
        return  # They are findings already.
    if importlib.util.find_spec(PLUGIN) is None:
        yield Finding(about, "error", f"{PLUGIN} cannot be imported", pip_install())
        return
    yield Finding(
        about,
        "error",
        "the plugin can be imported, but Hydra's scan does not find it: an editable install through an import hook",
        "pip install . instead; or pip install -e . with this project's own setup.cfg, which asks for a .pth file",
    )


def _composition() -> Iterator[Finding]:
    from hydra import compose, initialize
    from hydra.core.global_hydra import GlobalHydra

    if GlobalHydra.instance().is_initialized():
        return
    with initialize(version_base=None, config_path=None):
        cfg = compose(overrides=["+profiler=torch_window"])
    if isinstance(cfg.profiler, str):
        yield Finding(
            "composition",
            "error",
            "+profiler=torch_window composes to a plain text: nothing would be profiled, without an error",
            "fix the discovery by Hydra, above",
        )
    else:
        yield Finding("composition", "ok", "+profiler=torch_window composes")


def _device() -> Iterator[Finding]:
    from verl_profiler_conf.capture.backends.detect import detect_device

    torch = installed_version("torch")
    if torch is None:
        yield Finding(
            "torch", "warning", "not installed here", "captures need torch in the process that runs the model"
        )
        return
    device = detect_device()
    yield Finding("torch", "ok", torch)
    yield Finding("device", "ok", device)
    if device == "cuda" and os.environ.get("NVTX_INJECTION64_PATH"):
        yield Finding(
            "device",
            "warning",
            "NVTX_INJECTION64_PATH is set: Kineto cannot subscribe to CUPTI, traces would lack kernels",
            "unset NVTX_INJECTION64_PATH unless you profile with nsys (profiler=nsys_window)",
        )


def _engines() -> Iterator[Finding]:
    for name, group, variable, everything in (
        ("vllm", "vllm.general_plugins", "VLLM_PLUGINS", None),
        ("sglang", "sglang.srt.plugins", "SGLANG_PLUGINS", None),
        ("verl", "verl.plugins", "VERL_USE_EXTERNAL_PLUGINS", "auto"),
    ):
        found = installed_version(name) or installed_version(f"{name}-cpu")
        if found is None:
            continue
        if not any(point.name == "verl_profiler_conf" for point in entry_points(group=group)):
            yield Finding(name, "error", f"{found}: no entry point in {group}", "reinstall verl-profiler-conf")
            continue
        allowed = os.environ.get(variable, everything)
        if allowed != everything and "verl_profiler_conf" not in [part.strip() for part in (allowed or "").split(",")]:
            yield Finding(
                name,
                "error",
                f"{found}: {variable}={allowed} keeps the hook out",
                f"add verl_profiler_conf to {variable}, or unset it",
            )
            continue
        yield Finding(name, "ok", f"{found}: the hook is registered")
    transformers = installed_version("transformers")
    if transformers is not None:
        yield Finding("transformers", "ok", transformers)


def _environment() -> Iterator[Finding]:
    from verl_profiler_conf.core.errors import ConfigError
    from verl_profiler_conf.core.settings import ENV_NAME, Settings

    text = os.environ.get(ENV_NAME)
    if text is None:
        return
    try:
        settings = Settings.from_json(text)
    except ConfigError as error:
        yield Finding(ENV_NAME, "error", str(error), f"fix it or unset {ENV_NAME}")
    else:
        windows = ", ".join(map(str, settings.windows))
        yield Finding(ENV_NAME, "ok", f"set: engines started from here capture tokens {windows}")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _versions,
    _discovery,
    _composition,
    _device,
    _engines,
    _environment,
    device_findings,
)


def _package_files() -> Iterator[Path]:
    for entry in sys.path:
        yield Path(entry or ".") / "hydra_plugins" / "__init__.py"


def _owner(path: Path) -> str | None:
    from importlib.metadata import distributions

    for distribution in distributions():
        for file in distribution.files or ():
            if file.name == "__init__.py" and Path(str(distribution.locate_file(file))) == path:
                return str(distribution.metadata["Name"])
    return None
