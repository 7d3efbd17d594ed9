"""Any text where another process, another job or another tool has written: it is understood, or it is nothing."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hostile import ANY_TEXT, ANY_VALUE, is_one_line, outcome, property_tests
from hypothesis import strategies as st

from verl_profiler_conf.capture.claims import claims, reserve_stem
from verl_profiler_conf.capture.files import stem
from verl_profiler_conf.capture.manifest import IterationRecord, Manifest, gather, write_manifest
from verl_profiler_conf.core.logs import forget_logged_texts
from verl_profiler_conf.core.place import Place, step_of
from verl_profiler_conf.core.settings import ENV_NAME, Settings
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.engines.hooking import published_settings

WHOLE = Settings(windows=(TokenWindow(20, 80),), save_path="/traces", run_id="job").to_json()


def dumped(value: Any) -> str:
    try:
        return json.dumps(value, default=str)
    except (ValueError, TypeError):  # an integer that Python refuses to print, keys of several kinds
        return repr(type(value))


CUT = st.tuples(st.integers(0, len(WHOLE)), st.integers(0, len(WHOLE))).map(lambda at: WHOLE[min(at) : max(at)])
CHANGED = st.dictionaries(st.sampled_from(sorted(json.loads(WHOLE))), ANY_VALUE, max_size=3).map(
    lambda changes: dumped({**json.loads(WHOLE), **changes})
)
DEEP = st.integers(1, 100_000).flatmap(lambda depth: st.sampled_from(["[" * depth, '{"a":' * depth, "-" * depth]))
ANY_JSON = st.one_of(ANY_TEXT, CUT, CHANGED, DEEP, ANY_VALUE.map(dumped))


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def check_variable(text: str) -> None:
    """An engine process reads it again and again: never an exception, and at most one line."""
    handler = Lines()
    logger = logging.getLogger("verl_profiler_conf")
    logger.addHandler(handler)
    forget_logged_texts()
    try:
        with patch.object(os, "environ", {**os.environ, ENV_NAME: text}):
            found = [published_settings("vLLM") for _ in range(3)]
    finally:
        logger.removeHandler(handler)
    assert found[0] == found[1] == found[2]
    assert len(handler.lines) == (found[0] is None and bool(text))
    assert all(map(is_one_line, handler.lines)), handler.lines
    settings, refusal = outcome(lambda: Settings.from_json(text))
    assert refusal is not None or Settings.from_json(settings.to_json()) == settings


test_any_variable, test_any_variable_long = property_tests(check_variable, ANY_JSON)


def check_place(text: str) -> None:
    place = Place.from_json(text)
    assert place is None or Place.from_json(place.to_json()) == place


test_any_place, test_any_place_long = property_tests(check_place, ANY_JSON)


def check_label(texts: tuple[str, str, str]) -> None:
    """Whatever a caller gives start_profile, an engine calls itself, and a request is called: the manifest is there."""
    engine, label, request = texts
    name = stem(engine, TokenWindow(0, 1), 0, 7, label)
    assert name.isascii()
    assert "/" not in name
    assert len(name) < 240
    assert step_of(label) is None or label.startswith("step")
    row = IterationRecord(0, 0, 1, 1, 1, 1, request=request)
    manifest = Manifest(TokenWindow(0, 1), engine, "1", 0, "lead", [request], [row], label=label, notes=[request])
    with tempfile.TemporaryDirectory() as folder:
        write_manifest(manifest, reserve_stem(Path(folder), name))
        (read,) = gather(Path(folder), "")
        assert read == manifest
        assert read.rows == [row]


test_any_label, test_any_label_long = property_tests(check_label, st.tuples(ANY_TEXT, ANY_TEXT, ANY_TEXT))


def check_files_of_others(content: bytes) -> None:
    """Manifests and markers that somebody else has left in the folder, or has cut off."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("a.manifest.json", ".a.reserved"):
            (folder / file).write_bytes(content)
        found = [*claims(folder), *gather(folder, "job")]
    for read in (Manifest.from_json, Manifest.from_json_lazily):
        with contextlib.suppress(ValueError):
            manifest = read(content)
            assert manifest.has_rows == bool(manifest.rows)
    assert len(found) <= 2


MANIFEST = Manifest(
    TokenWindow(0, 4), "vllm", "1", 0, "lead", rows=[IterationRecord(0, 0, 1, 1, 1, 1)], run_id="job"
).to_json()
CHANGED_MANIFEST = st.dictionaries(st.sampled_from(sorted(json.loads(MANIFEST))), ANY_VALUE, max_size=3).map(
    lambda changes: dumped({**json.loads(MANIFEST), **changes})
)
CUT_MANIFEST = st.tuples(st.integers(0, len(MANIFEST)), st.integers(0, len(MANIFEST)), ANY_TEXT).map(
    lambda at: MANIFEST[: min(at[:2])] + at[2] + MANIFEST[max(at[:2]) :]
)
test_any_files_of_others, test_any_files_of_others_long = property_tests(
    check_files_of_others,
    st.one_of(
        st.one_of(ANY_JSON, CHANGED_MANIFEST, CUT_MANIFEST).map(lambda text: text.encode(errors="surrogatepass")),
        st.binary(),
    ),
)
