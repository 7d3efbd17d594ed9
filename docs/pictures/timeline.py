"""The picture of a trace as a viewer shows it: captured iterations, and the operators below them."""

from __future__ import annotations

from typing import Any

from svg import BASE, HEIGHT, Picture, Theme

WIDTH = 880
TITLE = "Three iterations of a trace, as Perfetto shows them: each in a range that names its response token"


def draw_timeline(record: dict[str, Any], theme: Theme) -> str:
    """One picture: time from left to right, operators below the iteration that ran them."""
    events = record["events"]
    end = max(event["ts"] + event["dur"] for event in events)
    picture = Picture()
    picture.text(0, 15, TITLE, theme.text, size=14, weight="600")
    top = 28
    for event in events:
        x, width = WIDTH * event["ts"] / end, WIDTH * event["dur"] / end
        y = top + HEIGHT * event["depth"]
        fill, ink = _colors(event, theme)
        picture.box(round(x, 1), y + 1, round(max(width - 1, 1), 1), HEIGHT - 3, fill)
        name = event["name"].removeprefix("aten::")
        if width > 6.6 * len(name):
            picture.text(round(x + width / 2, 1), y + BASE, name, ink, size=11, anchor="middle")
    depth = max(event["depth"] for event in events)
    y = top + HEIGHT * (depth + 1) + 14
    drawn = sum(1 for event in events if event["depth"])
    note = f"{end / 1000:.0f} ms; drawn are the {drawn} longest of {record['operators']:,} operators"
    picture.text(0, y, note, theme.faint, size=11)
    return picture.svg(TITLE, WIDTH, y + 4)


def _colors(event: dict[str, Any], theme: Theme) -> tuple[str, str]:
    """Of the box, and of the text in it."""
    if event["depth"] == 0:
        return theme.here, theme.on_bar
    if "linear" in event["name"] or "matmul" in event["name"]:
        return theme.window, theme.on_window
    return theme.counters if "attention" in event["name"] else theme.prompt, theme.text
