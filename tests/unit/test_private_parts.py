"""CONTRIBUTING lists the private parts of others that are touched: all of them, and none that is not."""

from __future__ import annotations

import ast
import functools
import re
from collections import deque
from logging import Logger
from pathlib import Path

import pytest

CLONE = Path(__file__).parents[2]
PACKAGE = CLONE / "verl_profiler_conf"

PRIVATE = re.compile(r"_[A-Za-z](\w*[^\W_])?")

NO_ATTRIBUTES = frozenset(
    {"_verl_profiler_conf", "_global_", "_keys", "_self_", "_target_", "_exit", "_pid0", "_rows_text"}
)
"""Names of this package's own that are set on others' objects, names in YAML, and what POSIX documents."""


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def own_names(tree: ast.Module) -> set[str]:
    """What a file defines, and what it reads of `self` and `cls`."""
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            own.add(node.attr)
    return own


def is_no_lookup(node: ast.AST) -> bool:
    """Whether texts inside are no names of attributes: parts of longer texts, `__slots__`, the name of a type."""
    if isinstance(node, ast.Assign):
        return any(getattr(target, "id", "") == "__slots__" for target in node.targets)
    return isinstance(node, (ast.JoinedStr, ast.BinOp)) or getattr(getattr(node, "func", None), "id", "") == "TypeVar"


def private_names(file: Path) -> set[str]:
    """Names with a leading underscore that a file reads of others: attributes, imports, and texts for `getattr`."""
    tree = tree_of(file)
    ignored = {id(part) for node in ast.walk(tree) if is_no_lookup(node) for part in ast.walk(node)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("verl_profiler_conf"):
            found.update([*(node.module or "").split("."), *(alias.name for alias in node.names)])
        elif isinstance(node, ast.Constant) and re.fullmatch(r"[\w.]+", str(node.value)) and id(node) not in ignored:
            found.update(str(node.value).split("."))
    return {name for name in found if PRIVATE.fullmatch(name)} - own_names(tree) - NO_ATTRIBUTES


def listed_names() -> set[str]:
    text = (CLONE / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## Private parts of others")[2].partition("\n## ")[0]
    return {name for code in re.findall(r"`([^`]+)`", section) for name in re.findall(r"(?<!\w)_\w+", code)}


def all_names() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for file in sorted([*PACKAGE.rglob("*.py"), *(CLONE / "hydra_plugins").rglob("*.py")]):
        for name in private_names(file):
            found.setdefault(name, set()).add(str(file.relative_to(CLONE)))
    return found


def test_every_private_part_is_listed() -> None:
    listed = listed_names()
    assert {name: files for name, files in all_names().items() if name not in listed} == {}


def test_what_is_listed_is_touched() -> None:
    source = "".join(file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py"))
    assert {name for name in listed_names() if name not in source} == set()


@pytest.mark.parametrize(
    "line",
    [
        "config._node()",
        "getattr(config, '_node')",
        "from hydra._node import main",
        "from hydra import _node",
        "import_module('hydra._node.callbacks')",
    ],
)
def test_a_private_part_is_found(line: str, tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(f"{line}\nself._own = cls._other = None\n")
    assert private_names(file) == {"_node"}


# -- what is read of the objects of an engine: internal as well, whatever the names look like --

EVERYDAY_KINDS = (dict, list, str, set, bytes, deque, Logger, Exception, type, Path)
EVERYDAY = frozenset(name for kind in EVERYDAY_KINDS for name in dir(kind))

DOCUMENTED = frozenset(
    {
        *("Error", "STATUS_ZOMBIE", "children", "cmdline", "status"),  # psutil
        *("is_alive", "sentinel", "terminate", "findall", "co_names", "co_varnames"),  # Python
        *("shape", "tolist", "poll", "include_router", "router", "routes", "path"),  # torch, FastAPI
    }
)


def defined_names() -> set[str]:
    """What this package defines anywhere: functions, classes, fields, attributes."""
    names: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(tree_of(file)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


def engine_names(file: Path) -> set[str]:
    """Attributes that an engine file reads of objects which are not this package's, nor of a module it imports."""
    tree = tree_of(file)
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            if isinstance(node.args[1], ast.Constant):
                found.add(str(node.args[1].value))
        elif isinstance(node, ast.Attribute):
            root: ast.expr = node
            while isinstance(root, (ast.Attribute, ast.Call, ast.Subscript)):
                root = root.func if isinstance(root, ast.Call) else root.value
            if not (isinstance(root, ast.Name) and root.id in imported):
                found.add(node.attr)
    return found


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
def test_every_field_of_an_engine_is_listed(engine: str) -> None:
    text = (CLONE / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## Private parts of others")[2].partition("\n## ")[0]
    listed = set(re.findall(r"\w+", section))
    folder = PACKAGE / "engines" / engine
    found = set().union(*map(engine_names, folder.glob("*.py"))) - EVERYDAY - DOCUMENTED - defined_names() - listed
    assert {name for name in found if not name.startswith(("__", "_verl_profiler_conf"))} == set()
