"""The pages as a browser shows them: drawn, without a complaint, and without asking anybody for anything."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.perf.reports import comparison, comparison_page, findings, page
from penstock.perf.reports.document import Document
from tests.perf.reports.browser import Browser, Opened, installed
from tests.perf.reports.sample_documents import run

OWN = ("file:", "data:", "blob:", "about:")
HOSTILE = """</script><script>alert(1)</script><img src="https://example.org/x">"""

THEMED = """new Promise((done) => {
  const look = () => document.documentElement.dataset.theme === "%s" ? done(true) : requestAnimationFrame(look);
  look();
})"""

pytestmark = pytest.mark.skipif(installed() is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(str(installed()), tmp_path_factory.mktemp("profile"))
    try:
        yield opened
    finally:
        opened.close()


def _whole(name: str) -> Document:
    document = run(name=name)
    document.levels[1].client.errors = {HOSTILE: 1}
    document.levels[-1].ended = HOSTILE
    return document


@pytest.fixture(scope="module")
def shown(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    place = tmp_path_factory.mktemp("page") / "a.html"
    page.write(_whole(f"resnet {HOSTILE}"), place)
    return browser.open(place.as_uri(), dark=True)


def _points(opened: Opened, chart: str) -> list[int]:
    """How many points each line of a chart has."""
    lines = f"[...document.querySelectorAll('#chart-{chart} .scatterlayer .trace')]"
    return list(opened.value(f"{lines}.map(line => line.querySelectorAll('.point').length)"))


def test_the_curve_has_a_point_for_each_level(shown: Opened) -> None:
    lines = "[...document.querySelectorAll('#chart-curve .scatterlayer .js-line')]"

    assert shown.value(f"{lines}.map(line => line.getAttribute('d').length > 20)") == [True, True, True]
    assert _points(shown, "curve") == [7, 7, 7, 3]


def test_every_chart_draws_something(shown: Opened) -> None:
    embed_figures = """Object.fromEntries([...document.querySelectorAll('.chart')].map(chart =>
        [chart.id, chart.querySelectorAll('.point, .js-line, .hm image').length]))"""
    drawn = shown.value(embed_figures)

    assert set(drawn) == {
        f"chart-{name}"
        for name in ("curve", "within", "yields", "by-load", "tails", "split", "batches", "trace", "windows")
    }
    assert [name for name, marks in drawn.items() if not marks] == []


def test_the_page_makes_no_requests_and_logs_no_errors(shown: Opened) -> None:
    assert [url for url in shown.requests if not url.startswith(OWN)] == []
    assert shown.requests
    assert shown.complaints == []


def test_a_model_name_is_shown_and_not_executed(shown: Opened) -> None:
    assert shown.value("document.querySelector('h1').textContent") == f"resnet {HOSTILE}"
    assert shown.value("document.querySelectorAll('img').length") == 0


def test_the_browser_recomputes_another_target_as_python_does(shown: Opened) -> None:
    document = _whole("x")
    for target in (1.0, 3.3, 12.0, 500.0):
        shown.value(
            f"""(() => {{ const typed = document.getElementById('typed'); typed.value = '{target}';
            typed.dispatchEvent(new Event('input')); }})()"""
        )
        bars = "document.getElementById('chart-within').data[0].y"
        heights: list[Any] = shown.value(bars)
        true = [findings.goodput(level, target) for level in findings.sound(document.levels)]

        assert heights == pytest.approx(true)
        words = shown.value("document.querySelector('.target output').textContent")
        assert words.startswith(f"{max(true):,.0f} inferences/s within {target:g} ms" if max(true) >= 100 else "")
        assert shown.value("document.getElementById('slider').valueAsNumber") == pytest.approx(
            math.log10(target), abs=1.5
        )


def test_the_scale_can_be_switched(shown: Opened) -> None:
    kind = "document.getElementById('chart-curve').layout.yaxis.type"
    first = shown.value(kind)
    shown.value("[...document.querySelectorAll('[data-figure=curve]')].find(b => b.ariaPressed === 'false').click()")

    assert {first, shown.value(kind)} == {"log", "linear"}


def test_the_page_is_dark_by_preference_and_light_in_print(shown: Opened) -> None:
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    assert shown.value("document.documentElement.dataset.theme") == "dark"

    shown.ask("Emulation.setEmulatedMedia", media="print", features=dark)
    assert shown.value(THEMED % "light")
    assert shown.complaints == []


def test_the_page_fits_the_width_of_a_phone(shown: Opened) -> None:
    shown.ask("Emulation.setEmulatedMedia", media="")
    shown.ask("Emulation.setDeviceMetricsOverride", width=390, height=900, deviceScaleFactor=1, mobile=False)

    assert shown.value("document.documentElement.scrollWidth") <= 390


def test_the_page_fits_the_width_of_paper(shown: Opened) -> None:
    shown.ask("Emulation.setEmulatedMedia", media="print")
    shown.ask("Emulation.setDeviceMetricsOverride", width=720, height=1000, deviceScaleFactor=1, mobile=False)

    assert shown.value("document.documentElement.scrollWidth") <= 720


def test_several_runs_are_overlaid_in_one_page(browser: Browser, tmp_path: Path) -> None:
    compared = comparison.runs([(HOSTILE, run()), ("b", run(5, 1.3)), ("plain", run(2, 0.7, server=False, gpu=False))])
    comparison_page.write(compared, tmp_path / "c.html")
    opened = browser.open((tmp_path / "c.html").as_uri())

    assert _points(opened, "curve") == [7] * 6
    assert _points(opened, "ratios") == [7] * 4
    assert [url for url in opened.requests if not url.startswith(OWN)] == []
    assert opened.complaints == []
