"""Flattened reference configs: each is a config as Hydra composes it, in one file to read and to review.

A spec file lists the configs, their overrides, and the files. `write` brings the files up to date. `check` says how
they differ from what they should be. All configs are composed in one process, and nothing is written before that is
done.
"""

from verl_profiler_conf.tools.generate.files import check, render, write
from verl_profiler_conf.tools.generate.spec import Entry, SpecError, read_spec

__all__ = ["Entry", "SpecError", "check", "read_spec", "render", "write"]
