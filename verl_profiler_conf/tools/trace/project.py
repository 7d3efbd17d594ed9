"""All that this package takes from the rest of the project: manifests, and files written whole or not at all."""

from __future__ import annotations

from verl_profiler_conf.manifest import SUFFIX as MANIFEST_SUFFIX
from verl_profiler_conf.manifest import Manifest, publish, temporary_name
from verl_profiler_conf.window import TokenWindow

__all__ = ["MANIFEST_SUFFIX", "Manifest", "TokenWindow", "publish", "temporary_name"]
