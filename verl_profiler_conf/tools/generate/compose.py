"""Composes configs with Hydra several times in one process, and reads each config file once.

Only public functions of Hydra and OmegaConf are called, so their code alone decides what a config means.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import hydra
from hydra import version
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, flag_override
from packaging.version import Version

from hydra_plugins.verl_profiler_conf import PROVIDER, VerlProfilerConfSearchPath
from verl_profiler_conf.tools.generate.file_memory import FileMemory

BASE_IS_GIVEN = Version(hydra.__version__) < Version("1.4.dev0")
"""Whether `version_base=None` has to be passed to Hydra. 1.4 takes the newest version without it, and warns of it."""


class Composer:
    """Composes configs as `--cfg job` shows them. Each file is read once in the life of the object."""

    def __init__(self) -> None:
        self._memory = FileMemory()

    def compose(
        self,
        folder: Path,
        config_name: str,
        overrides: tuple[str, ...] = (),
        *,
        plugin: bool = False,
        version_base: str | None = None,
    ) -> DictConfig:
        """The job's config, without the `hydra` node.

        Args:
            folder: of the configs.
            plugin: whether this package's groups are on the search path, wherever else it is installed.
            version_base: as in `hydra.main`.

        Raises:
            hydra.errors.HydraException: as from Hydra.
            omegaconf.errors.OmegaConfBaseException: as from Hydra.
        """
        with _groups_on_search_path(plugin), _hydra_for(folder, version_base), self._memory.in_use():
            config = hydra.compose(config_name, list(overrides), return_hydra_config=True)
        with writable(config):
            del config["hydra"]
        return config


@contextmanager
def writable(config: DictConfig) -> Iterator[None]:
    """Keys can be deleted, also where the config is of a frozen dataclass."""
    with flag_override(config, ["struct", "readonly"], [False, False]):
        yield


@contextmanager
def _hydra_for(folder: Path, version_base: str | None) -> Iterator[None]:
    """`hydra.compose` reads the folder in the body. A Hydra that runs in this process is restored afterwards."""
    singleton = getattr(version, "VersionBase", None)  # 1.4 no longer has it
    base = singleton.instance() if singleton else SimpleNamespace(version_base=None)
    base_before, hydra_before = base.version_base, GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    given: dict[str, Any] = {"version_base": version_base} if version_base is not None or BASE_IS_GIVEN else {}
    try:
        with hydra.initialize_config_dir(str(folder), **given):
            yield
    finally:
        base.version_base = base_before
        GlobalHydra.instance().hydra = hydra_before


@contextmanager
def _groups_on_search_path(plugin: bool) -> Iterator[None]:
    Plugins.instance().register(_Groups)  # repeatable
    _Groups.wanted = plugin
    try:
        yield
    finally:
        _Groups.wanted = None


class _Groups(SearchPathPlugin):
    """Adds this package's groups to the search path, or removes them. Hydra calls it after the plugins it has found."""

    wanted: ClassVar[bool | None] = None  # None: other code composes, and the search path stays as it is

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        entries = search_path.get_path()
        present = [entry for entry in entries if entry.provider == PROVIDER]
        if self.wanted is True and not present:
            VerlProfilerConfSearchPath().manipulate_search_path(search_path)
        elif self.wanted is False:
            for entry in present:
                entries.remove(entry)
