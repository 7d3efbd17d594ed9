"""verl's configs without verl: prints a folder to put on PYTHONPATH, in which `verl/` has config files and its version.

    configs=$(python tests/support/verl_configs.py)
    PYTHONPATH=$configs verl-profiler generate --check verl_profiler_conf/tools/generate/verl.yaml

The released wheel is downloaded by pip, once per machine; verl itself needs gigabytes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.9.1"
"""Whose reference is committed."""

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl-profiler-conf"


def configs() -> Path:
    """The folder; made when it is not there.

    Raises:
        subprocess.CalledProcessError: pip could not download the wheel, and has said why.
    """
    home = CACHE / f"verl-configs-{VERSION}"
    if not home.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            content = Path(scratch, "content")
            with zipfile.ZipFile(_wheel(Path(scratch))) as archive:
                wanted = [name for name in archive.namelist() if name.startswith("verl/") and name.endswith(".yaml")]
                archive.extractall(content, [*wanted, "verl/version/version"])
            content.replace(home)
    return home


def _wheel(scratch: Path) -> Path:
    name = f"verl-{VERSION}-py3-none-any.whl"
    kept = CACHE / "wheels" / name  # where the tests keep theirs
    if kept.exists():
        return kept
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), f"verl=={VERSION}"]
    subprocess.run(pip, check=True, stdout=sys.stderr)
    return scratch / name


if __name__ == "__main__":
    try:
        print(configs())
    except subprocess.CalledProcessError:
        sys.exit(f"verl {VERSION}: the wheel whose configs are needed could not be downloaded")
