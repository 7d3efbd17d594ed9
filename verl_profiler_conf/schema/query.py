"""Reports a wrong setting in one line when Hydra only prints the config: `--cfg job --resolve`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

from hydra.core.global_hydra import GlobalHydra

from verl_profiler_conf.core.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


def in_one_line(resolver: Callable[P, R]) -> Callable[P, R]:
    """Make a resolver end such a query with one line.

    OmegaConf wraps what a resolver raises, and Hydra prints it with a traceback of 157 lines. Neither of them catches
    SystemExit. It is raised in a query only, which never runs the app. Elsewhere it would end the user's process.
    """

    @wraps(resolver)
    def resolve(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return resolver(*args, **kwargs)
        except ConfigError as error:
            if is_query(sys.argv[1:]):
                raise SystemExit(str(error)) from None
            raise

    return resolve


def is_query(arguments: Sequence[str]) -> bool:
    """Whether this process only prints its resolved config: `--cfg job --resolve`."""
    asks = any(argument in ("--cfg", "-c") or argument.startswith("--cfg=") for argument in arguments)
    return asks and "--resolve" in arguments and GlobalHydra.instance().is_initialized()
