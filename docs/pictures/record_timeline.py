"""Takes from a trace what docs/pictures/timeline.py draws: some iterations, and the operators below them.

    python docs/pictures/record_timeline.py TRACE

The one in docs/pictures/recorded/timeline.json is of `examples/rollout.py` with 6 layers of width 1024, on the CPU.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ITERATIONS = slice(1, 4)
DEEPEST = 2
SHORTEST = 0.0025
"""Share of the drawn time below which an operator is left out: it would be narrower than two pixels."""


def main() -> None:
    trace = Path(sys.argv[1])
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    ranges = sorted((e for e in events if e.get("name", "").startswith("response_tokens[")), key=lambda e: e["ts"])
    ranges = ranges[ITERATIONS]
    begin, end = ranges[0]["ts"], ranges[-1]["ts"] + ranges[-1]["dur"]
    inside = [e for e in events if e.get("cat") == "cpu_op" and e["tid"] == ranges[0]["tid"] and begin <= e["ts"] < end]
    rows: list[dict[str, Any]] = [
        {"name": e["name"], "depth": 0, "ts": round(e["ts"] - begin), "dur": round(e["dur"])} for e in ranges
    ]
    open_until: list[float] = []
    for e in sorted(inside, key=lambda e: (e["ts"], -e["dur"])):
        while open_until and open_until[-1] <= e["ts"]:
            open_until.pop()
        open_until.append(e["ts"] + e["dur"])
        depth = len(open_until)
        if depth <= DEEPEST and e["dur"] >= SHORTEST * (end - begin):
            rows.append({"name": e["name"], "depth": depth, "ts": round(e["ts"] - begin), "dur": round(e["dur"])})
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    text = f'{{\n "operators": {len(inside)},\n "events": [\n{lines}\n ]\n}}\n'
    (HERE / "recorded" / "timeline.json").write_text(text)


if __name__ == "__main__":
    main()
