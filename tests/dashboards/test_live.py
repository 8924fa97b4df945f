"""The boards as a page: what it shows is what Prometheus answers, it refreshes, and what is wrong is said in a line."""

import html
import json
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from xml.etree import ElementTree as ET

import pytest

from dashboards.alerts import FILE
from dashboards.live import Boards, LivePage
from dashboards.pictures import Span, text
from dashboards.prometheus import Api, Prometheus, Series
from dashboards.svg import newest, panel
from engine.errors import ConfigError
from tests.support.monitoring.scripted_exporters import replay, scripted_load, serve_exporters, wait_scraped

pytestmark = [pytest.mark.cpu, pytest.mark.alone]
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not here: apt-get install prometheus"
)

SECONDS = 8.0
WINDOW = "6s"


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    """A Prometheus that has scraped two groups for eight seconds, and still does."""
    load_script = scripted_load(groups=2, seconds=SECONDS)
    with serve_exporters(load_script.scripts) as ready, Prometheus(ready.scrapes, FILE) as prometheus:
        wait_scraped(prometheus.api, 5)
        replay(load_script, ready)
        yield prometheus.api


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return str(reply.read().decode())


@needs_prometheus
def test_the_page_shows_what_prometheus_answers(api: Api) -> None:
    """Of every line of every panel the newest value, as text beside its name, equals the API's own answer at that moment."""
    boards = Boards(api, 60, WINDOW)
    for page in boards.pages.values():
        span = boards.span(time.time() - 1)
        shown, data = boards.panels(page, span), boards.data(page, span)
        assert len(data["panels"]) == len(page.panels) > 15
        assert ET.fromstring(f"<main>{shown}</main>").tag == "main", "well-formed"
        said = 0
        for drawn, figures in zip(page.panels, data["panels"], strict=True):
            true = [(each.named(asked.legend), each.last) for asked in drawn.asked for each in api.ask(asked.expr, span.end)]
            found = [(each["name"], each["value"]) for each in figures["values"] if each["value"] is not None]
            assert sorted(found) == sorted(true)
            section = re.search(rf'<section [^>]*id="p{drawn.number}">.*?</section>', shown, re.DOTALL)
            assert section is not None
            assert html.escape(drawn.title) in section[0]
            if drawn.kind not in ("heatmap", "state-timeline"):
                values = [text(each["value"], drawn.unit) for each in figures["values"][:16] if each["value"] is not None]
                assert all(html.escape(value) in section[0] for value in values), (drawn.title, values, section[0])
                said += len(values)
        assert said > 10


@needs_prometheus
def test_the_page_over_http(api: Api) -> None:
    """The first board at /, each at its name with links to the others, its panels and data apart; the port is given back."""
    with LivePage(Boards(api, 60, WINDOW), 0) as page:
        first = fetch(page.url)
        assert "Quartet / Operator" in first
        assert '"/panels"' in first, "it asks for its panels again"
        assert not re.search(r"(src|href)=.https?:", first), "nothing from elsewhere"
        for uid in ("quartet-operator", "quartet-latency", "quartet-status"):
            assert fetch(f"{page.url}{uid}/panels").startswith("<h2")
            figures = json.loads(fetch(f"{page.url}{uid}/json"))
            assert figures["board"] == uid
            assert figures["time"] == pytest.approx(time.time(), abs=5)
        assert fetch(f"{page.url}quartet-status").count("<svg") > 10
        for path in ("nowhere", "quartet-status/more"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                fetch(f"{page.url}{path}")
        with pytest.raises(ConfigError, match="cannot listen on"):
            LivePage(Boards(api, 60, WINDOW), int(page.url.rstrip("/").rpartition(":")[2]))
    with pytest.raises(OSError, match="refused"):
        fetch(page.url)


def test_a_prometheus_that_is_gone_is_said() -> None:
    """The page answers 503 with the line, instead of old figures."""
    with LivePage(Boards(Api("http://127.0.0.1:9", timeout_s=1), 60, WINDOW), 0) as page:
        with pytest.raises(urllib.error.HTTPError, match="503") as raised:
            fetch(page.url)
        assert "no Prometheus answers at http://127.0.0.1:9" in raised.value.read().decode()


def test_a_line_that_has_ended_has_no_value() -> None:
    """A dead replica's last figure is not shown as if it were now; and a name cannot bring markup along."""
    span = Span(0.0, 100.0, 1.0)
    here, gone = Series({}, ((50.0, 1.0), (100.0, 7.5))), Series({}, ((50.0, 6.25),))
    assert (newest(here, span), newest(gone, span)) == (7.5, None)
    drawn = next(iter(Boards(Api("http://127.0.0.1:9"), 60, WINDOW).pages.values())).panels[6]
    section = panel(drawn, [("<b>here", here), ("gone", gone)], span)
    assert "7.5" in section
    assert "6.25" not in section.partition("</svg>")[2]
    assert "<b>here" not in section
