"""A release may change what its scheduler says. The real engine runs on with the same tokens, and the job is told."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("no vLLM in this environment", allow_module_level=True)

from changed_outputs import VLLM
from vllm_driver import Driver, rest
from workloads import PLAIN

from verl_profiler_conf.capture.session import close_all
from verl_profiler_conf.core.settings import ENV_NAME
from verl_profiler_conf.engines.vllm.worker import WorkerHook

pytestmark = [pytest.mark.engine_vllm, pytest.mark.every_version]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    driver = Driver(tmp_path_factory.mktemp("models"))
    yield driver
    driver.close()


def tokens(driver: Driver) -> list[list[int]]:
    from vllm import SamplingParams

    llm = driver.llm(PLAIN)
    params = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False, temperature=0)
    prompts = [{"prompt_token_ids": [5 + number, 6, 7]} for number in range(3)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    rest(llm.llm_engine)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_each_change_is_said_to_the_job_that_meets_it(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One engine in this process, and a job for each change: all but the first are second jobs."""
    from verl_profiler_conf.engines.vllm.plugin import register

    begin = WorkerHook.begin

    def run(name: str, changed: Any) -> tuple[list[list[int]], list[str], list[dict[str, Any]]]:
        folder = tmp_path / name
        raw = {"profile_token_start": 2, "profile_token_end": 5, "save_path": str(folder), "device": "cpu"}
        monkeypatch.setenv(ENV_NAME, json.dumps(raw))
        monkeypatch.setattr(WorkerHook, "begin", lambda hook, output: begin(hook, changed(output)))
        register()
        caplog.clear()
        made = tokens(driver)
        close_all()
        said = [record.getMessage() for record in caplog.records if record.name.startswith("verl_profiler_conf")]
        found = [json.loads(path.read_text()) for path in folder.glob("*.manifest.json")]
        return made, [line for line in said if "the job goes on" in line], found

    plain, said, (capture,) = run("plain", lambda output: output)
    assert said == []
    assert [row["lo"] for row in capture["rows"]] == [2, 3, 4]
    for number, (change, changed) in enumerate(VLLM.items()):
        made, said, manifests = run(str(number), changed)
        assert made == plain, change
        assert len(said) == 1, change
        (manifest,) = manifests
        assert (manifest["trace"], manifest["closed_by"]) == (None, "error"), change
