"""How a job ended, in the words of the summary."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from verl_profiler_conf import Settings, activate
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.launch.ending import LEFT, RETURNED, Ending, at_exit, by_error

SETTINGS = Settings(windows=(TokenWindow(2, 4),), run_id="job")


@pytest.mark.parametrize(
    ("error", "words", "is_early"),
    [
        (ValueError("no such file\nand more"), "the job failed (ValueError: no such file)", True),
        (ValueError(), "the job failed (ValueError)", True),
        (KeyboardInterrupt(), "Ctrl-C ended the job", True),
        (SystemExit(7), "the job called sys.exit(7)", True),
        (SystemExit("no model"), "the job called sys.exit('no model')", True),
        (SystemExit(), "the job called sys.exit(None)", False),
        (SystemExit(0), "the job called sys.exit(0)", False),
        (None, "", False),
    ],
)
def test_an_exception_tells_how_the_job_ended(error: BaseException | None, words: str, is_early: bool) -> None:
    assert by_error(error) == Ending(words, is_early)


def test_of_a_long_text_only_the_beginning_is_said() -> None:
    assert len(by_error(ValueError("x" * 10_000)).words) < 250


def test_what_python_printed_last_is_known_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    earlier, error = ValueError("of a cell before"), KeyboardInterrupt()
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    assert at_exit(earlier, under_hydra=True) == by_error(error)
    monkeypatch.setattr(sys, "last_value", earlier)
    assert at_exit(earlier, under_hydra=True) == LEFT
    assert at_exit(earlier, under_hydra=False) == RETURNED
    monkeypatch.delattr(sys, "last_value")
    assert at_exit(None, under_hydra=False) == RETURNED


def test_a_job_of_a_with_statement_says_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(LookupError), activate(SETTINGS, run_dir=tmp_path):
        raise LookupError("no prompt")
    (line,) = (record.getMessage() for record in caplog.records if "no capture" in record.getMessage())
    assert line == (
        "tokens [2, 4): no capture, because the job failed (LookupError: no prompt) before any engine reported an"
        " iteration"
    )


def test_a_job_that_returned_is_not_said_to_have_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with activate(SETTINGS, run_dir=tmp_path):
        pass
    (line,) = (record.getMessage() for record in caplog.records if "no capture" in record.getMessage())
    assert "no engine reported an iteration; `verl-profiler doctor`" in line
    assert "the job" not in line.split("doctor")[0]
