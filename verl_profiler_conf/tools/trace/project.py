"""All that this package takes from the rest of the project: manifests, and files written whole or not at all."""

from __future__ import annotations

from verl_profiler_conf.capture.files import MANIFEST_SUFFIX as SUFFIX
from verl_profiler_conf.capture.files import publish, temporary_name
from verl_profiler_conf.capture.manifest import Manifest

__all__ = ["SUFFIX", "Manifest", "publish", "temporary_name"]
