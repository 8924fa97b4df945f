"""The committed boards as a page on loopback, drawn from a Prometheus' answers and drawn anew every few seconds.

    /                     the first board
    /quartet-operator     a board; `/panels` behind it: only its panels, which the page asks for again and again
    /quartet-operator/json    the same figures as data

It is no Grafana: no zoom, no variables, one span of time. What it asks is what the boards ask.
"""

import html
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from dashboards import web
from dashboards.boards.committed import CommittedBoard, CommittedPanel, paths, read
from dashboards.pictures import Span
from dashboards.prometheus import Api, Series
from dashboards.svg import newest, panel
from engine.errors import ConfigError

POINTS = 120
REFRESH_S = 5.0
_STYLE = """
body{margin:0;background:#f4f5f5;font:13px system-ui,sans-serif;color:#222}
nav{padding:8px 12px;background:#fff;border-bottom:1px solid #ddd}nav a{margin-right:14px}nav b{margin-right:14px}nav i{color:#888}
main{display:grid;grid-template-columns:repeat(24,1fr);grid-auto-rows:30px;gap:4px;padding:8px}
h2{margin:0;font-size:15px;grid-column:1/-1}section{background:#fff;border:1px solid #ddd;overflow:hidden;padding:2px 6px}
h3{margin:0;font-size:12px;height:17px}
section div{position:relative}svg{width:100%;height:100%;display:block}
small{position:absolute;left:2px;padding:0 2px;color:#444;background:#fffb}
polyline{stroke-width:1.5;fill-opacity:.6;vector-effect:non-scaling-stroke}output{display:block;text-align:center;font-size:24px}
footer{display:flex;justify-content:space-between;color:#999;font-size:10px;height:12px}
p{margin:0;font-size:11px}p b{margin-right:4px}
"""
_SCRIPT = """
setInterval(async () => {
  const state = document.getElementById("state"), board = document.querySelector("main");
  try {
    const reply = await fetch(location.pathname.replace(/\\/$/, "%s") + "/panels");
    const text = await reply.text();
    if (reply.ok) board.innerHTML = text;
    state.textContent = reply.ok ? new Date().toLocaleTimeString() : text;
  } catch (error) { state.textContent = "nobody answers here any more"; }
}, %d);
"""


@dataclass(frozen=True)
class PanelLines:
    """One panel and its lines, each a name and points."""

    drawn: CommittedPanel
    lines: tuple[tuple[str, Series], ...]


class Boards:
    """The boards asked of one Prometheus. `seconds`: how far back; not before `since` (unix time), when there was nothing."""

    def __init__(self, api: Api, seconds: float, window: str, since: float = 0.0) -> None:
        self._api, self._seconds, self._since = api, seconds, since
        self.pages: Mapping[str, CommittedBoard] = {page.uid: page for page in (read(path, window) for path in _ordered())}

    def span(self, now: float | None = None) -> Span:
        """The time that is shown."""
        end = time.time() if now is None else now
        seconds = min(self._seconds, max(end - self._since, POINTS / 2))
        step = math.ceil(1000 * seconds / POINTS) / 1000  # Prometheus reads milliseconds: the last point must be the end
        return Span(end - POINTS * step, end, step)

    def shown(self, page: CommittedBoard, span: Span) -> list[PanelLines]:
        """Every panel with its answers. ConfigError where Prometheus does not answer, or refuses a query."""
        return [PanelLines(drawn, tuple(self._lines(drawn, span))) for drawn in page.panels]

    def _lines(self, drawn: CommittedPanel, span: Span) -> list[tuple[str, Series]]:
        answers = ((asked.legend, self._api.ask_range(asked.expr, span.start, span.end, span.step)) for asked in drawn.asked)
        return [(series.named(legend), series) for legend, answer in answers for series in answer]

    def panels(self, page: CommittedBoard, span: Span) -> str:
        """The board's inside as HTML."""
        rows = [f'<h2 style="grid-row:{top + 1}">{html.escape(title)}</h2>' for top, title in page.rows]
        return "".join([*rows, *(panel(each.drawn, each.lines, span) for each in self.shown(page, span))])

    def data(self, page: CommittedBoard, span: Span) -> dict[str, Any]:
        """The board's newest figures: plain data; None for a line that has ended."""
        panels = [
            {
                "id": each.drawn.number,
                "title": each.drawn.title,
                "unit": each.drawn.unit,
                "values": [{"name": name, "value": newest(series, span)} for name, series in each.lines],
            }
            for each in self.shown(page, span)
        ]
        return {"board": page.uid, "title": page.title, "time": span.end, "panels": panels}

    def whole(self, page: CommittedBoard, span: Span) -> str:
        """The board as a page of its own."""
        names = [
            f"<b>{html.escape(each.title)}</b>" if each is page else f'<a href="/{each.uid}">{html.escape(each.title)}</a>'
            for each in self.pages.values()
        ]
        script = _SCRIPT % (f"/{page.uid}", int(REFRESH_S * 1000))
        head = f'<!doctype html><meta charset="utf-8"><title>{html.escape(page.title)}</title><style>{_STYLE}</style>'
        nav = f'<nav>{"".join(names)}<i id="state"></i></nav>'
        return f"{head}{nav}<main>{self.panels(page, span)}</main><script>{script}</script>"


def _ordered() -> Sequence[Path]:
    """The operator's first."""
    return sorted(paths(), key=lambda path: "operator" not in path.stem)


class LivePage:
    """The page while the `with` lasts. ConfigError when the port (0: a free one) is taken."""

    def __init__(self, boards: Boards, port: int) -> None:
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(boards))
        except OSError as error:
            raise ConfigError(
                f"dashboards: cannot listen on 127.0.0.1:{port}: {error.strerror} (--port chooses another)"
            ) from error
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, name="boards", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(boards: Boards) -> type[BaseHTTPRequestHandler]:
    makers: dict[str, tuple[str, Callable[[CommittedBoard, Span], str]]] = {
        "": ("text/html; charset=utf-8", boards.whole),
        "panels": ("text/html; charset=utf-8", boards.panels),
        "json": ("application/json", lambda page, span: json.dumps(boards.data(page, span))),
    }

    def answer(path: str) -> tuple[int, str, bytes]:
        """A page, or what is wrong."""
        uid, _, what = path.strip("/").partition("/")
        page = boards.pages.get(uid) if uid else next(iter(boards.pages.values()))
        if page is None or what not in makers:
            return 404, "text/plain", f"there are {', '.join(f'/{uid}' for uid in boards.pages)}\n".encode()
        kind, make = makers[what]
        try:
            return 200, kind, make(page, boards.span()).encode()
        except ConfigError as error:
            return 503, "text/plain; charset=utf-8", f"{error}\n".encode()

    return web.handler(answer)
