"""The page: whole in itself, safe whatever a model or server calls itself, and silent about what was not measured."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from plotly import graph_objects

from penstock.perf.reports import charts, comparison, comparison_page, findings, markup, page, timelines
from penstock.perf.reports.charts import Figure
from penstock.perf.reports.document import Document, ServerSide
from tests.perf.reports.sample_documents import run

HOSTILE = """</script><script>alert(1)</script><img src="https://example.org/x" onerror='alert(2)'>&amp;\x1b[2J\u202e"""


class Read(HTMLParser):
    """A page as a browser would read it: its elements, its text, and what it carries as JSON."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.carried: dict[str, Any] = {}
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = dict(attrs).get("id") or "script" if tag == "script" else tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside.startswith("carried-"):
            self.carried[self._inside.removeprefix("carried-")] = json.loads(data)
        elif self._inside not in {"script", "style"}:
            self.text += data


@pytest.fixture(autouse=True)
def _without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five megabytes are not read again for every page; test_in_browser.py has them."""

    class Plotly:
        get_plotlyjs = staticmethod(lambda: "/* plotly.js */")

    monkeypatch.setattr(markup, "needed", lambda _: Plotly)


def _figures(document: Document) -> dict[str, Figure]:
    return page._figures(document, findings.target_ms(document))


def test_every_chart_is_accepted_by_plotly() -> None:
    first, second = run(), run(5, 1.3)
    compared = comparison.runs([("a", first), ("b", second)])
    every = [*_figures(first).values(), comparison_page.overlaid_curves(compared), comparison_page._ratios(compared)]

    assert len(every) == 11
    for figure in every:
        assert figure
        graph_objects.Figure(data=figure.traces, layout=figure.layout)


def test_a_page_embeds_plotly_once_and_refers_to_no_other_site() -> None:
    read = Read(page.page(run()))

    links = [
        value
        for _, attributes in read.elements
        for name, value in attributes.items()
        if name in {"src", "href", "action"}
    ]
    assert page.page(run()).count("/* plotly.js */") == 1
    assert [link for link in links if link and not link.startswith(("#", "data:"))] == []


def test_a_page_embeds_the_run_that_it_shows() -> None:
    document = run()

    assert Read(page.page(document)).carried["document"]["levels"][3]["client"]["histogram"] == (
        document.levels[3].client.histogram
    )


def test_unsound_levels_are_crosses_and_not_part_of_the_line() -> None:
    shown = charts.latency_curve(run(), None)

    assert shown
    lines, crosses = shown.traces[:4], shown.traces[4]
    assert [len(line["x"]) for line in lines] == [7] * 4
    assert crosses["mode"] == "markers+text"
    assert crosses["text"] == ["96", "128", "192"]


def test_a_page_begins_with_what_went_wrong() -> None:
    text = Read(page.page(run())).text

    assert text.index("The run ended before its time: the server closed all connections.") < text.index("Knee")
    assert "Not part of the curve: concurrency 128: not stable." in text


@pytest.mark.parametrize("words", [HOSTILE, "<b>bold</b>", '" onmouseover="x', "]]>", "<!--", "\ud800"], ids=range(6))
def test_any_text_of_a_run_is_escaped(words: str) -> None:
    document = run(name=words)
    document.url = document.failed = document.machine["cpu"] = words
    document.command = ["penstock", words]
    document.levels[1].client.errors = {words: 10**6}
    document.levels[2].stable, document.levels[2].ended = False, words
    document.options = {words: {words: words}}
    side = document.levels[5].server
    assert side
    side.composing = {words: ServerSide(1, 1, 1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)}
    escape_markup = Read(page.page(run()))
    read = Read(page.page(document))

    kinds = [tag for tag, _ in read.elements]
    assert {"img", "b"} & set(kinds) - {tag for tag, _ in escape_markup.elements} == set()
    assert kinds.count("script") == [tag for tag, _ in escape_markup.elements].count("script")
    assert not [name for _, attributes in read.elements for name in attributes if name.startswith("on")]
    assert read.carried["document"]["model"]["name"] == words
    assert "\x1b" not in read.text
    assert "\u202e" not in read.text


def test_text_that_plotly_would_read_as_markup_is_escaped() -> None:
    document = run()
    document.levels[2].stable, document.levels[2].ended = False, HOSTILE
    shown = charts.latency_curve(document, None)

    assert shown
    assert not re.search("<(?!br>|extra>|/extra>)", json.dumps(shown.traces))
    compared = comparison_page.overlaid_curves(comparison.runs([(HOSTILE, document)]))
    assert compared
    assert not re.search("<(?!br>|extra>|/extra>)", json.dumps(compared.traces))


def test_a_missing_measurement_is_stated_and_has_no_chart() -> None:
    document = run(server=False, gpu=False)
    read = Read(page.page(document))

    assert {"split", "batches", "trace"} & set(read.carried["figures"]) == set()
    assert {attributes.get("id") for _, attributes in read.elements} & {
        "chart-split",
        "chart-batches",
        "chart-trace",
    } == set()
    assert "The server gave no statistics: where its time went is not known." in read.text
    assert "Nothing was sampled of GPUs and CPUs." in read.text
    assert "Energy" not in read.text


def test_a_run_without_levels_has_a_page() -> None:
    document = run()
    document.levels, document.interrupted = [], True
    read = Read(page.page(document))

    assert read.carried["figures"] == {}
    assert "No level was measured." in read.text
    assert "No level has an answer: there is no curve to draw." in read.text


def test_a_run_whose_levels_all_failed_has_a_page() -> None:
    document = run()
    document.levels = document.levels[-3:]

    assert "Goodput" not in Read(page.page(document)).carried["figures"]
    assert "Not part of the curve: concurrency 192" in Read(page.page(document)).text


def test_a_level_that_died_before_any_answer_does_not_break_the_page() -> None:
    document = run()
    died = document.levels[-1]
    died.client.requests, died.client.latency_us, died.client.histogram = 0, {"mean": 0.0}, ""
    died.windows, died.server, died.samples = [], None, None
    read = Read(page.page(document))

    assert "192" not in read.carried["figures"]["curve"]["traces"][4]["text"]
    assert "Connection reset by peer" in read.text


def test_the_knee_is_explained_and_marked_if_it_is_at_an_end() -> None:
    document = run()
    assert "Kleinrock's power" in Read(page.page(document)).text
    assert "Here it is" not in Read(page.page(document)).text

    document.levels = document.levels[3:5]
    assert "Here it is the lowest load of the run: the true one may lie below." in Read(page.page(document)).text


def test_the_embedded_histograms_contain_every_request() -> None:
    document = run()
    embed_json = Read(page.page(document)).carried["spreads"]

    assert [sum(each["counts"]) for each in embed_json] == [level.client.requests for level in document.levels[:7]]


def test_gaps_in_samples_stay_gaps() -> None:
    document = run()
    samples = document.levels[0].samples
    assert samples
    samples.series["server.cores"][1] = None
    samples.series["odd.<b>"] = []
    shown = timelines.sample_timelines(document)

    assert shown
    cores = next(trace for trace in shown.traces if trace["name"] == "server, cores")
    assert cores["y"][1] is None
    assert len(cores["x"]) == len(cores["y"])


def test_without_samples_no_timeline_is_drawn() -> None:
    document = run()
    for level in document.levels:
        level.samples = None
        level.windows = []

    assert timelines.sample_timelines(document) is None
    assert timelines.windows(document) is None


def test_the_models_of_an_ensemble_have_a_table() -> None:
    document = run()
    side = document.levels[5].server
    assert side
    side.composing = {"resize": ServerSide(10, 5, 10, 1000.0, 0.0, 250.0, 0.0, 0.0, 2.0, version="1")}
    text = Read(page.page(document)).text

    assert "Models that it is composed of" in text
    assert "resize" in text


def test_pages_of_several_runs_begin_with_their_differences(tmp_path: Path) -> None:
    other = run(5, 1.3)
    other.machine["cpu"] = "another"
    compared = comparison.runs([("a", run()), ("b", other)])
    comparison_page.write(compared, tmp_path / "c.html")
    text = Read((tmp_path / "c.html").read_text("utf-8")).text

    places = [text.rindex(words) for words in ("different machines (cpu)", "What differs", "Level by level")]
    assert places == sorted(places)


@pytest.mark.parametrize("server", [True, False])
def test_every_link_of_a_page_has_a_target(server: bool) -> None:
    document = run(server=server)
    document.levels = document.levels[-3:]
    attributes = [attributes for _, attributes in Read(page.page(document)).elements]

    links = {str(each["href"]).removeprefix("#") for each in attributes if str(each.get("href")).startswith("#")}
    assert "levels" in links
    assert links <= {each.get("id") for each in attributes}
