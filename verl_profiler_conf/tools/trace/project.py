"""All that this package takes from the rest of the project: manifests, and files written whole or not at all."""

from __future__ import annotations

from verl_profiler_conf.manifest import SUFFIX, Manifest, publish, temporary_name

__all__ = ["SUFFIX", "Manifest", "publish", "temporary_name"]
