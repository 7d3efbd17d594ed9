"""Whether an engine's classes have what is read of their objects: asked before a newer release is windowed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

from packaging.version import InvalidVersion, Version

Shape = Mapping[str, tuple[str, ...]]
"""`module:class` -> attributes that are read of its objects."""


def is_newer(version: str, newest: str) -> bool:
    """Whether a release is newer than the newest that was tried, or has a version of its own (a build from a fork)."""
    if version == "unknown":
        return False
    try:
        return Version(version).release > Version(newest).release
    except InvalidVersion:
        return True


def missing(shape: Shape) -> Iterator[str]:
    """What the classes lack, as `class.attribute`, or `module:class` where the class itself is not there."""
    for place, attributes in shape.items():
        module, _, name = place.partition(":")
        try:
            kind = getattr(import_module(module), name)
        except (ImportError, AttributeError):
            yield place
            continue
        yield from (f"{name}.{attribute}" for attribute in _absent(kind, attributes))


def _absent(kind: type, attributes: Iterable[str]) -> list[str]:
    known: set[str] = set()
    for base in kind.__mro__:
        known.update(vars(base))
        for listed in (getattr(base, "__annotations__", ()), getattr(base, "__struct_fields__", ())):
            known.update(listed if isinstance(listed, (dict, tuple)) else ())
        for value in vars(base).values():
            code = getattr(value, "__code__", None)
            if code is not None:  # an attribute of an object is named where a method sets it
                known.update(code.co_names)
    return [attribute for attribute in attributes if attribute not in known]


_ABSENT = object()

Forms = Mapping[str, Callable[[Any], bool]]
"""Attribute -> whether a value of it has the form that is read."""


def unlike(thing: Any, forms: Forms, name: str) -> Iterator[str]:
    """What an object lacks, or has in another form than is read, as `name.attribute` with what is found there."""
    for attribute, has_form in forms.items():
        value = getattr(thing, attribute, _ABSENT)
        if value is _ABSENT:
            yield f"no {name}.{attribute}"
        elif not has_form(value):
            yield f"a {type(value).__name__} in {name}.{attribute}"


def anything(_: Any) -> bool:
    """A form: only that the attribute is there."""
    return True


def a(*kinds: type) -> Callable[[Any], bool]:
    """A form: an object of one of these kinds."""
    return lambda value: isinstance(value, kinds)
