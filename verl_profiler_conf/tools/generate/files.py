"""Reference files: their text, writing them, and comparing them with what they should be."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_profiler_conf.tools.generate.compose import Composer, writable
from verl_profiler_conf.tools.generate.spec import Entry, SpecError


def render(entries: Iterable[Entry]) -> list[tuple[Path, str]]:
    """Every entry's file with the text that belongs in it.

    Raises:
        SpecError: Hydra cannot compose an entry, or its `first_key` is not in what is composed.
    """
    composer = Composer()
    return [(entry.output, _text(entry, composer)) for entry in entries]


def write(entries: Iterable[Entry]) -> list[Path]:
    """Bring the files up to date, each whole or not at all, and none before all are composed.

    Returns:
        The files that were out of date.

    Raises:
        SpecError: as from `render`; or a file's folder does not exist, in which case none is written.
        OSError: a file cannot be written.
    """
    outdated = [(path, text) for path, text in render(entries) if _read(path) != text]
    for path, _ in outdated:
        if not path.parent.is_dir():
            raise SpecError(f"{path.name}: there is no folder {path.parent}")
    for path, text in outdated:
        _replace(path, text)
    return [path for path, _ in outdated]


def check(entries: Iterable[Entry]) -> str:
    """Unified diff from the files as they are to what they should be; empty when they agree. Touches nothing.

    Raises:
        SpecError: as from `render`.
    """
    return "".join(_diff(path, _read(path), text) for path, text in render(entries))


def _text(entry: Entry, composer: Composer) -> str:
    try:
        config = composer.compose(
            entry.configs,
            entry.config_name,
            entry.overrides,
            plugin=entry.plugin,
            version_base=entry.version_base,
        )
    except Exception as error:  # of any kind: a list that includes itself ends in a RecursionError
        reason = str(error) or str(error.__cause__ or "") or type(error).__name__
        raise SpecError(f"{entry.output.name}: {reason}") from error
    header = entry.header.rstrip("\n")
    return (f"{header}\n\n" if header else "") + OmegaConf.to_yaml(_from_key(config, entry))


def _from_key(config: DictConfig, entry: Entry) -> DictConfig:
    if entry.first_key is None:
        return config
    keys = [str(key) for key in config]
    if entry.first_key not in keys:
        raise SpecError(f"{entry.output.name}: first_key={entry.first_key!r} is none of {', '.join(keys)}")
    with writable(config):
        for key in list(config)[: keys.index(entry.first_key)]:
            del config[key]
    return config


def _read(path: Path) -> str | None:
    try:
        with path.open(encoding="utf-8", newline="") as file:  # a line ending that was changed is a difference too
            return file.read()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        return path.read_bytes().decode("utf-8", "backslashreplace")


def _diff(path: Path, old: str | None, new: str) -> str:
    if old == new:
        return ""
    name = _short(path)
    lines = difflib.unified_diff(
        (old or "").splitlines(keepends=True),
        new.splitlines(keepends=True),
        fromfile=name if old is not None else "/dev/null",
        tofile=name,
    )
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _replace(path: Path, text: str) -> None:
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
