"""What the site (mkdocs.yml) has beside the files in docs/: those at the top of the repository.

Their links into docs/ are turned round, and so are those of pages to them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""File at the top of the repository -> page of the site."""

INTO_DOCS = re.compile(r"""(\]\(|src=["']|srcset=["'])docs/""")
NO_PAGE = re.compile(r"\[([^\]]+)\]\(LICENSE\)")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        path = TOP / name
        if path.exists():
            text = NO_PAGE.sub(r"\1", INTO_DOCS.sub(r"\1", path.read_text(encoding="utf-8")))
            for other, its_page in PAGES.items():
                text = text.replace(f"]({other}", f"]({its_page}")
            files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    up = "../" * page.file.src_uri.count("/")
    for name, its_page in PAGES.items():
        markdown = markdown.replace(f"]({up}../{name}", f"]({up}{its_page}")
    return markdown
