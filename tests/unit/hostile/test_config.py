"""Any value in any field of a config: it is valid, or it is refused in one line that names the key."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

from hostile import ANY_TEXT, ANY_VALUE, outcome, property_tests
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_profiler_conf.core.settings import OPTIONS, Settings
from verl_profiler_conf.core.urls import is_url
from verl_profiler_conf.launch.job import validate
from verl_profiler_conf.launch.options import SCHEMAS
from verl_profiler_conf.verl.preset.facts import ROLES, parse_roles

PLAIN: dict[str, Any] = {
    "profile_token_start": 20,
    "profile_token_end": 80,
    "profile_token_windows": [],
    "profiler": "torch_window",
    **{
        name: getattr(Settings((), "torch_window"), name)
        for name in Settings.__dataclass_fields__
        if name not in ("windows", "option")
    },
}
ENGINE_FACTS = ("name", "version", "prompt_tokens", "max_num_batched_tokens", "num_speculative_tokens", "other")

CHANGES = st.dictionaries(
    st.one_of(st.sampled_from(sorted(PLAIN)), ANY_TEXT, st.integers()),
    st.one_of(ANY_VALUE, st.dictionaries(st.sampled_from(ENGINE_FACTS), ANY_VALUE, max_size=2)),
    min_size=1,
    max_size=3,
)


def check_settings(changes: dict[Any, Any]) -> None:
    found, refusal = outcome(lambda: Settings.from_mapping({**PLAIN, **changes}, prefix="p."))
    if refusal is not None:
        assert refusal.startswith("p.")
    elif found.save_path is None or not is_url(found.save_path):  # a URL is for a job only
        assert Settings.from_json(found.to_json()) == found


test_any_settings, test_any_settings_long = property_tests(check_settings, CHANGES)


FIELDS = {
    option: sorted({field.name for field in dataclasses.fields(SCHEMAS[option])} - {"iterations"})
    for option in ("torch_window", "npu_window", "none")
}
CONFIGS = st.sampled_from(sorted(FIELDS)).flatmap(
    lambda option: st.tuples(
        st.just(option), st.dictionaries(st.sampled_from(FIELDS[option]), ANY_VALUE, min_size=1, max_size=2)
    )
)


@functools.cache
def config_of(option: str) -> Any:
    """Made once: OmegaConf takes longer to make a config than all else here."""
    return OmegaConf.create({"profiler": OmegaConf.structured(SCHEMAS[option](profile_token_end=80))})


def check_config(config: tuple[str, dict[str, Any]]) -> None:
    """As Hydra composes it: what OmegaConf checks by type, it refuses in its own words."""
    option, changes = config
    cfg = config_of(option)
    content = cfg.profiler.__dict__["_content"]
    before = {name: copy.deepcopy(content[name]) for name in changes}
    try:
        for name, value in changes.items():
            cfg.profiler[name] = value
        found, refusal = outcome(lambda: validate(cfg))
    except (OmegaConfBaseException, UnicodeError):
        return
    finally:
        content.update(before)
    if refusal is not None:
        assert refusal.startswith("profiler.")
    else:
        assert found is None or found.option in OPTIONS


test_any_config, test_any_config_long = property_tests(check_config, CONFIGS)


def check_roles(value: Any) -> None:
    found, refusal = outcome(lambda: parse_roles(value, "roles"))
    assert refusal is not None or set(found) <= set(ROLES)


test_any_roles, test_any_roles_long = property_tests(
    check_roles, st.one_of(ANY_VALUE, st.lists(st.one_of(st.sampled_from(ROLES), ANY_TEXT), max_size=5))
)
