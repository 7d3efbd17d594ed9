"""What Hydra discovers: one search path entry, so that `+profiler=...` is found in any app.

Hydra imports this module in every Hydra app of the environment, also in those that never profile. So it costs next to
nothing, prints nothing and never raises: a broken installation of ours must not break anybody's job. What went wrong
is kept for `verl-profiler doctor`, and logged where a profiler option is asked for.
"""

from __future__ import annotations

import logging
import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

PROVIDER = "verl_profiler_conf"

registration_error: Exception | None = None
"""Why the options' schemas and resolvers could not be registered; None when all is well."""

try:
    import verl_profiler_conf.launch.options  # noqa: F401  (its import registers them)
except Exception as error:
    registration_error = error


class VerlProfilerConfSearchPath(SearchPathPlugin):
    """Appends the package's config groups to every app's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if registration_error is not None and any("profiler" in argument for argument in sys.argv[1:]):
            # Hydra's own error will only say that a schema is missing
            logging.getLogger(PROVIDER).error("the profiler options cannot be used: %r", registration_error)
        search_path.append(provider=PROVIDER, path=f"pkg://{PROVIDER}.conf")
