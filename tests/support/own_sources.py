"""Classes out of engine releases that are not installed.

A class is compiled from the release's own text, alone: what the module around it imports is not needed by the few
methods that count.
"""

from __future__ import annotations
import __future__

import ast
from collections.abc import Collection, Mapping
from typing import Any

from released import released_or_skip


def own_source(project: str, version: str, *files: str) -> dict[str, str]:
    """The text of some files of a release, by their paths in its wheel."""
    home = released_or_skip(project, version, *files)
    return {file: (home / file).read_text(encoding="utf-8") for file in files}


def own_class(
    source: str,
    name: str,
    namespace: Mapping[str, Any],
    *,
    methods: Collection[str] | None = None,
    rename: str | None = None,
) -> type:
    """A class compiled from a module's text.

    Args:
        namespace: what its code finds as globals.
        methods: keep these methods only, and no base class; None: the class as it is.
        rename: compile the class under this name.
    """
    (node,) = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name]
    if methods is not None:
        found = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name in methods]
        assert {n.name for n in found} == set(methods)
        node.body, node.bases, node.keywords, node.decorator_list = list(found), [], [], []
    node.name = rename or name
    # annotations name types that are not here
    flags = __future__.annotations.compiler_flag
    code = compile(ast.Module([node], []), f"<{name} of the release>", "exec", flags=flags, dont_inherit=True)
    scope = {"__name__": __name__, **namespace}
    exec(code, scope)  # noqa: S102 - a release of an engine, which these tests are about
    made = scope[node.name]
    assert isinstance(made, type)
    return made


def method(source: str, class_name: str, name: str) -> ast.FunctionDef:
    """A method as a tree, for what cannot run here."""
    (node,) = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == class_name]
    (found,) = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == name]
    return found
