"""Flattened reference configs: what a config is once Hydra has composed it, as one file to read and to review.

A spec file says which configs, with which overrides, into which files. `write` brings the files up to date, `check`
says how they differ from what they should be. All are composed in one process, and nothing is written before all are.
"""

from verl_profiler_conf.tools.generate.files import check, render, write
from verl_profiler_conf.tools.generate.spec import Entry, SpecError, read_spec

__all__ = ["Entry", "SpecError", "check", "read_spec", "render", "write"]
