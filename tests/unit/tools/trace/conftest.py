"""What of these tests needs the extra `report`, for environments without it."""

from __future__ import annotations

from importlib.util import find_spec

NEED_NUMPY = ("analysis", "ascend", "compare", "merge", "others", "slice", "spool")
NEED_MSGSPEC = ("reader",)

_left_out = (*(NEED_NUMPY if not find_spec("numpy") else ()), *(NEED_MSGSPEC if not find_spec("msgspec") else ()))
collect_ignore = [f"test_trace_{name}.py" for name in _left_out]
