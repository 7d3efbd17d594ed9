"""The comments above the fields of the schemas, as data. The reference in docs/ is made from them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any


@dataclass(frozen=True)
class FieldDoc:
    """One field of an option.

    Attributes:
        key: relative to the window node, for example `engine.version`.
        default: a plain value; for a computed field, the text of its interpolation.
        type: as in Python, `int or null`; empty for a node.
        help: the comment above the field, on one line.
    """

    key: str
    default: Any
    type: str
    help: str


def describe(schema: type) -> list[FieldDoc]:
    """The fields of an option's schema in their order. The fields of a sub-node follow that node."""
    return list(_describe(schema, ""))


def summary(schema: type) -> str:
    """The purpose of an option: the first line of its schema's docstring."""
    return inspect.cleandoc(schema.__doc__ or "").splitlines()[0]


def _describe(kind: type, prefix: str) -> Iterator[FieldDoc]:
    comments = _comments(kind)
    for item in fields(kind):
        default = _default(item)
        if is_dataclass(default):
            yield FieldDoc(prefix + item.name, None, "", comments[item.name])
            yield from _describe(type(default), f"{prefix}{item.name}.")
        else:
            kind_text = str(item.type).replace(" | None", " or null")
            yield FieldDoc(prefix + item.name, default, kind_text, comments[item.name])


def _default(item: Field[Any]) -> Any:
    return item.default_factory() if item.default_factory is not MISSING else item.default


def _comments(kind: type) -> dict[str, str]:
    """Field -> its comment. Base classes come first: a field that is declared again takes the later comment."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if is_dataclass(base):
            found.update(_own_comments(base))
    return found


def _own_comments(kind: type) -> Iterator[tuple[str, str]]:
    source = textwrap.dedent(inspect.getsource(kind))
    lines = source.splitlines()
    body = ast.parse(source).body[0]
    for node in body.body if isinstance(body, ast.ClassDef) else ():
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno - 1
            while lines[first - 1].lstrip().startswith("#"):
                first -= 1
            comment = " ".join(line.strip().lstrip("#").strip() for line in lines[first : node.lineno - 1])
            if comment:
                yield node.target.id, comment
