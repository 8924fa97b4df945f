"""`quartet dashboards`: where boards, rules and provisioning are; builds them; shows them live from a Prometheus of its own."""

import argparse
import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.cli.output import NO, OK, Part, Subparsers, Table, command, emit
from engine.errors import ConfigError

if TYPE_CHECKING:
    from dashboards.prometheus import Api

FOLDER = Path(__file__).resolve().parents[2] / "dashboards"
BUILDERS = ("dashboards.boards", "dashboards.alerts")  # modules that write what is committed, when run
KINDS = {
    "*.json": "board",
    "*alert*.yaml": "rules",
    "*rule*.yaml": "rules",
    "*compose*.y*ml": "compose",
    "**/provisioning": "provisioning",
}
DISCOVERY = "http://127.0.0.1:9464/targets"  # where it is unless told otherwise
_INTERVAL_S = 2  # between scrapes of a Prometheus of ours
_WINDOW = "20s"  # what rates look back over
_SCRAPES = 4
_FOUND_TIMEOUT_S = 30.0
_NEXT = "import a board into Grafana and choose its data source; rules go into rule_files of prometheus.yml"

HELP = """\
Boards are code, committed as JSON that any Grafana imports ($datasource chooses the Prometheus); rules are Prometheus' own.

  quartet dashboards               what there is, and where
  quartet dashboards --build       write boards and rules anew, as `make dashboards` does
  quartet dashboards --live        all panels in a browser, from a Prometheus that it starts; beside `make serve`; Ctrl-C ends both
  quartet dashboards --live --json         the panels' figures once; a minute's traffic says more than a second's
  quartet dashboards --live --prometheus http://127.0.0.1:9090     from one that scrapes already
  quartet dashboards --json

--live needs the binary `prometheus` (apt-get install prometheus), which finds the groups through the deployment's own list.

exit codes: 0 as asked; 1 this checkout has no boards; 2 they cannot be built or shown here"""


def register(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = command(commands, "dashboards", "where boards and alerts are; builds them", HELP)
    parser.add_argument("--build", action="store_true", help="write them anew, then list them")
    parser.add_argument("--live", action="store_true", help="show every panel on a page at loopback, from a local Prometheus")
    live = parser.add_argument_group("with --live")
    live.add_argument("--url", default="http://127.0.0.1:8000", help="the API, or its http_sd list (default: %(default)s)")
    live.add_argument("--prometheus", metavar="URL", help="ask this one instead of starting one")
    live.add_argument("--port", type=int, default=8686, help="of the page; 0: a free one (default: %(default)s)")
    live.add_argument("--minutes", type=float, default=10.0, help="how far back panels go (default: %(default)g)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Builds if asked; lists, or shows live."""
    for builder in BUILDERS if args.build else ():
        build(builder)
    if args.live:
        return _live(args)
    found = listed(FOLDER)
    rows = [(each["kind"], each["path"], each["what"]) for each in found]
    parts: list[Part] = [Table("", ("kind", "file", "what it holds"), rows)]
    boards = sum(each["kind"] == "board" for each in found)
    parts.append(_NEXT if boards else "no boards in this checkout")
    emit({"folder": str(FOLDER), "files": found}, parts, as_json=args.json)
    return OK if boards else NO


def _live(args: argparse.Namespace) -> int:
    """The boards on a page until Ctrl-C or SIGTERM, or their figures once."""
    from dashboards.live import Boards, LivePage
    from deploy.launcher import Interrupted, interruptible

    began = time.time()
    with suppress(Interrupted), interruptible(), _prometheus(args) as api:
        boards = Boards(api, args.minutes * 60, _WINDOW, 0.0 if args.prometheus else began)
        if args.json:
            emit([boards.data(page, boards.span()) for page in boards.pages.values()], [], as_json=True)
            return OK
        with LivePage(boards, args.port) as page:
            emit(None, [f"the boards: {page.url}", f"drawn from the Prometheus at {api.url}; Ctrl-C ends it"], as_json=False)
            threading.Event().wait()
    return OK


@contextmanager
def _prometheus(args: argparse.Namespace) -> Iterator["Api"]:
    """One to ask: the one named, or one of ours, which finds what there is within seconds."""
    from dashboards.alerts import FILE
    from dashboards.prometheus import Api, Prometheus, jobs

    if args.prometheus is not None:
        api = Api(args.prometheus)
        api.targets()  # does it answer?
        yield api
        return
    with Prometheus(jobs(discovery(args.url)), FILE, _INTERVAL_S) as prometheus:
        if args.json:
            wait_found(prometheus.api)
        yield prometheus.api


def discovery(url: str) -> str:
    """The http_sd list that `url` is, or whose deployment's API it is. ConfigError: nobody answers, or it has none."""
    from deploy.cli.fetch import base_of, get

    if url.rstrip("/").endswith("/targets"):
        get(url)
        return url.rstrip("/")
    try:
        return _named(f"{base_of(url)}/health/ready")
    except ConfigError:
        with suppress(ConfigError):  # scaled to zero there is no replica to ask, but the list is there
            get(DISCOVERY)
            return DISCOVERY
        raise


def _named(ready: str) -> str:
    """What a replica's health names; it takes a moment to learn it. ConfigError: it does not."""
    from deploy.cli.fetch import api_key, get

    end = time.monotonic() + _FOUND_TIMEOUT_S / 3
    while time.monotonic() < end:
        found: Any = get(ready, key=api_key()).json()
        if isinstance(found, dict) and isinstance(found.get("discovery"), str):
            return str(found["discovery"])
        time.sleep(0.5)
    raise ConfigError(f"{ready} names no discovery endpoint: is metrics.discovery.enabled off, or is this another server?")


def wait_found(api: "Api") -> None:
    """Until every target has been scraped a few times, and Ray's exporter once, if there is one.

    ConfigError with what the scrapes said when the deployment's own list has not been found by then.
    """
    end = time.monotonic() + _FOUND_TIMEOUT_S
    ours = False
    while time.monotonic() < end:
        seen = api.ask(f'count_over_time(up{{job!="ray"}}[{int(_FOUND_TIMEOUT_S)}s])')
        ours = len(seen) >= 2 and all(series.last >= _SCRAPES for series in seen)
        if ours and api.ask('up{job="ray"}'):
            return
        time.sleep(0.25)
    if not ours:
        said = [f"{each['scrapeUrl']}: {each['lastError']}" for each in api.targets() if each["lastError"]]
        raise ConfigError(f"Prometheus did not find the deployment: {'; '.join(said) or 'its list has no targets'}")


def build(builder: str) -> None:
    """Runs `python -m <builder>`. ConfigError when this checkout has none, or with the last thing it said."""
    if importlib.util.find_spec(builder) is None:
        raise ConfigError(f"dashboards: this checkout has no {builder}, which would write boards or rules")
    done = subprocess.run([sys.executable, "-m", builder], cwd=FOLDER.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()
        raise ConfigError(f"dashboards: {builder} failed: {said[-1]}")


def listed(folder: Path) -> list[dict[str, str]]:
    """Kind, path and content of everything an operator may want, boards first."""
    seen: dict[Path, str] = {}
    for pattern, kind in KINDS.items():
        for path in sorted(folder.glob(pattern)):
            seen.setdefault(path, kind)
    return [{"kind": kind, "path": str(path), "what": _content(path, kind)} for path, kind in seen.items()]


def _content(path: Path, kind: str) -> str:
    if kind == "board":
        board = json.loads(path.read_text(encoding="utf-8"))
        return f"{board.get('title', path.stem)}: {_panels(board)} panels"
    if kind == "rules":
        import yaml

        groups = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("groups", [])
        rules = [rule for group in groups for rule in group.get("rules", [])]
        alerts = sum("alert" in rule for rule in rules)
        return f"{alerts} alerts, {len(rules) - alerts} recording rules"
    return ""


def _panels(board: dict[str, Any]) -> int:
    """Panels of a board, those inside collapsed rows included, rows themselves not."""
    panels = board.get("panels", [])
    return sum(panel.get("type") != "row" for panel in panels) + sum(_panels(panel) for panel in panels)
