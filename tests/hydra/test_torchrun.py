"""Ranks that torchrun starts: each is a Hydra run of its own, and those that were asked capture."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from clone import CLONE

pytest.importorskip("torch")

pytestmark = pytest.mark.slow

APP = CLONE / "examples" / "ddp.py"


def test_the_ranks_that_were_asked_capture_into_one_folder_and_say_so(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    window = ("+profiler=torch_window", "profiler.profile_token_start=20", "profiler.profile_token_end=24")
    done = subprocess.run(
        [sys.executable, *torchrun, str(APP), f"hydra.run.dir={tmp_path}", *window, "profiler.ranks=[1,2]"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split("] - ", 1) for line in done.stdout.splitlines() if "[verl_profiler_conf." in line]
    assert sorted(line[1].split(" -> ")[0] for line in lines if "waiting for response" not in line[1]) == [
        "rank 0 of 3 does not capture (ranks: [1, 2])",
        "tokens [20, 24): 4 iterations of loop, rank 1",
        "tokens [20, 24): 4 iterations of loop, rank 2",
    ]
    assert not [line for line in lines if "WARNING" in line[0]]
    profile = tmp_path / "profile"
    manifests = [json.loads(path.read_text()) for path in profile.glob("*.manifest.json")]
    assert sorted(manifest["rank"] for manifest in manifests) == [1, 2]
    assert len(list(profile.iterdir())) == 4
    rows = {1: 3, 2: 2}  # of eight prompts
    for manifest in manifests:
        assert ranges(profile / manifest["trace"]) == [
            f"response_tokens[{token}:{token + 1}) iter={token} reqs={rows[manifest['rank']]}"
            for token in range(20, 24)
        ]


def ranges(trace: Path) -> list[str]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sorted({event["name"] for event in events if event.get("name", "").startswith("response_tokens[")})
