"""The installed engine has what is read of its objects."""

from __future__ import annotations

import importlib.util

import pytest
from packaging.version import Version

from verl_profiler_conf.core.iterations.versions import since
from verl_profiler_conf.engines import shape


@pytest.mark.engine_vllm
@pytest.mark.every_version
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM in this environment")
def test_vllm_has_it() -> None:
    import vllm  # noqa: F401 - its version is asked for

    from verl_profiler_conf.engines.vllm.release import READ_SINCE, vllm_version

    read = since(READ_SINCE, Version(vllm_version()))
    assert list(shape.missing(read)) == []
    lacking = dict.fromkeys(read, ("no_such_attribute",))
    assert len(list(shape.missing(lacking))) == len(read), "nothing stands in for what is not there"


@pytest.mark.engine_sglang
@pytest.mark.every_version
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="no SGLang in this environment")
def test_sglang_has_it() -> None:
    from verl_profiler_conf.engines.sglang.release import READ

    assert list(shape.missing(READ)) == []
    lacking = dict.fromkeys(READ, ("no_such_attribute",))
    assert len(list(shape.missing(lacking))) == len(READ), "nothing stands in for what is not there"
