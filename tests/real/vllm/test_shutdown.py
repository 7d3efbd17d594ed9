"""An engine in processes of its own that ends while a trace is written, which takes longer than vLLM gives it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("no vLLM in this environment", allow_module_level=True)

from clone import python_path
from vllm_async_job import PROMPTS, RESPONSE, run_script

from verl_profiler_conf.core.settings import ENV_NAME

pytestmark = pytest.mark.engine_vllm

SLOW = """
import time
import wrapt

def slow(module):
    plain = module.TorchRecording.write
    def write(self, *args):
        time.sleep(9)
        return plain(self, *args)
    module.TorchRecording.write = write

wrapt.register_post_import_hook(slow, "verl_profiler_conf.capture.backends.torch_profiler")
"""
"""As a trace of a large model takes."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trace_that_takes_longer_than_vllm_waits_is_there(tmp_path: Path, ranks: int) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SLOW)
    folder = tmp_path / "profile"
    settings: dict[str, Any] = {"profile_token_start": 10, "profile_token_end": 16, "save_path": str(folder)}
    environment = {
        "PYTHONPATH": python_path(site),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        ENV_NAME: json.dumps({**settings, "device": "cpu", "all_ranks": True}),
    }
    done = run_script(tmp_path, ["generate"], environment, ranks)
    assert json.loads(done.stdout.splitlines()[-1]) == [RESPONSE] * PROMPTS
    manifests = [json.loads(path.read_text()) for path in folder.glob("*.manifest.json")]
    assert sorted(manifest["rank"] for manifest in manifests) == list(range(ranks))
    for manifest in manifests:
        assert manifest["closed_by"] == "window"
        assert (folder / manifest["trace"]).stat().st_size == manifest["trace_bytes"]
