"""A worker class that has been hooked, with settings in force."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_worker import Worker, hooked_class

from verl_profiler_conf.capture.session import close_all
from verl_profiler_conf.core.settings import ENV_NAME


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Publish settings; a worker class that has been hooked."""

    def publish(**settings: Any) -> type[Worker]:
        raw = {"profile_token_start": 2, "profile_token_end": 4, "save_path": str(tmp_path), "device": "cpu"}
        monkeypatch.setenv(ENV_NAME, json.dumps({**raw, **settings}))
        return hooked_class()

    yield publish
    close_all()
