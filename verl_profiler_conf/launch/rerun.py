"""Reruns from a saved config: `--config-path RUN/.hydra --config-name config`.

Hydra saves a job's config without types and without callbacks, so a rerun would not profile. Where a launch's primary
config is such a file, its options are selected again at the places where they were, before the file is merged.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from verl_profiler_conf.schema.nodes import find_windows
from verl_profiler_conf.schema.register import ITERATIONS

GROUP = "/profiler@_global_."
"""The group with an absolute place, as an entry of a defaults list."""


def select_saved_options(search_path: ConfigSearchPath, arguments: Sequence[str]) -> None:
    """Add the options of a saved primary config to Hydra's own defaults list, which comes before the app's."""
    defaults = ConfigStore.instance().repo["hydra"]["config.yaml"].node.defaults
    for entry in [entry for entry in defaults if _is_ours(entry)]:
        defaults.remove(entry)  # of an earlier launch in this process
    for file in _primary_configs(search_path, arguments):
        text = file.read_text(encoding="utf-8")
        if ITERATIONS in text:
            for node in find_windows(OmegaConf.create(text)):
                defaults.append({f"{GROUP}{node.path}": node.option})
            return


def _is_ours(entry: Any) -> bool:
    return any(str(key).startswith(GROUP) for key in entry)


def _primary_configs(search_path: ConfigSearchPath, arguments: Sequence[str]) -> Iterator[Path]:
    """Files that can be the primary config. Its name is in the app's code where it is not among the arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn", default="config")
    known, _ = parser.parse_known_args(list(arguments))
    name = known.config_name.removesuffix(".yaml")
    main = [entry.path for entry in search_path.get_path() if entry.provider == "main"]
    for folder in [*main, known.config_dir]:
        if folder and "://" not in folder.removeprefix("file://"):
            file = Path(folder.removeprefix("file://"), f"{name}.yaml")
            if file.is_file():
                yield file
