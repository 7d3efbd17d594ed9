"""Whether a script can come to a Hydra app at all: a launch that surely does not is not run to find that out.

Only what is certain counts. A script is read, and the modules beside it that it imports. Whatever may lead elsewhere (a
package that is not known, code that runs other code) means: it may.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

WITHOUT_HYDRA = frozenset(
    {
        *("PIL", "accelerate", "datasets", "deepspeed", "einops", "huggingface_hub", "jax", "matplotlib", "numpy"),
        *("pandas", "peft", "pydantic", "ray", "requests", "rich", "safetensors", "scipy", "sglang", "sklearn"),
        *("tensorboard", "tokenizers", "torch", "torchvision", "tqdm", "transformers", "trl", "vllm", "wandb", "yaml"),
    }
)
"""Packages that start no Hydra app."""

RUN_OTHERS = frozenset(
    {
        *("__import__", "call", "check_call", "check_output", "eval", "exec", "execv", "execve", "execvp", "execvpe"),
        *(
            "import_module",
            "Popen",
            "run",
            "run_module",
            "run_path",
            "spawnv",
            "spawnvp",
            "system",
            "iter_entry_points",
        ),
        *("entry_points", "posix_spawn", "activate"),
    }
)
"""Names of functions that may run code of elsewhere, or start a window without a Hydra run."""

MOST_FILES = 200


def never_starts_hydra(command: Sequence[str]) -> str | None:
    """The script that a command runs, where it surely starts no Hydra app; else None."""
    script = _script(command)
    if script is None:
        return None
    todo, seen = [script], {script}
    while todo:
        try:
            tree = ast.parse(todo.pop().read_bytes())
        except (OSError, SyntaxError, ValueError):
            return None
        if len(seen) > MOST_FILES or _may_run_others(tree):
            return None
        for name in _imports(tree):
            found = list(_beside(script.parent, name))
            if not found and name.partition(".")[0] not in WITHOUT_HYDRA | sys.stdlib_module_names:
                return None
            todo += [file for file in found if file not in seen]
            seen.update(found)
    return str(script)


def _script(command: Sequence[str]) -> Path | None:
    """The file of `python FILE.py ...`. Options of Python itself, `-m` and `-c` are left alone."""
    if len(command) < 2 or not Path(command[0]).name.startswith("python"):
        return None
    script = Path(command[1])
    return script.absolute() if script.suffix == ".py" and script.is_file() else None


def _imports(tree: ast.Module) -> Iterator[str]:
    """Names of modules. `from a import b` may import `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _beside(folder: Path, name: str) -> Iterator[Path]:
    """Files that an import of `name` runs, where it lies below the script's folder."""
    at = folder
    for part in name.split("."):
        at = at / part
        for file in (at.with_suffix(".py"), at / "__init__.py"):
            if file.is_file():
                yield file


def _may_run_others(tree: ast.Module) -> bool:
    """Whether code calls for other code by a name that is not an import's, or imports relative to a package."""
    return any(
        (isinstance(node, ast.ImportFrom) and node.level > 0)
        or (isinstance(node, ast.Name) and node.id in RUN_OTHERS)
        or (isinstance(node, ast.Attribute) and node.attr in RUN_OTHERS)
        for node in ast.walk(tree)
    )
