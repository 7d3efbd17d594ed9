"""Which traces of a folder are the ranks of one capture."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_profiler_conf.tools.trace.errors import TraceError, printable
from verl_profiler_conf.tools.trace.project import MANIFEST_SUFFIX, Manifest

_ENDINGS = (".json", ".json.gz")
_RANK = re.compile(r"(?:^|[^a-z])(?:rank|TP)[-_]?(\d{1,6})(?!\d)", re.IGNORECASE)


@dataclass(frozen=True)
class RankFile:
    """A trace, and the manifest beside it where it has one."""

    path: Path
    manifest: Manifest | None = None

    @property
    def rank(self) -> int | None:
        """As the manifest says it, or else the name of the file."""
        if self.manifest is not None:
            return self.manifest.rank
        match = _RANK.search(self.path.name)
        return int(match[1]) if match else None


def capture_files(folder: Path) -> list[RankFile]:
    """The traces of the one capture that a folder holds, by rank.

    With manifests in it, those of one job, engine, window and part are one capture. Without any, all traces in the
    folder itself are.

    Raises:
        TraceError: no trace, or several captures: their names, to give the files of one instead.
    """
    groups: dict[tuple[object, ...], list[RankFile]] = {}
    for path in sorted(folder.rglob(f"*{MANIFEST_SUFFIX}")):
        try:
            manifest = Manifest.from_json(path.read_bytes())
        except (OSError, ValueError):
            continue
        if manifest.trace is not None and manifest.trace.endswith(_ENDINGS):
            key = (manifest.run_id, manifest.engine, str(manifest.window), manifest.part, manifest.label)
            groups.setdefault(key, []).append(RankFile(path.parent / manifest.trace, manifest))
    if not groups:
        files = [RankFile(path) for path in sorted(folder.iterdir()) if path.name.endswith(_ENDINGS)]
        if not files:
            raise TraceError(f"{printable(folder)}: no trace in it")
        return files
    if len(groups) > 1:
        names = ", ".join(
            f"{key[1]} {key[2]} part {key[3]}" + (f" {key[4]}" if key[4] else "") for key in list(groups)[:5]
        )
        more = ", ..." if len(groups) > 5 else ""
        raise TraceError(
            f"{printable(folder)}: {len(groups)} captures ({printable(names)}{more}): give the files of one"
        )
    return sorted(next(iter(groups.values())), key=lambda file: file.rank or 0)


def rank_files(paths: Sequence[Path]) -> list[RankFile]:
    """Traces by their files, each with the manifest beside it where there is one."""
    found = []
    for path in paths:
        manifest = None
        for beside in path.parent.glob(f"*{MANIFEST_SUFFIX}"):
            try:
                candidate = Manifest.from_json(beside.read_bytes())
            except (OSError, ValueError):
                continue
            if candidate.trace == path.name:
                manifest = candidate
        found.append(RankFile(path, manifest))
    return found
