"""`quartet metrics`: the main figures of running groups, once or live."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from deploy.cli.output import NO, OK, Part, Subparsers, Table, command, emit, plain, rich_table

if TYPE_CHECKING:
    from deploy.cli.scrape import Snapshot

HELP = """\
URL is an exporter, an http_sd list (all its targets, added up), or the API, whose /health/ready names its exporter.
Latencies are quantiles of histograms: of everything since boot at first, then of what came since the line before.

  quartet metrics                                        the deployment on this machine, every 2 s
  quartet metrics http://127.0.0.1:9464/metrics --once
  quartet metrics --once --json | jq .requests_running

exit codes: 0 as asked; 1 a group reports that it is down, or a target does not answer; 2 nothing answers at URL"""

LATENCIES = {
    "time to first token": "quartet_time_to_first_token_seconds",
    "time per output token": "quartet_time_per_output_token_seconds",
    "between tokens": "quartet_inter_token_latency_seconds",
    "whole request": "quartet_e2e_request_latency_seconds",
}
LEVELS = {
    "requests_running": "quartet_requests_running",
    "requests_waiting": "quartet_requests_waiting",
    "waiting_tokens": "quartet_waiting_tokens",
    "preemptions": "quartet_preemptions_total",
    "groups_up": "quartet_engine_up",
}
RATES = {
    "requests_per_s": "quartet_requests_received_total",
    "prompt_tokens_per_s": "quartet_prompt_tokens_total",
    "generated_tokens_per_s": "quartet_generation_tokens_total",
}
OUTCOMES = "quartet_requests_total"
PAGES, PAGES_USED = "quartet_kv_pages", "quartet_kv_pages_used"
_SHARES = (0.5, 0.9, 0.99)


def register(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = command(commands, "metrics", "the main figures of a running deployment, live", HELP)
    where = "exporter, http_sd list or API (default: %(default)s)"
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help=where)
    parser.add_argument("--api-key", help="of the API, where it needs one (default: OPENAI_API_KEY)")
    parser.add_argument("--once", action="store_true", help="one scrape, then end")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between scrapes (default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Scrapes and shows, once or until Ctrl-C."""
    from deploy.cli.fetch import api_key
    from deploy.cli.scrape import find, scrape

    urls = find(args.url, api_key(args.api_key))
    first = scrape(urls)
    if args.once:
        value = figures(first, None)
        emit(value, parts(value), as_json=args.json)
        return OK if value["groups_up"] == value["targets"] else NO
    return _watch(lambda: scrape(urls), first, args)


def _watch(scrape: Callable[[], "Snapshot"], first: "Snapshot", args: argparse.Namespace) -> int:
    """Shows a scrape each interval. Ctrl-C ends it in order."""
    before, now = None, first
    with _shown(as_json=args.json) as show, suppress(KeyboardInterrupt):
        while True:
            show(figures(now, before))
            time.sleep(args.interval)
            before, now = now, scrape()
    return OK


@contextmanager
def _shown(*, as_json: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What to call with each scrape's figures: JSON is a line, a terminal gets a table in place, anything else blocks of lines."""
    if as_json:
        yield lambda value: _write(json.dumps(value) + "\n")
    elif not sys.stdout.isatty():
        yield lambda value: _write("\n".join([*plain(parts(value)), "", ""]))
    else:
        from rich.console import Console, Group
        from rich.live import Live

        with Live(console=Console(), auto_refresh=False) as live:
            yield lambda value: live.update(Group(*map(_rich, parts(value))), refresh=True)


def _rich(part: Part) -> Any:
    return rich_table(part) if isinstance(part, Table) else part


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def figures(now: "Snapshot", before: "Snapshot | None") -> dict[str, Any]:
    """The main figures as plain data; seconds and tokens. Rates and quantiles are over the time since `before`, if there is one."""
    seconds = now.time - before.time if before else None
    value: dict[str, Any] = {"targets": now.targets, "down": list(now.down), "seconds": seconds}
    value |= {name: now.total(metric) for name, metric in LEVELS.items()}
    value["groups_up"] = int(value["groups_up"] or 0)
    value |= {name: _rate(now, before, metric) for name, metric in RATES.items()}
    value["totals"] = {name.removesuffix("_per_s"): now.total(metric) for name, metric in RATES.items()}
    value["outcomes"] = now.by(OUTCOMES, "outcome")
    value["latencies"] = {label: _quantiles(now, before, metric) for label, metric in LATENCIES.items()}
    used = now.by(PAGES_USED, "group")
    value["pools"] = {name: {"pages": pages, "used": used.get(name, 0.0)} for name, pages in now.by(PAGES, "group").items()}
    return value


def _quantiles(now: "Snapshot", before: "Snapshot | None", metric: str) -> dict[str, float | None]:
    return {f"p{share * 100:g}": now.quantile(metric, share, before) for share in _SHARES}


def _rate(now: "Snapshot", before: "Snapshot | None", metric: str) -> float | None:
    if before is None:
        return None
    grown = now.increase(metric, before)
    return None if grown is None else grown / max(now.time - before.time, 1e-9)


def parts(value: dict[str, Any]) -> list[Part]:
    """The figures as tables."""
    over = "since boot" if value["seconds"] is None else f"over the last {value['seconds']:.1f} s"
    rates = value["totals"] if value["seconds"] is None else {name: value[f"{name}_per_s"] for name in value["totals"]}
    unit = "" if value["seconds"] is None else " a second"
    rows = [("groups up", f"{value['groups_up']} of {value['targets']}")]
    rows += [(name.replace("_", " "), _number(value[name])) for name in LEVELS if name != "groups_up"]
    rows += [(name.replace("_", " ") + unit, _number(rate)) for name, rate in rates.items()]
    rows += [(f"KV pages, {name}", _use(pool)) for name, pool in value["pools"].items()]
    ended = ", ".join(f"{_number(count)} {outcome}" for outcome, count in value["outcomes"].items() if count)
    rows.append(("requests ended", ended or "none"))
    heads = ("latency, " + over, *(f">p{share * 100:g}" for share in _SHARES))
    latencies = [(label, *(_milliseconds(found) for found in shares.values())) for label, shares in value["latencies"].items()]
    return [Table("", ("figure", ">now"), rows), Table("", heads, latencies), *(f"down: {line}" for line in value["down"])]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _use(pool: dict[str, float]) -> str:
    share = f"{100 * pool['used'] / pool['pages']:.0f} %" if pool["pages"] else "-"
    return f"{_number(pool['used'])} of {_number(pool['pages'])} ({share})"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{1000 * value:.1f} ms"
