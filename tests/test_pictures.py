"""The pictures of the documentation are those of the recorded rollouts, and the site builds without a broken link."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from clone import CLONE

DRAW = CLONE / "docs" / "pictures" / "draw.py"
RECORDED = sorted((CLONE / "docs" / "pictures" / "recorded").glob("*.json"))
ROLLOUTS = [path for path in RECORDED if path.stem != "timeline"]
IMAGE = re.compile(r"""\b(?:src|srcset)=["']([^"']+)["']""")


def draw(*arguments: str, script: Path = DRAW) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=False)


def test_redrawing_gives_the_committed_pictures() -> None:
    done = draw("--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("recorded", ROLLOUTS, ids=lambda path: path.stem)
def test_a_picture_cannot_say_what_the_log_does_not(recorded: Path, tmp_path: Path) -> None:
    """A manifest that names other tokens than the independent log is not drawn."""
    for folder in ("pictures/recorded", "images"):
        (tmp_path / folder).mkdir(parents=True)
    for script in DRAW.parent.glob("*.py"):
        (tmp_path / "pictures" / script.name).write_text(script.read_text())
    for path in RECORDED:
        record = json.loads(path.read_text())
        if path == recorded:
            record["manifests"]["lead"][0]["rows"][0]["lo"] += 1
        (tmp_path / "pictures" / "recorded" / path.name).write_text(json.dumps(record))
    done = draw(script=tmp_path / "pictures" / "draw.py")
    assert done.returncode != 0
    assert "do not agree" in done.stderr


def test_pictures_in_pages_exist() -> None:
    shown = [
        (page, target)
        for page in [*CLONE.glob("*.md"), *CLONE.glob("docs/**/*.md")]
        for target in IMAGE.findall(page.read_text())
    ]
    assert not [f"{page.name}: {target}" for page, target in shown if not (page.parent / target).is_file()]


def test_what_is_shown_in_light_is_shown_in_dark_and_in_the_same_size() -> None:
    for page in [*CLONE.glob("*.md"), *CLONE.glob("docs/**/*.md")]:
        shown = [page.parent / target for target in IMAGE.findall(page.read_text())]
        light, dark = ([path for path in shown if path.stem.endswith(end)] for end in ("-light", "-dark"))
        assert [path.name.replace("-light", "-dark") for path in light] == [path.name for path in dark], page
        for pair in zip(light, dark, strict=True):
            sizes = {path.read_bytes()[16:24] for path in pair if path.suffix == ".png"}  # of the header of a PNG
            assert len(sizes) <= 1, pair


def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=CLONE,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    loaded = re.compile(r"""<(?:script|link|img)[^>]*(?:src|href)=["']https?://([^"'/]+)""")
    pages = list((tmp_path / "site").rglob("*.html"))
    assert pages
    assert not {host for page in pages for host in loaded.findall(page.read_text())}, "something comes from elsewhere"
