"""What every Prometheus reads, of version 2 or 3, whatever it asks for: the names of vLLM keep their colon."""

import re
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from dashboards.exporter import Exporter
from engine.events import EngineLoad
from engine.protocol import DraftPosition
from tests.support.engine.load_figures import load
from tests.support.monitoring.exporter_fixture import ANSWERED, exporter_after, pools
from tests.support.monitoring.metrics_reference import documented_aliases, lacking_aliases
from tests.support.monitoring.prometheus import Prometheus

pytestmark = pytest.mark.pure

OPENMETRICS = "application/openmetrics-text"
REST = "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
ACCEPTS = [
    None,
    "*/*",
    "text/plain;version=0.0.4",
    OPENMETRICS,
    f"{OPENMETRICS};version=1.0.0,{OPENMETRICS};version=0.0.1;q=0.75,{REST}",  # Prometheus 2
    # Prometheus 3
    f"{OPENMETRICS};version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,{REST}",
    f"{OPENMETRICS};version=1.0.0;escaping=underscores;q=0.6,text/plain;version=1.0.0;escaping=underscores;q=0.5,{REST}",
    f"{OPENMETRICS};version=1.0.0;escaping=dots,text/plain;version=1.0.0;escaping=values;q=0.5",
]


@contextmanager
def ours(exporter: Exporter) -> Iterator[str]:
    yield exporter.serve("127.0.0.1", 0)
    exporter.close()


@contextmanager
def librarys(exporter: Exporter) -> Iterator[str]:
    """The planted fault: the library's own server, which heeds Accept."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(exporter)
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()
    thread.join()


def full() -> Exporter:
    """An exporter whose every alias has a sample."""
    return exporter_after(*ANSWERED, EngineLoad(load(7, pools(7, 9), draft_positions=[DraftPosition(0, 6, 5)]), 0.03))


@pytest.mark.parametrize("accept", ACCEPTS)
def test_a_colon_is_never_escaped(accept: str | None) -> None:
    """Whatever Accept says the page is the plain text format, and has every documented name. Planted: the library's server, which
    escapes the colon for some of these."""
    escapes = accept is not None and accept.startswith(OPENMETRICS) and "allow-utf-8" not in accept
    for serving, lacks in ((ours, False), (librarys, escapes)):
        with serving(full()) as url:
            request = urllib.request.Request(url, headers={"Accept": accept} if accept else {})
            with urllib.request.urlopen(request, timeout=5) as reply:
                kind = reply.headers["Content-Type"]
                names = set(re.findall(r"^([a-zA-Z_:]\w*(?::\w+)?)", reply.read().decode(), re.MULTILINE))
        assert bool(lacking_aliases(names)) is lacks
        assert serving is librarys or kind == "text/plain; version=0.0.4; charset=utf-8"


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not here: apt-get install prometheus")
@pytest.mark.parametrize("serving", [ours, librarys])
def test_prometheus_holds_every_name_of_vllm(serving: Callable[[Exporter], object]) -> None:
    """The Prometheus of this machine. Planted: the library's server, of which Prometheus 2 has no name of vLLM's at all."""
    with serving(full()) as url:
        scrape = {"job_name": "quartet", "static_configs": [{"targets": [url.removeprefix("http://").removesuffix("/metrics")]}]}
        with Prometheus([scrape]) as prometheus:
            deadline = time.monotonic() + 20
            while not (found := prometheus.api.ask('{job="quartet",__name__!~"up|scrape_.*"}')) and time.monotonic() < deadline:
                time.sleep(0.2)
            escaped = serving is librarys and prometheus.api.version.startswith("2.")
    lacking = lacking_aliases({series.labels["__name__"] for series in found})
    assert lacking == (documented_aliases() if escaped else set())
