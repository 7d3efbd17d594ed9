"""Files of engine releases that are not installed, and classes out of them.

A wheel is downloaded once, by pip; of its hundreds of megabytes, kernels most of them, only the files asked for are
kept. A class is compiled from the release's own text, alone: what the module around it imports is not needed by the
few methods that count.
"""

from __future__ import annotations
import __future__

import ast
import importlib.util
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl-profiler-conf" / "wheels"

# only Python files are read, so that one platform serves all
_TARGET = ["--python-version", "3.12", "--implementation", "cp", "--only-binary", ":all:", "--no-deps"]
_PLATFORMS = ["any", "manylinux1_x86_64"] + [f"manylinux_2_{glibc}_x86_64" for glibc in (17, 28, 31, 34, 35)]


def own_source(project: str, version: str, *files: str) -> dict[str, str]:
    """The text of some files of a release, by their paths in its wheel."""
    home = CACHE / f"{project}-{version}"
    if not all((home / file).is_file() for file in files):
        home.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=CACHE) as scratch,
            zipfile.ZipFile(_download(project, version, Path(scratch))) as wheel,
        ):
            for file in files:
                _keep(home / file, wheel.read(file), Path(scratch))
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


def _download(project: str, version: str, folder: Path) -> Path:
    platforms = [argument for platform in _PLATFORMS for argument in ("--platform", platform)]
    command = [*_pip(), "download", "--quiet", "--disable-pip-version-check", *_TARGET, *platforms]
    done = subprocess.run(
        [*command, "--dest", str(folder), f"{project}=={version}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def _keep(path: Path, content: bytes, scratch: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = scratch / "part"
    part.write_bytes(content)
    part.replace(path)


def _pip() -> list[str]:
    """The environments that engines run in have no pip of their own."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    home = CACHE.parent / "pip-for-wheels"
    python = home / "bin" / "python"
    if not python.exists():
        venv.EnvBuilder(with_pip=True, symlinks=True).create(home)
    return [str(python), "-m", "pip"]
