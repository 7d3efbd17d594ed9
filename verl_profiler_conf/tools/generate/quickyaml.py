"""YAML read and written through libyaml wherever that makes no difference to OmegaConf's own way.

OmegaConf 2.3 reads and writes with PyYAML's Python code: reading costs fifteen times what libyaml takes, writing three
times. 2.4 uses libyaml itself. The two scanners disagree on a few things, each found by comparing them on random
texts; a file that holds one of those goes the old way, and so does one that libyaml refuses.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_profiler_conf.schema.versions import OMEGACONF

_LIBYAML = OMEGACONF < (2, 4) and hasattr(yaml, "CSafeLoader")

# What libyaml takes otherwise wherever it stands, comments included: tabs, line breaks of Unicode, a byte order mark.
_DISPUTED_ANYWHERE = re.compile("[\t\r\x85\u2028\u2029\ufeff]")

# And outside of comments: tags, `?` in a flow collection, headers of block scalars, directives.
_DISPUTED = re.compile("[!?|>%]")

# Comments that fill a line, and OmegaConf's mark of a mandatory value.
_UNDISPUTED = re.compile(r"^ *#.*$|: +\?\?\? *$", re.MULTILINE)


def load(path: Path) -> DictConfig | ListConfig:
    """`OmegaConf.load(path)`."""
    if _LIBYAML:
        text = path.read_text(encoding="utf-8")
        if not _DISPUTED_ANYWHERE.search(text) and not _DISPUTED.search(_UNDISPUTED.sub("", text)):
            try:
                content = yaml.load(text, Loader=_loader())  # noqa: S506 - OmegaConf's safe loader, on libyaml's parser
            except yaml.YAMLError:
                pass  # it is read again, for PyYAML's verdict and words
            else:
                if content is None or isinstance(content, (dict, list)):
                    return OmegaConf.create({} if content is None else content)
    return OmegaConf.load(path)


def dump(config: DictConfig) -> str:
    """`OmegaConf.to_yaml(config)`."""
    if _LIBYAML:
        content = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
        text: str = yaml.dump(content, default_flow_style=False, allow_unicode=True, sort_keys=False, Dumper=_dumper())
        # libyaml escapes more of Unicode than PyYAML does, and writes an empty key on one line
        if text.isascii() and "\\" not in text and "'':" not in text:
            return text
    return OmegaConf.to_yaml(config)


@cache
def _loader() -> Any:
    """OmegaConf's loader (its rules for numbers, its refusal of duplicate keys) on libyaml's parser."""
    from omegaconf._utils import get_yaml_loader
    from yaml._yaml import CParser

    own = get_yaml_loader()

    def init(self: Any, stream: str) -> None:
        CParser.__init__(self, stream)
        yaml.constructor.SafeConstructor.__init__(self)
        yaml.resolver.Resolver.__init__(self)

    return type("Loader", (CParser, own), {"__init__": init})


@cache
def _dumper() -> Any:
    """OmegaConf's dumper (its quoting of what would read as another type) on libyaml's emitter."""
    from omegaconf._utils import get_omega_conf_dumper

    own = get_omega_conf_dumper()
    representers = {
        "yaml_representers": own.yaml_representers,
        "yaml_multi_representers": own.yaml_multi_representers,
    }
    return type("Dumper", (yaml.CDumper,), representers)
