"""Markers as another process would leave them."""

from __future__ import annotations

import json
from pathlib import Path

from verl_profiler_conf.capture.claims import claim_stem
from verl_profiler_conf.capture.files import marker


def leave_claim(stem: Path, run_id: str, **differs: object) -> Path:
    """Claim `stem` for a job; `pid`, `host` and `pids` as told. Returns the marker."""
    assert claim_stem(stem, run_id) is not None
    claim = marker(stem)
    claim.write_text(json.dumps({**json.loads(claim.read_text()), **differs}))
    return claim
