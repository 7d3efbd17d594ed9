"""Hydra's composition, several times in one process, with each config file read once.

What a config means is decided by Hydra's own code throughout. Three things are done here that it does the dear way when
it composes several times: reading (half of a composition is reading the same YAML files again), copying nodes, and what
is in `shortcuts`.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from packaging.version import Version

from hydra_plugins.verl_profiler_conf import PROVIDER, VerlProfilerConfSearchPath
from verl_profiler_conf.tools.generate import quickyaml
from verl_profiler_conf.tools.generate.shortcuts import shortcuts

T = TypeVar("T")

BASE_IS_GIVEN = Version(hydra.__version__) < Version("1.4.dev0")
"""Whether Hydra wants to be told that `version_base` is None; 1.4 takes the newest, and warns of whoever says so."""


class Composer:
    """Composes configs as `--cfg job` shows them. What was read is remembered for the life of the object, so that
    it is for one run over files that do not change."""

    def __init__(self) -> None:
        self._loaders: dict[tuple[Path, bool], _Loader] = {}

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
        with _base(version_base), shortcuts():
            if (folder, plugin) not in self._loaders:
                self._loaders[folder, plugin] = _Loader(_search_path(folder, plugin=plugin))
            config = self._loaders[folder, plugin].load_configuration(
                config_name=config_name, overrides=list(overrides), run_mode=RunMode.RUN
            )
        with open_dict(config):
            del config["hydra"]
        return config


@contextmanager
def _base(version_base: str | None) -> Iterator[None]:
    singleton = version.VersionBase.instance()
    before = singleton.version_base
    if version_base is not None or BASE_IS_GIVEN:
        version.setbase(version_base)
    try:
        yield
    finally:
        singleton.version_base = before


def _search_path(folder: Path, *, plugin: bool) -> ConfigSearchPath:
    search_path = create_config_search_path(str(folder))
    entries = search_path.get_path()
    ours = [entry for entry in entries if entry.provider == PROVIDER]
    if plugin and not ours:  # Hydra did not discover it
        schema = entries.pop()  # has to stay the last
        VerlProfilerConfSearchPath().manipulate_search_path(search_path)
        entries.append(schema)
    elif not plugin:
        for entry in ours:
            entries.remove(entry)
    return search_path


class _Loader(ConfigLoaderImpl):
    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = _Memory(config_search_path)

    @staticmethod
    def _embed_result_config(ret: ConfigResult, package_override: str | None) -> ConfigResult:
        """Hydra's own, which copies the nodes into their package, but with a copy that costs a sixth."""
        package = ret.header["package"] if package_override is None else package_override
        if not package:
            return ret
        embedded = OmegaConf.create({}, flags={"no_deepcopy_set_nodes": True})
        OmegaConf.update(embedded, package, _copier(ret.config)(), merge=False)
        embedded._set_flag("no_deepcopy_set_nodes", None)
        return dataclasses.replace(ret, config=embedded)


class _Memory(ConfigRepository):
    """Reads each config once, from file or wherever, and gives out copies: Hydra merges what it gets into the result,
    so that the same nodes must not be given out twice."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        self._read: dict[str, Callable[[], ConfigResult | None]] = {}
        super().__init__(config_search_path)

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        self._read = {}  # by name, and names mean something else on another path (hydra.searchpath)
        super().initialize_sources(config_search_path)
        self.sources = [_quick(source) for source in self.sources]

    def load_config(self, config_path: str) -> ConfigResult | None:
        if config_path not in self._read:
            self._read[config_path] = _copier(super().load_config(config_path))
        return self._read[config_path]()

    def __deepcopy__(self, memo: object) -> _Memory:
        # Hydra copies its repository for each composition; the copy may get other sources, but shares what was read
        twin = copy.copy(self)
        twin.sources = list(self.sources)
        return twin


def _copier(original: T) -> Callable[[], T]:
    """Makes copies. Unpickling costs a sixth of a deep copy."""
    try:
        return partial(pickle.loads, pickle.dumps(original, pickle.HIGHEST_PROTOCOL))
    except Exception:  # a schema in ConfigStore may be of a class that pickle cannot name
        return partial(copy.deepcopy, original)


def _quick(source: ConfigSource) -> ConfigSource:
    # by name: Hydra runs its plugin modules again, and then has classes of its own
    replacements = {kind.__bases__[0].__qualname__: kind for kind in (_Files, _Package)}
    kind = replacements.get(type(source).__qualname__)
    return source if kind is None else kind(source.provider, f"{source.scheme()}://{source.path}")


class _Files(FileConfigSource):
    """Hydra's folder of configs, read through `quickyaml`."""

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(os.path.realpath(Path(self.path, self._normalize_file_name(config_path))))
        if not path.exists():
            raise ConfigLoadError(f"Config not found : {path}")
        return _result(self, path)


class _Package(ImportlibResourcesConfigSource):
    """Hydra's package of configs, read through `quickyaml` where it is a folder."""

    def _read_config(self, res: Any) -> ConfigResult:
        return _result(self, res) if isinstance(res, Path) else super()._read_config(res)


def _result(source: ConfigSource, path: Path) -> ConfigResult:
    with path.open(encoding="utf-8") as file:
        header = ConfigSource._get_header_dict(file.read(512))
    return ConfigResult(
        config=quickyaml.load(path), path=f"{source.scheme()}://{source.path}", provider=source.provider, header=header
    )
