"""What is touched of the installed Ray and verl without their promise is there. Looked up in their sources: importing
them takes half a minute."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("verl") is None or importlib.util.find_spec("ray") is None:
    pytest.skip("no verl in this environment", allow_module_level=True)

from verl_profiler_conf.verl.hooks import client, server
from verl_profiler_conf.verl.preset.launch_config import installed_verl
from verl_profiler_conf.verl.ray_env import job_config_is_read

pytestmark = pytest.mark.engine_verl


def source_of(module: str) -> str:
    package, *below = module.split(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None
    (folder,) = spec.submodule_search_locations or ()
    return Path(folder, *below).with_suffix(".py").read_text()


def test_ray_reads_the_variable_of_its_job_submission() -> None:
    assert job_config_is_read()


def test_verl_says_its_version() -> None:
    assert installed_verl() is not None


@pytest.mark.parametrize(("module", "names"), server.SERVERS.items())
def test_the_servers_have_what_the_hook_reads(module: str, names: tuple[str, str]) -> None:
    source = source_of(module)
    for part in (
        f"class {names[0]}",
        "async def launch_server(self, ",
        "async def start_profile(self, **kwargs)",
        f"self.{names[1]}",
        "self.global_steps = ",
        "self.replica_rank = ",
        "self.node_rank = ",
    ):
        assert part in source, part


def test_the_client_has_what_the_hook_reads() -> None:
    source = source_of(client.MODULE)
    for part in (f"class {client.CLIENT}", "async def generate(", "prompt_ids:", "sampling_params:", "self.config = "):
        assert part in source, part
