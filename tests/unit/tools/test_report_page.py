"""The report as a page and as a picture; the page in a real browser, where one is installed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser, browser
from trace_files import complete, launched, real_trace, tokens, write

from verl_profiler_conf.capture.manifest import IterationRecord, Manifest, write_manifest
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.tools import cli
from verl_profiler_conf.tools.report.captures import read_captures
from verl_profiler_conf.tools.report.plots import MOST_ITERATIONS, MOST_PIECES, STACK, plots_of

pytest.importorskip("numpy")

from verl_profiler_conf.tools.trace.analysis import analyse

EVIL = "</script><script>window.evil=1</script><img src=http://evil.example/x onerror=window.evil=2>&amp;<b>k</b>"
MOST_BYTES = 6_000_000


def events_of(iterations: int, kernels: int = 3, name: str = "gemm<float, 128>") -> list[Any]:
    events: list[Any] = []
    for number in range(iterations):
        begin = number * 1000.0
        events.append(tokens(number, number + 1, number, begin, 900))
        events.append(complete("cpu_op", f"op {name}", begin + 1, 5))
        for each in range(kernels):
            at = begin + 10 + each * 800 / kernels
            called = name if each % 3 else "ncclDevKernel_AllReduce"
            events += launched(number * kernels + each + 1, called, at, at + 4, 500 / kernels, stream=7 + each % 3)
    return events


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    pytest.importorskip("plotly")
    with browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a capture of 30 iterations, a missing window, and hostile names."""
    folder = tmp_path / "run"
    folder.mkdir()
    stem = "vllm_tokens0-30_rank0_pid1_1"
    trace = write(folder / f"{stem}.pt.trace.json.gz", events_of(30, name=EVIL))
    rows = [IterationRecord(i, i, i + 1, 2, 2, 1) for i in range(30)]
    write_manifest(
        Manifest(TokenWindow(0, 30), f"vllm{EVIL}", "1", 0, "lead", rows=rows, trace=trace.name, notes=[EVIL]),
        folder / stem,
    )
    write_manifest(Manifest(TokenWindow(50, 60), "vllm", "1", 0, "lead"), folder / "vllm_tokens50-60_rank0_pid1_1")
    return folder


class TestPlots:
    def test_the_parts_of_an_iteration_add_up_to_its_device_time(self, tmp_path: Path) -> None:
        analysis = analyse(write(tmp_path / "t.json", events_of(5)))
        plots = plots_of(analysis)
        assert plots.x == [0, 1, 2, 3, 4]
        assert plots.x_title == "response token"
        for number, iteration in enumerate(analysis.iterations):
            assert iteration.device is not None
            whole = (iteration.device.busy_us + iteration.device.idle_us) / 1e3
            assert sum(plots.stack[label][number] for _, label in STACK) == pytest.approx(whole, abs=1e-3)

    def test_more_than_can_be_drawn_is_thinned_out_and_said(self, tmp_path: Path) -> None:
        plots = plots_of(analyse(write(tmp_path / "t.json", events_of(MOST_ITERATIONS + 5, kernels=1))))
        assert len(plots.x) <= MOST_ITERATIONS
        assert len(plots.x) + plots.left_out == MOST_ITERATIONS + 5
        plots = plots_of(analyse(write(tmp_path / "t.json", events_of(1, kernels=MOST_PIECES + 7))))
        assert plots.strip is not None
        assert (len(plots.strip.pieces), plots.strip.left_out) == (MOST_PIECES, 7)


class TestPage:
    @pytest.fixture(autouse=True)
    def _plotly(self) -> None:
        pytest.importorskip("plotly")

    def test_names_are_text_wherever_they_stand(self, run: Path, tmp_path: Path) -> None:
        out = tmp_path / "r.html"
        assert cli.main(["report", str(run), "--html", str(out)]) == 1  # a window is missing
        text = out.read_text()
        assert "</script><script>window.evil" not in text
        assert "<img src=http" not in text
        assert "tokens 50-59 of [50, 60): never reached" in text

    def test_it_is_below_the_limit_with_the_most_that_it_draws(self, tmp_path: Path) -> None:
        from verl_profiler_conf.tools.report.page import MOST_CAPTURES, write_page

        trace = write(tmp_path / "t.json", events_of(MOST_ITERATIONS - 1, kernels=2))
        reading = read_captures([trace])
        analysis = reading.captures[0].analysis
        assert analysis is not None
        object.__setattr__(analysis, "strip", tuple(analysis.strip[i % 2] for i in range(MOST_PIECES)))
        object.__setattr__(reading, "captures", reading.captures * (MOST_CAPTURES + 1))
        write_page(tmp_path / "r.html", reading, [])
        assert (tmp_path / "r.html").stat().st_size < MOST_BYTES
        assert "1 more captures are in the tables alone" in (tmp_path / "r.html").read_text()

    def test_two_captures_side_by_side(self, tmp_path: Path) -> None:
        old, new = (write(tmp_path / f"{kind}.json", events_of(3, kernels=n)) for kind, n in (("old", 3), ("new", 6)))
        out = tmp_path / "r.html"
        assert cli.main(["report", str(new), "--against", str(old), "--html", str(out)]) == 0
        text = out.read_text()
        assert "Changed most: " in text
        assert "kernels, what changed most first" in text

    def test_page_of_a_job_never_replaces_one(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from verl_profiler_conf.tools.report.job_page import main

        for name in ("report.html", "report_2.html"):
            before = {path: path.read_bytes() for path in run.glob("*.html")}
            assert main([str(run), ""]) == 0
            assert capsys.readouterr().out == f"{run / name}\n"
            assert "<h1>" in (run / name).read_text()
            assert {path: path.read_bytes() for path in before} == before

    def test_page_of_a_job_leaves_other_jobs_out(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from verl_profiler_conf.tools.report.job_page import main

        assert main([str(run), "another"]) == 1
        assert capsys.readouterr().err == f"{run}: no capture of this job in it\n"
        assert not list(run.glob("*.html"))

    def test_without_plotly_the_extra_is_named(
        self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "plotly.offline", None)
        assert cli.main(["report", str(run), "--html", str(tmp_path / "r.html")]) == 2
        assert "of verl-profiler-conf>[report]" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
class TestInTheBrowser:
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_plots_and_tables_are_there_and_nothing_else_happens(
        self, chromium: Browser, scheme: str, run: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "r.html"
        assert cli.main(["report", str(run), "--html", str(out)]) == 1
        page = chromium.open(out, scheme)
        drawn = page.evaluate(
            "Array.from(document.querySelectorAll('.plot')).map("
            "p => [p.dataset.plot, p.querySelectorAll('.point, .scatterlayer .trace').length > 0])"
        )
        assert drawn == [["time", True], ["stack", True], ["kernels", True], ["strip", True]]
        captions = page.evaluate("Array.from(document.querySelectorAll('caption')).map(c => c.textContent)")
        assert captions[:3] == ["asked for", "captures", "time per iteration, ms"]
        assert [caption.split(" (")[0].split(",")[0] for caption in captions[3:]] == ["top kernels", "top operators"]
        assert page.evaluate("window.evil === undefined && document.images.length === 0")
        assert "<img src=http://evil" in page.evaluate("document.querySelectorAll('table')[3].textContent")
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (_brightness(back) < 80) == (scheme == "dark")
        assert page.errors == []
        assert [url for url in page.requests if not url.startswith(("data:", "blob:"))] == []

    def test_switching_the_system_to_dark_redraws_the_plots(self, chromium: Browser, run: Path, tmp_path: Path) -> None:
        out = tmp_path / "r.html"
        cli.main(["report", str(run), "--html", str(out)])
        page = chromium.open(out, "light")
        colour = "document.querySelector('.plot')._fullLayout.font.color"
        before = page.evaluate(colour)
        redrawn = "new Promise(done => document.querySelector('.plot').on('plotly_afterplot', () => done(true)))"
        page.evaluate(f"void (window.redrawn = {redrawn})")
        page.scheme("dark")
        assert page.evaluate("window.redrawn")
        assert page.evaluate(colour) != before
        assert page.errors == []

    def test_a_real_trace(self, chromium: Browser, tmp_path: Path) -> None:
        out = tmp_path / "r.html"
        assert cli.main(["report", str(real_trace("cuda_nccl_sampled_rank0")), "--html", str(out)]) == 0
        page = chromium.open(out, "light")
        assert page.evaluate("document.querySelectorAll('.plot .main-svg').length") >= 4
        assert page.errors == []
        assert out.stat().st_size < MOST_BYTES


def _brightness(colour: str) -> float:
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / 3


class TestPicture:
    def test_the_plots_of_a_run(self, run: Path, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        out = tmp_path / "r.png"
        assert cli.main(["report", str(run), "--png", str(out)]) == 1
        assert out.read_bytes().startswith(b"\x89PNG")

    def test_dollars_in_a_name_are_no_formula(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        trace = write(tmp_path / "t.json", events_of(2, name=r"k$\frac{"))
        assert cli.main(["report", str(trace), "--png", str(tmp_path / "r.png")]) == 0

    def test_without_matplotlib_the_extra_is_named(
        self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        assert cli.main(["report", str(run), "--png", str(tmp_path / "r.png")]) == 2
        assert "of verl-profiler-conf>[report]" in capsys.readouterr().err
