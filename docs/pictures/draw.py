"""Draws the pictures of the documentation from recorded rollouts: `python docs/pictures/draw.py`.

`--check` compares only.

What is drawn is in docs/pictures/recorded/, which record.py makes from real runs: a log of every iteration, the
manifests of this package, and what the engine's own counters recorded. Each picture is made twice, for light and for
dark pages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from svg import BASE, GAP, HEIGHT, LEFT, THEMES, TOP, Picture, Theme
from timeline import draw_timeline

HERE = Path(__file__).resolve().parent
IMAGES = HERE.parent / "images"

TITLES = {
    "chunks": "One prompt of 300 tokens, taken in chunks of 64",
    "several": "Four requests that arrive one after another",
    "speculation": "n-gram speculation: several tokens in one iteration",
}


def draw(record: dict[str, Any], title: str, theme: Theme) -> str:
    """One picture: a row for each request, a column for each iteration, and below them what each way captured."""
    iterations = record["iterations"]
    requests = list(dict.fromkeys(request for made in iterations for request in made))
    cell = 46 if any(hi - lo > 1 for made in iterations for lo, hi in made.values()) else 26
    picture = Picture()
    picture.text(0, 15, title, theme.text, size=14, weight="600")
    picture.text(0, TOP - 8, "iteration", theme.faint, size=11)
    for number in range(0, len(iterations), 5):
        x = LEFT + cell * (number + 0.5)
        picture.text(x, TOP - 8, str(number), theme.faint, size=11, anchor="middle")
    y = float(TOP)
    for request in requests:
        picture.text(0, y + BASE, f"request {request}" if len(requests) > 1 else "tokens made", theme.text)
        _draw_request(picture, record, request, y, cell, theme)
        y += HEIGHT
    y += GAP
    for name, numbers, color in _ways(record):
        picture.text(0, y + BASE, name, theme.text)
        for first, last in _runs(numbers):
            count = last - first + 1
            x, width = LEFT + cell * first, cell * count
            picture.box(x + 1, y + 3, width - 2, HEIGHT - 6, getattr(theme, color))
            tokens = _tokens(iterations[first : last + 1], requests[0])
            label = f"tokens {tokens}" if len(requests) == 1 else f"{count} iterations"
            if width > 7 * len(label):
                picture.text(x + width / 2, y + BASE, label, theme.on_bar, size=11, anchor="middle")
        y += HEIGHT
    y += GAP
    width = max(LEFT + cell * len(iterations) + GAP, _draw_legend(picture, record, y, theme))
    return picture.svg(title, width, y + 18)


def _draw_request(picture: Picture, record: dict[str, Any], request: str, y: float, cell: int, theme: Theme) -> None:
    asked = range(*record["window"])
    for number, made in enumerate(record["iterations"]):
        if request not in made:
            continue
        tokens = range(*made[request])
        is_asked = any(token in asked for token in tokens)
        fill = theme.prompt if not tokens else theme.window if is_asked else theme.token
        x = LEFT + cell * number
        picture.box(x + 1, y + 1, cell - 2, HEIGHT - 2, fill)
        if tokens:
            shown = str(tokens[0]) if len(tokens) == 1 else f"{tokens[0]}-{tokens[-1]}"
            color = theme.on_window if is_asked else theme.faint
            picture.text(x + cell / 2, y + BASE, shown, color, size=11, anchor="middle")


def _draw_legend(picture: Picture, record: dict[str, Any], y: float, theme: Theme) -> float:
    """Returns where it ends."""
    start, end = record["window"]
    x = float(LEFT)
    for fill, what in (
        (theme.prompt, "a chunk of the prompt: no token"),
        (theme.token, "response tokens"),
        (theme.window, f"tokens asked for: {start} to {end - 1}"),
    ):
        picture.box(x, y, 12, 12, fill)
        picture.text(x + 17, y + 10, what, theme.faint, size=11)
        x += 17 + 6 * len(what) + 14
    return x


def _ways(record: dict[str, Any]) -> list[tuple[str, list[int], str]]:
    """Each way to capture: its name, the iterations that it captured, and the colour of its bar."""
    log = record["iterations"]
    several = len({request for made in log for request in made}) > 1
    found = []
    for track in ("lead", "any") if several else ("lead",):
        rows = [row for manifest in record["manifests"][track] for row in manifest["rows"]]
        for row in rows:  # what the manifest says is what the log, which knows nothing of this package, has
            made = log[row["index"]]
            if not row["gap"] and [row["lo"], row["hi"]] != (
                made[row["request"]] if track == "lead" else _hull(made, record)
            ):
                raise ValueError(f"iteration {row['index']}: the manifest and the log do not agree")
        name = f"trace (track: {track})" if several else "in the trace"
        found.append((name, sorted(row["index"] for row in rows), "here"))
    found.append(("engine's counters", record["counters"], "counters"))
    return found


def _hull(made: dict[str, list[int]], record: dict[str, Any]) -> list[int]:
    """First and last token of the window that any request made in an iteration; the last one exclusive."""
    asked = range(*record["window"])
    tokens = [token for lo, hi in made.values() for token in range(lo, hi) if token in asked]
    return [min(tokens), max(tokens) + 1]


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """First and last of each unbroken stretch."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _tokens(iterations: list[dict[str, list[int]]], request: str) -> str:
    made = [token for it in iterations if request in it for token in range(*it[request])]
    return f"{made[0]}-{made[-1]}" if made else "none"


def pictures() -> dict[Path, str]:
    """File -> its content."""
    found = {}
    for name, title in TITLES.items():
        record = json.loads((HERE / "recorded" / f"{name}.json").read_text(encoding="utf-8"))
        for theme in THEMES:
            found[IMAGES / f"{name}-{theme.name}.svg"] = draw(record, title, theme)
    record = json.loads((HERE / "recorded" / "timeline.json").read_text(encoding="utf-8"))
    for theme in THEMES:
        found[IMAGES / f"timeline-{theme.name}.svg"] = draw_timeline(record, theme)
    return found


def main() -> int:
    stale = [
        path for path, content in pictures().items() if not path.exists() or path.read_text(encoding="utf-8") != content
    ]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.name} is out of date: run `python docs/pictures/draw.py`", file=sys.stderr)
        return 1 if stale else 0
    for path, content in pictures().items():
        path.write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
