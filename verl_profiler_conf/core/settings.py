"""The validated configuration, as one frozen value that travels: from a config node to the job, and on to engines.

Pure: no OmegaConf, no engine. What an option may contain is a table here; what a window may be stands in `window.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.window import END_KEY, MAX_TOKEN, START_KEY, WINDOWS_KEY, TokenWindow, parse_windows

ENV_NAME = "VERL_PROFILER_CONF"
"""Environment variable that carries the settings to engine processes: one JSON object, keys as in the config."""

TOKENS_BEFORE = "verl_profiler_conf_tokens_before"
"""Key by which a request says that it continues a response, and after how many of its tokens: in vLLM's `extra_args`,
in SGLang's `custom_params`."""

OPTIONS = ("torch_window", "npu_window", "torch_memory", "nsys_window")
DEVICES = ("auto", "cuda", "npu", "cpu")
TRACKS = ("lead", "any", "all")
ARMS = ("job", "request")
MAPPINGS = ("tokens", "iterations")
ON_ERRORS = ("warn", "raise")
CONTENTS = ("cpu", "cuda", "npu", "memory", "shapes", "stack", "module")
LEVELS = ("level_none", "level0", "level1", "level2")

FOREIGN_CONTENTS = {"cuda": ("npu",), "npu": ("cuda",), "cpu": ("cuda", "npu"), "auto": ()}
"""Contents that a device does not have."""

OPTION_DEVICES = {
    "torch_window": DEVICES,
    "npu_window": ("auto", "npu"),
    "torch_memory": ("auto", "cuda"),
    "nsys_window": ("auto", "cuda"),
}
"""Devices on which an option can work."""

DEVICE_REASONS = {
    "torch_window": "",
    "npu_window": "it drives the profiler of Ascend NPUs; torch_window takes any device",
    "torch_memory": "allocator history needs CUDA",
    "nsys_window": "nsys is switched through the CUDA runtime",
}
"""Why an option works on those devices only."""

OPTIONS_WITHOUT_CONTENTS = ("torch_memory", "nsys_window")
"""What these record is not chosen here: allocator history is one thing, and nsys has its own command line."""

DEFAULT_PART_ITERATIONS = 256
"""A trace of so many iterations still opens in a viewer, and ending its recording does not hold the engine for long."""

AUTO = "auto"
ENGINE_TEXTS = ("name", "version")
ENGINE_COUNTS = {"prompt_tokens": 1, "max_num_batched_tokens": 1, "num_speculative_tokens": 0}
"""Facts about an engine that are numbers -> the least each can be."""

ENGINE_FACTS = (*ENGINE_TEXTS, *ENGINE_COUNTS)


@dataclass(frozen=True)
class Settings:
    """One validated `profiler` node. Fields carry the names and defaults of the config contract.

    Attributes:
        windows: ascending and disjoint, at least one.
        part_iterations: iterations of one trace at most; a longer window is written as consecutive parts.
        option: which device profiler family; the config option's name.
        save_path: folder of the captures; absolute once a job has started.
        run_id: the job's, so that captures of jobs that share a folder stay apart; empty without a job.
        label: goes into file names (an RL step, say).
        engine: facts for the engines' own counters.
    """

    windows: tuple[TokenWindow, ...]
    option: str = "torch_window"
    enable: bool = True
    device: str = "auto"
    track: str = "lead"
    max_iterations: int | None = None
    max_captures: int | None = 1
    part_iterations: int = DEFAULT_PART_ITERATIONS
    arm: str = "job"
    mapping: str = "tokens"
    contents: tuple[str, ...] = ()
    level: str = "level0"
    analysis: bool = False
    ranks: tuple[int, ...] = (0,)
    all_ranks: bool = False
    save_path: str | None = None
    on_error: str = "warn"
    run_id: str = ""
    label: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any], prefix: str = "") -> Settings:
        """Validate raw settings.

        Args:
            raw: field name -> plain value, interpolations resolved; every key optional. `profiler` names the option.
            prefix: path of the node in its config (`train.prof.`), put before each key of a message.

        Raises:
            ConfigError: one line that names the full key, the value and what is allowed.
        """
        check = _Checker(raw, prefix)
        check.known(_KEYS)
        option = check.choice("profiler", OPTIONS, "torch_window")
        device = check.device(option)
        windows = parse_windows(raw.get(START_KEY), raw.get(END_KEY), raw.get(WINDOWS_KEY), prefix=prefix)
        check.ascend_only(option, device)
        return cls(
            windows=windows,
            option=option,
            enable=check.flag("enable", True),
            device=device,
            track=check.choice("track", TRACKS, "lead"),
            max_iterations=check.number("max_iterations", None, least=1, optional=True),
            max_captures=check.number("max_captures", 1, least=1, optional=True),
            part_iterations=check.count("part_iterations", DEFAULT_PART_ITERATIONS),
            arm=check.choice("arm", ARMS, "job"),
            mapping=check.mapping(windows),
            contents=check.contents(option, device),
            level=check.choice("level", LEVELS, "level0"),
            analysis=check.flag("analysis", False),
            ranks=check.ranks(),
            all_ranks=check.flag("all_ranks", False),
            save_path=check.text("save_path"),
            on_error=check.choice("on_error", ON_ERRORS, "warn"),
            run_id=check.text("run_id") or "",
            label=check.text("label"),
            engine=check.engine(),
        )

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Read what `to_json` or a user wrote into the environment.

        Raises:
            ConfigError: not one JSON object, or a bad setting in it.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError):
            raw = None
        if not isinstance(raw, dict):
            raise ConfigError(ENV_NAME, text, 'must be one JSON object, as in {"profile_token_start": 20}')
        return cls.from_mapping(raw, prefix=f"{ENV_NAME}.")

    def to_json(self) -> str:
        """One JSON object with the config's own field names; `from_json` gives an equal value back."""
        raw = {key: value for key, value in asdict(self).items() if key not in ("windows", "option")}
        raw["profiler"] = self.option
        raw["contents"], raw["ranks"] = list(self.contents), list(self.ranks)
        raw["engine"] = dict(self.engine)
        if len(self.windows) == 1:
            raw[START_KEY], raw[END_KEY] = self.windows[0].start, self.windows[0].end
        else:
            raw[WINDOWS_KEY] = [[window.start, window.end] for window in self.windows]
        return json.dumps(raw)


_KEYS = frozenset(
    {f.name for f in fields(Settings)} - {"windows", "option"} | {"profiler", START_KEY, END_KEY, WINDOWS_KEY}
)


class _Checker:
    """Reads one raw setting after the other, or raises with its full key."""

    def __init__(self, raw: Mapping[str, Any], prefix: str) -> None:
        self._raw = raw
        self._prefix = prefix

    def known(self, keys: frozenset[str]) -> None:
        for key, value in self._raw.items():
            if key not in keys:
                raise self._error(key, value, f"no such setting; there are {', '.join(sorted(keys))}")

    def choice(self, key: str, allowed: Sequence[str], default: str) -> str:
        value = self._raw.get(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise self._error(key, value, f"must be one of {', '.join(allowed)}")
        return value

    def device(self, option: str) -> str:
        value = self.choice("device", DEVICES, "auto")
        if value not in OPTION_DEVICES[option]:
            allowed = " or ".join(OPTION_DEVICES[option])
            raise self._error("device", value, f"must be {allowed} for {option}: {DEVICE_REASONS[option]}")
        return value

    def ascend_only(self, option: str, device: str) -> None:
        if option == "npu_window" or device == "npu":
            return
        for key, default in (("level", "level0"), ("analysis", False)):
            if key in self._raw and self._raw[key] != default:
                raise self._error(
                    key, self._raw[key], f"is for Ascend only: use npu_window, or set {self._prefix}device=npu"
                )

    def mapping(self, windows: Sequence[TokenWindow]) -> str:
        value = self.choice("mapping", MAPPINGS, "tokens")
        if value == "iterations" and len(windows) > 1:
            raise self._error(
                "mapping",
                value,
                f"an engine's own counters hold one window, and {self._prefix}{WINDOWS_KEY} has {len(windows)}",
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._raw.get(key, default)
        if not isinstance(value, bool):
            raise self._error(key, value, "must be true or false")
        return value

    def number(self, key: str, default: int | None, *, least: int, optional: bool) -> int | None:
        value = self._raw.get(key, default)
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_TOKEN:
            raise self._error(
                key, value, f"must be an integer from {least} to {MAX_TOKEN}{', or null' if optional else ''}"
            )
        return value

    def count(self, key: str, default: int) -> int:
        value = self.number(key, default, least=1, optional=False)
        return default if value is None else value

    def text(self, key: str) -> str | None:
        value = self._raw.get(key)
        if value is not None and not isinstance(value, str):
            raise self._error(key, value, "must be text, or null")
        return value or None

    def contents(self, option: str, device: str) -> tuple[str, ...]:
        value = self._list("contents", "a list of " + ", ".join(CONTENTS))
        if value and option in OPTIONS_WITHOUT_CONTENTS:
            raise self._error("contents", value, f"cannot be chosen for {option}; leave it empty")
        if option == "npu_window":
            device = "npu"
        for item in value:
            if not isinstance(item, str) or item not in CONTENTS:
                raise self._error("contents", value, f"must be a list of {', '.join(CONTENTS)}")
            if item in FOREIGN_CONTENTS[device]:
                raise self._error("contents", value, f"{item} cannot be recorded on {self._prefix}device={device}")
        return tuple(dict.fromkeys(value))

    def ranks(self) -> tuple[int, ...]:
        allowed = "must be a list of ranks, integers from 0"
        value = self._list("ranks", "a list of ranks, integers from 0", default=(0,))
        for rank in value:
            if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
                raise self._error("ranks", value, allowed)
        if not value and not self._raw.get("all_ranks"):
            raise self._error("ranks", value, f"names no rank; set {self._prefix}enable=false to profile nothing")
        return tuple(dict.fromkeys(value))

    def engine(self) -> dict[str, Any]:
        value = self._raw.get("engine") or {}
        if not isinstance(value, Mapping):
            raise self._error("engine", value, f"must hold {', '.join(ENGINE_FACTS)}")
        check = _Checker(value, f"{self._prefix}engine.")
        check.known(frozenset(ENGINE_FACTS))
        for key, least in ENGINE_COUNTS.items():
            check.number(key, None, least=least, optional=True)
        name, version = (check.text(key) or AUTO for key in ENGINE_TEXTS)
        if version != AUTO and name == AUTO:
            raise check._error("version", version, f"is the version of what? set {self._prefix}engine.name too")
        return {key: value.get(key) for key in ENGINE_FACTS if value.get(key) is not None}

    def _list(self, key: str, allowed: str, default: Sequence[Any] = ()) -> list[Any]:
        value = self._raw.get(key, default)
        if value is None:
            value = default
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise self._error(key, value, f"must be {allowed}")
        return list(value)

    def _error(self, key: str, value: object, allowed: str) -> ConfigError:
        return ConfigError(self._prefix + key, value, allowed)
