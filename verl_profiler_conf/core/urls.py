"""Places that are no local folder: URLs such as `s3://bucket/traces`."""

from __future__ import annotations

import re

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::[A-Za-z][A-Za-z0-9+.-]*)*://")
"""Two letters at least: one letter is a drive of Windows. `::` chains file systems, as fsspec writes it."""

_ONE_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")

LOCAL = "file://"


def is_url(text: str) -> bool:
    """Whether a text is a URL of another place than this machine's own folders."""
    return _SCHEME.match(text) is not None and not text.lower().startswith(LOCAL + "/")


def lacks_a_slash(text: str) -> bool:
    """Whether a text looks like a URL with one slash (`s3:/bucket`, `file:/traces`). As a path it is a folder `s3:`."""
    return _ONE_SLASH.match(text) is not None


def local_path(text: str) -> str:
    """A local folder as a plain path: `file:///traces` is `/traces`."""
    return text[len(LOCAL) :] if text.lower().startswith(LOCAL + "/") else text
