"""All that `trace` uses from the rest of the project: manifests, and files that are written whole or not at all."""

from __future__ import annotations

from verl_profiler_conf.capture.files import MANIFEST_SUFFIX, publish, temporary_name
from verl_profiler_conf.capture.manifest import Manifest
from verl_profiler_conf.core.window import TokenWindow

__all__ = ["MANIFEST_SUFFIX", "Manifest", "TokenWindow", "publish", "temporary_name"]
