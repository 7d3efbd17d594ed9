"""What Hydra discovers: it adds the package's config groups to the search path of every Hydra app.

Hydra imports this module in every Hydra app of the environment, also in apps that never profile. It must therefore be
cheap, print nothing and never raise: a broken installation of this package must not break other jobs. An error is kept
for `verl-profiler doctor`, and logged when a profiler option is selected.
"""

from __future__ import annotations

import logging
import os
import re
import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

PROVIDER = "verl_profiler_conf"

CHOOSES_CONFIG = ("--config-", "-cp", "-cn", "-cd")
"""Beginnings of the arguments by which a launch chooses its primary config, which may be that of an earlier job."""

PLAIN_VALUES = re.compile(r"\+profiler(\.profile_token_\w+=|=\{.*profile_token_)")
"""An argument that appends our fields to a node without an option: beside one, Hydra refuses to append them."""

log = logging.getLogger(PROVIDER)

registration_error: Exception | None = None
"""Why the stand-ins of the schemas and resolvers could not be registered; None when they were."""

try:
    from verl_profiler_conf.launch.stand_ins import register

    register()
except Exception as error:
    registration_error = error


class VerlProfilerConfSearchPath(SearchPathPlugin):
    """Appends the package's config groups to every app's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if registration_error is not None and any("profiler" in argument for argument in sys.argv[1:]):
            # Hydra's own error says only that a schema is missing.
            log.error("the profiler options cannot be used: %r", registration_error)
        plain = next((argument for argument in sys.argv[1:] if PLAIN_VALUES.match(argument)), None)
        if plain is not None:
            log.warning(
                "%s sets a plain value and selects no option, so that it profiles nothing: select one as well, and set"
                " its fields without +: +profiler=torch_window profiler.profile_token_start=...",
                plain,
            )
        search_path.append(provider=PROVIDER, path=f"pkg://{PROVIDER}.conf")
        if any(argument.startswith(CHOOSES_CONFIG) for argument in sys.argv[1:]):
            _select_saved_options(search_path)
        if "VERL_PROFILER_CONF_PLAN" in os.environ:  # set by `verl-profiler plan`: the launch ends with a report
            from verl_profiler_conf.launch.planning import add_plan_callback

            add_plan_callback()


def _select_saved_options(search_path: ConfigSearchPath) -> None:
    try:
        from verl_profiler_conf.launch.rerun import select_saved_options

        select_saved_options(search_path, sys.argv[1:])
    except Exception as error:
        log.warning("options of a saved config cannot be selected again: %r", error)
