"""How this package is installed: it is on no index, so that a message cannot name it to pip by its name alone."""

from __future__ import annotations

NAME = "verl-profiler-conf"


def pip_install(extra: str | None = None, *, version: str | None = None) -> str:
    """The command, with a place for what only the reader knows: where the wheel or the clone is. See docs/install.md.

    Args:
        extra: `report` or `remote`.
        version: where it has to be this one.
    """
    what = f"<wheel or clone of {NAME}{f' {version}' if version else ''}>"
    return f"pip install '{what}{f'[{extra}]' if extra else ''}'"
