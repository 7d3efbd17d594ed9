"""The validated settings: one frozen value that goes from a config node to the job, and on to engine processes.

Pure: this module knows neither OmegaConf nor an engine. It holds the table of options and the rules for the fields. The
rules for the window are in `window.py`, those for the sub-node `engine` in `engine_facts.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from verl_profiler_conf.core.engine_facts import read_engine_facts
from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.numbers import is_integer
from verl_profiler_conf.core.raw import RawSettings
from verl_profiler_conf.core.sizes import parse_size
from verl_profiler_conf.core.urls import LOCAL, is_url, lacks_a_slash, local_path
from verl_profiler_conf.core.window import END_KEY, MAX_TOKEN, START_KEY, WINDOWS_KEY, TokenWindow, parse_windows

ENV_NAME = "VERL_PROFILER_CONF"
"""Environment variable that carries the settings to engine processes: one JSON object with the config's keys."""

SHELL_VARIABLE = re.compile(r"(^|/)\$(?P<name>[A-Za-z_][A-Za-z0-9_]*)")
"""At the head of a part of a path: a folder of that very name is not what anybody means."""

FOLDER = "profile"
"""Where captures go below the run directory when `save_path` is null."""

TOKENS_BEFORE = "verl_profiler_conf_tokens_before"
"""Key in a request's own arguments (vLLM `extra_args`, SGLang `custom_params`). Its value is the number of response
tokens that earlier requests have made of the same response."""

DEVICES = ("auto", "cuda", "npu", "cpu")
TRACKS = ("lead", "any", "all")
ARMS = ("job", "request")
MAPPINGS = ("tokens", "iterations")
GATHERS = ("auto", "never")
REPORTS = ("html",)
ON_ERRORS = ("warn", "raise")
CONTENTS = ("cpu", "cuda", "npu", "memory", "shapes", "stack", "module")
LEVELS = ("level_none", "level0", "level1", "level2")

FOREIGN_CONTENTS = {"cuda": ("npu",), "npu": ("cuda",), "cpu": ("cuda", "npu"), "auto": ()}
"""Contents that a device cannot record."""


@dataclass(frozen=True)
class Option:
    """One family of device profilers, as the config group `profiler` names it.

    Attributes:
        name: of the option.
        devices: on which it works, `auto` first.
        reason: why it works on those devices only; empty when it works on all of them.
        takes_contents: whether the user chooses what is recorded.
    """

    name: str
    devices: tuple[str, ...]
    reason: str = ""
    takes_contents: bool = True


OPTIONS: Mapping[str, Option] = {
    option.name: option
    for option in (
        Option("torch_window", DEVICES),
        Option(
            "npu_window",
            ("auto", "npu"),
            reason="it drives the profiler of Ascend NPUs; torch_window takes any device",
        ),
        Option("torch_memory", ("auto", "cuda"), reason="allocator history needs CUDA", takes_contents=False),
        Option(
            "nsys_window",
            ("auto", "cuda"),
            reason="nsys is switched through the CUDA runtime",
            takes_contents=False,
        ),
    )
}
"""Name -> option. The verl presets are built on `torch_window` and `npu_window`; `none` records nothing."""


@dataclass(frozen=True)
class Settings:
    """One validated `profiler` node. The other fields have the names and defaults of the config.

    Attributes:
        windows: in ascending order, without overlap, at least one.
        option: name of the option, a key of `OPTIONS`.
        part_iterations: maximum iterations of one trace. A longer window is written as consecutive parts.
        save_path: folder of the captures, or a URL. Once a job has started, an absolute path on this machine.
        gather_limit: bytes of traces that are brought from other nodes of a cluster.
        run_id: identifies the job among others that write to the same folder. Empty without a job.
        label: part of the file names, for example an RL step.
        engine: facts that the engines' own counters depend on.
    """

    windows: tuple[TokenWindow, ...]
    option: str = "torch_window"
    enable: bool = True
    device: str = "auto"
    track: str = "lead"
    max_iterations: int | None = None
    max_captures: int | None = 1
    skip_captures: int = 0
    part_iterations: int = 256
    arm: str = "job"
    mapping: str = "tokens"
    contents: tuple[str, ...] = ()
    level: str = "level0"
    analysis: bool = False
    ranks: tuple[int, ...] = (0,)
    all_ranks: bool = False
    save_path: str | None = None
    gather: str = "auto"
    gather_limit: int = 2**30
    report: str | None = None
    on_error: str = "warn"
    run_id: str = ""
    label: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any], prefix: str = "") -> Settings:
        """Validate raw settings.

        Args:
            raw: field name -> plain value, with interpolations resolved. Every key is optional. `profiler` is the
                option's name.
            prefix: path of the node in its config, for example `train.prof.`. Messages put it before each key.

        Raises:
            ConfigError: one line with the full key, the value and what is allowed.
        """
        read = RawSettings(raw, prefix)
        read.refuse_unknown(_KEYS)
        option = OPTIONS[read.choice("profiler", tuple(OPTIONS), "torch_window")]
        device = _device(read, option)
        windows = parse_windows(raw.get(START_KEY), raw.get(END_KEY), raw.get(WINDOWS_KEY), prefix=prefix)
        _refuse_ascend_fields(read, option, device)
        return cls(
            windows=windows,
            option=option.name,
            enable=read.flag("enable", True),
            device=device,
            track=read.choice("track", TRACKS, "lead"),
            max_iterations=read.optional_number("max_iterations", None, least=1),
            max_captures=read.optional_number("max_captures", 1, least=1),
            skip_captures=_skip_captures(read),
            part_iterations=read.number("part_iterations", 256, least=1),
            arm=read.choice("arm", ARMS, "job"),
            mapping=_mapping(read, windows),
            contents=_contents(read, option, device),
            level=read.choice("level", LEVELS, "level0"),
            analysis=read.flag("analysis", False),
            ranks=_ranks(read),
            all_ranks=read.flag("all_ranks", False),
            save_path=_save_path(read),
            gather=read.choice("gather", GATHERS, "auto"),
            gather_limit=parse_size(raw.get("gather_limit", cls.gather_limit), f"{prefix}gather_limit"),
            report=_report(read),
            on_error=read.choice("on_error", ON_ERRORS, "warn"),
            run_id=read.text("run_id") or "",
            label=read.text("label"),
            engine=read_engine_facts(read),
        )

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Read the text of the environment variable, written by `to_json` or by hand.

        Raises:
            ConfigError: the text is not one JSON object, or a setting in it is wrong.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError):
            raw = None
        if not isinstance(raw, dict):
            raise ConfigError(ENV_NAME, text, 'must be one JSON object, as in {"profile_token_start": 20}')
        settings = cls.from_mapping(raw, prefix=f"{ENV_NAME}.")
        if settings.save_path is not None and is_url(settings.save_path):
            raise ConfigError(
                f"{ENV_NAME}.save_path",
                settings.save_path,
                "must be a local folder: only a job moves captures to a URL",
            )
        return settings

    def to_json(self) -> str:
        """One JSON object with the config's field names. `from_json` turns it back into an equal value."""
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


def _device(raw: RawSettings, option: Option) -> str:
    value = raw.choice("device", DEVICES, "auto")
    if value not in option.devices:
        allowed = " or ".join(option.devices)
        raise raw.error("device", value, f"must be {allowed} for {option.name}: {option.reason}")
    return value


def _refuse_ascend_fields(raw: RawSettings, option: Option, device: str) -> None:
    if option.name == "npu_window" or device == "npu":
        return
    for key, default in (("level", "level0"), ("analysis", False)):
        value = raw.values.get(key, default)
        if value != default:
            raise raw.error(key, value, f"is for Ascend only: use npu_window, or set {raw.prefix}device=npu")


def _mapping(raw: RawSettings, windows: Sequence[TokenWindow]) -> str:
    value = raw.choice("mapping", MAPPINGS, "tokens")
    if value == "iterations" and len(windows) > 1:
        raise raw.error(
            "mapping",
            value,
            f"an engine's own counters hold one window, and {raw.prefix}{WINDOWS_KEY} has {len(windows)}",
        )
    return value


def _skip_captures(raw: RawSettings) -> int:
    value = raw.number("skip_captures", 0, least=0)
    if value and raw.values.get("mapping") == "iterations":
        raise raw.error(
            "skip_captures",
            value,
            f"an engine's own counters cannot let a window go by first: set it to 0, or {raw.prefix}mapping=tokens",
        )
    return value


def _contents(raw: RawSettings, option: Option, device: str) -> tuple[str, ...]:
    allowed = "a list of " + ", ".join(CONTENTS)
    value = raw.sequence("contents", allowed)
    if value and not option.takes_contents:
        raise raw.error("contents", value, f"cannot be chosen for {option.name}; leave it empty")
    if option.name == "npu_window":
        device = "npu"
    for item in value:
        if not isinstance(item, str) or item not in CONTENTS:
            raise raw.error("contents", value, f"must be {allowed}")
        if item in FOREIGN_CONTENTS[device]:
            raise raw.error("contents", value, f"{item} cannot be recorded on {raw.prefix}device={device}")
    return tuple(dict.fromkeys(value))


def _ranks(raw: RawSettings) -> tuple[int, ...]:
    allowed = "a list of ranks, integers from 0"
    value = raw.sequence("ranks", allowed, default=(0,))
    for rank in value:
        if not is_integer(rank) or not 0 <= rank <= MAX_TOKEN:
            raise raw.error("ranks", value, f"must be {allowed}")
    if not value and not raw.values.get("all_ranks"):
        raise raw.error("ranks", value, f"names no rank; to profile nothing, set {raw.prefix}enable=false")
    return tuple(dict.fromkeys(value))


def _save_path(raw: RawSettings) -> str | None:
    value = raw.text("save_path")
    if value is None:
        return None
    if value.lower().startswith(LOCAL) and is_url(value):
        raise raw.error("save_path", value, "must have an absolute path, as in file:///traces")
    if lacks_a_slash(value):
        scheme = value.partition(":")[0]
        raise raw.error("save_path", value, f"is no URL, which has two slashes ({scheme}://); a folder is ./{scheme}:/")
    is_published = raw.prefix == f"{ENV_NAME}." and value.startswith("/")  # by a job, whose folder may have any name
    variable = SHELL_VARIABLE.search(value)
    if variable is not None and not is_published:
        name = variable["name"]
        raise raw.error(
            "save_path", value, f"has ${name}, which is not expanded; in a Hydra config, ${{oc.env:{name}}} is"
        )
    return local_path(value)


def _report(raw: RawSettings) -> str | None:
    value = raw.text("report")
    if value is None:
        return None
    if value not in REPORTS:
        raise raw.error("report", value, f"must be {' or '.join(REPORTS)}, or null")
    if raw.values.get("mapping") == "iterations":
        raise raw.error(
            "report", value, f"is of captures, and with {raw.prefix}mapping=iterations the engine writes its own"
        )
    return value
