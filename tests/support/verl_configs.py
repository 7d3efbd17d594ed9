"""verl's configs without verl: prints a folder to put on PYTHONPATH, in which `verl/` has config files and its version.

    configs=$(python tests/support/verl_configs.py)
    PYTHONPATH=$configs verl-profiler generate --check verl_profiler_conf/tools/generate/verl.yaml

verl itself needs gigabytes.
"""

from __future__ import annotations

import sys

from released import released

VERSION = "0.9.1"
"""Whose reference is committed."""

FILES = ("*.yaml", "verl/version/version")

if __name__ == "__main__":
    try:
        print(released("verl", VERSION, *FILES))
    except RuntimeError as error:
        sys.exit(str(error))
