"""What the pictures of the documentation are made of: colours for light and dark pages, text and boxes as SVG."""

from __future__ import annotations

from dataclasses import dataclass
from xml.sax.saxutils import escape

HEIGHT = 26
BASE = 17  # of the text in a row, from its top
LEFT = 150
TOP = 44
GAP = 8
FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Theme:
    """Colours of one kind of page."""

    name: str
    text: str
    faint: str
    prompt: str
    token: str
    window: str
    on_window: str
    here: str
    counters: str
    on_bar: str


THEMES = (
    Theme("light", "#1f2328", "#656d76", "#d8dee4", "#eef1f4", "#0969da", "#ffffff", "#1a7f37", "#bc4c00", "#ffffff"),
    Theme("dark", "#e6edf3", "#9198a1", "#3d444d", "#21262d", "#4493f8", "#0d1117", "#3fb950", "#db6d28", "#0d1117"),
)


class Picture:
    """The parts of one picture, as SVG."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def text(
        self, x: float, y: float, what: str, fill: str, *, size: int = 12, anchor: str = "start", weight: str = "400"
    ) -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{fill}" font-size="{size}" text-anchor="{anchor}" '
            f'font-weight="{weight}">{escape(what)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}"/>')

    def svg(self, title: str, width: float, height: float) -> str:
        size = f'width="{width + 8:g}" height="{height + 4:g}" viewBox="-4 -2 {width + 8:g} {height + 4:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{FONT}">'
        return "\n".join([head, f"<title>{escape(title)}</title>", *self.parts, "</svg>\n"])
