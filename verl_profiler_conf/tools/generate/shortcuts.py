"""Two things that a composition does over and over for nothing, left out while this package composes.

Half of a composition's time goes into them. Each stands in for one function of Hydra 1.3 or OmegaConf 2.3 that was read
for it, with the same result; on other releases, and outside of `shortcuts`, their own code runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from hydra._internal import defaults_list
from omegaconf import DictConfig, OmegaConf
from omegaconf.base import Box, Node

from verl_profiler_conf.schema.versions import HYDRA, OMEGACONF

_own_interpolation_map: Any = getattr(defaults_list, "_create_interpolation_map", None)


@contextmanager
def shortcuts() -> Iterator[None]:
    """In force for everything in this process that composes meanwhile."""
    with ExitStack() as stack:
        if OMEGACONF == (2, 3):
            stack.enter_context(_replaced(Box, "_re_parent", _re_parent))
        if HYDRA == (1, 3):
            stack.enter_context(_replaced(defaults_list, "_create_interpolation_map", _interpolation_map))
        yield


@contextmanager
def _replaced(owner: Any, name: str, function: Any) -> Iterator[None]:
    own = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, own)


def _re_parent(self: Box) -> None:
    """Sets the parent of every node below, and forgets the flags that were inherited.

    OmegaConf calls it on the whole config for each file that is merged in. Its own goes through three functions for
    each node, which import classes and check types.
    """
    content = self.__dict__["_content"]
    if isinstance(content, dict):
        children: Any = content.values()
    elif isinstance(content, list):
        children = content
    else:
        children = (content,) if isinstance(content, Node) else ()
    for child in children:
        if child is not None:
            state = child.__dict__
            state["_parent"] = self
            state["_flags_cache"] = None
            if "_content" in state:  # a Box; asking for the type costs more than all the rest
                _re_parent(child)


def _interpolation_map(overrides: Any, defaults_list: list[Any], self_added: bool) -> DictConfig:
    """What `${...}` in a defaults list can refer to: every choice made so far.

    Hydra makes one for each config file; it is looked at only where the file's own list has an interpolation.
    """
    if not any("${" in str(vars(default)) for default in defaults_list):
        return OmegaConf.create()
    made: DictConfig = _own_interpolation_map(overrides, defaults_list, self_added)
    return made
