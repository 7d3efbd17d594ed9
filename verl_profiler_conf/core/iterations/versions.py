"""Tables of versions: which row holds for a given version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from packaging.version import InvalidVersion, Version

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Release:
    """A version, and what had to be taken for granted to have one."""

    version: Version
    assumes: tuple[str, ...] = ()


def release(text: str | None, *, engine: str, oldest: str, newest: str) -> Release:
    """The version to count by. Unknown, unreadable or newer than any that was read: counts as the newest.

    A version that cannot be read (`dev`, a build from a fork) is no reason to stop a job, so it is never refused.
    """
    if text is None:
        return Release(Version(newest), (f"{engine} counts as {newest} does (version unknown)",))
    try:
        version = Version(text)
    except InvalidVersion:
        return Release(Version(newest), (f"{engine} {text!r} counts as {newest} does",))
    if version.release > Version(newest).release:
        return Release(version, (f"{engine} {text} still counts as {newest} does",))
    if version < Version(oldest):
        return Release(version, (f"{engine} {text} counts as {oldest} does",))
    return Release(version)


def since(table: Sequence[tuple[str, Entry]], version: Version) -> Entry:
    """The last entry that begins at or before `version`; the first one for anything older. Entries ascend."""
    found = table[0][1]
    for begins, entry in table[1:]:
        if version >= Version(begins):
            found = entry
    return found
