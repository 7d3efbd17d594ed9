"""Remembers config files: several compositions spend a third of their time on reading the same YAML files again."""

from __future__ import annotations

import inspect
import io
import os
import pickle
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from omegaconf import OmegaConf


class FileMemory:
    """What `OmegaConf.load` has read so far, by file."""

    def __init__(self) -> None:
        self._pickles: dict[Hashable, bytes] = {}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """In the body, `OmegaConf.load` reads each file once, in the whole process. It returns a copy each time, since
        Hydra changes what it gets. Anything but an open text file is read as usual."""
        own = inspect.getattr_static(OmegaConf, "load")
        read = OmegaConf.load

        def load(file_: Any, *args: Any, **kwargs: Any) -> Any:
            identity = None if args or kwargs else _identity(file_)
            if identity in self._pickles:
                return pickle.loads(self._pickles[identity])  # noqa: S301 - pickled below, in this process
            config = read(file_, *args, **kwargs)
            if identity is not None:
                with suppress(Exception):  # a value of a class that pickle cannot name: the file is read again
                    self._pickles[identity] = pickle.dumps(config, pickle.HIGHEST_PROTOCOL)
            return config

        setattr(OmegaConf, "load", staticmethod(load))  # noqa: B010 - mypy refuses the assignment
        try:
            yield
        finally:
            setattr(OmegaConf, "load", own)  # noqa: B010


def _identity(file_: Any) -> Hashable:
    """Identifies the file and its content by what the file system knows. None where that is not possible, and for a
    file that was read in part."""
    if not isinstance(file_, io.TextIOWrapper):
        return None
    try:
        if file_.tell() != 0:
            return None
        state = os.fstat(file_.fileno())
    except OSError:  # in memory, in an archive, a pipe
        return None
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, file_.encoding
