"""`quartet bench`: load against an OpenAI endpoint, and what came of every request."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.cli.output import NO, OK, Part, Subparsers, Table, command, emit, progress
from engine.errors import ConfigError

if TYPE_CHECKING:
    from deploy.load.generator import Ledger, Lengths, Level
    from deploy.load.request import Endpoint

RECEIVED, GENERATED = "quartet_requests_received_total", "quartet_generation_tokens_total"
_LATE_S = 0.01

HELP = """\
A closed load (--concurrency) keeps so many requests open; an open one (--rate) sends them at Poisson times, however long the
answers take. Several values are run one after the other. Prompts are random words, their length set by what the server counts;
every answer is as long as asked (ignore_eos), unless --eos.

  quartet bench                                                    32 requests, 8 at a time, to 127.0.0.1:8000
  quartet bench --concurrency 1 8 32 64 --requests 200 --prompt 1024 --output 256
  quartet bench --rate 2 4 8 --seconds 60 --prompt 128:2048 --plot load.png
  quartet bench --url https://host/v1 --model NAME --api-key KEY --no-stream --json
  quartet bench --metrics http://127.0.0.1:9464/metrics            also: do the server's counters agree?

--metrics wants every replica (an http_sd list) and no other client beside this one; the API's address finds one replica only.

times: first token: sent to the first text. Per output token: first to last text, over the tokens behind the first, one value a
request. Between events: gaps inside streams. Tokens are those of the server's usage.
conservation: sent = finished + refused + failed + cut + timeout + unreachable + cancelled, every request exactly once.

exit codes: 0 all finished and everything is accounted for; 1 not so (--tolerate allows a share to fail); 2 nothing to load"""


def register(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = command(commands, "bench", "load an OpenAI endpoint: percentiles, throughput, conservation", HELP)
    where = parser.add_argument_group("where")
    where.add_argument("--url", default="http://127.0.0.1:8000", help="the API (default: %(default)s)")
    where.add_argument("--model", help="default: the first that /v1/models names")
    where.add_argument("--api-key", help="default: OPENAI_API_KEY")
    where.add_argument("--api", choices=["chat", "completions"], default="chat")
    where.add_argument("--metrics", metavar="URL", help="an exporter, http_sd list or API: hold its counters against ours")
    load = parser.add_argument_group("load")
    kind = load.add_mutually_exclusive_group()
    kind.add_argument("--concurrency", type=_count, nargs="+", metavar="N", help="requests open at once (default: 8)")
    kind.add_argument("--rate", type=_rate, nargs="+", metavar="R", help="Poisson arrivals a second")
    load.add_argument("--requests", type=_count, metavar="N", help="of each level (default: 32, unless --seconds)")
    load.add_argument("--seconds", type=_rate, metavar="S", help="send for so long, then wait for the answers")
    load.add_argument("--seed", type=int, default=0)
    what = parser.add_argument_group("requests")
    what.add_argument("--prompt", default="128", metavar="LOW[:HIGH]", help="prompt tokens (default: %(default)s)")
    what.add_argument("--output", default="64", metavar="LOW[:HIGH]", help="output tokens (default: %(default)s)")
    what.add_argument("--eos", action="store_true", help="let the model end its answers")
    what.add_argument("--temperature", type=float)
    what.add_argument("--no-stream", action="store_true", help="whole replies: no first-token times")
    what.add_argument("--timeout", type=_rate, default=600.0, metavar="S", help="of one request (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture: *.png, *.svg or *.pdf (needs matplotlib)")
    parser.add_argument("--tolerate", type=float, default=0.0, metavar="SHARE", help="of requests that may not finish (default: 0)")
    parser.set_defaults(run=run)


def _count(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is no count")
    return int(value)


def _rate(value: str) -> float:
    number = float(value)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{value!r} is not above zero")
    return number


def lengths(value: str, option: str) -> "Lengths":
    """`128`, or `128:1024`: drawn evenly between. ConfigError names the option."""
    from deploy.load.generator import Lengths

    low, _, high = value.partition(":")
    if not low.isdecimal() or (high and not high.isdecimal()) or not 1 <= int(low) <= int(high or low):
        raise ConfigError(f"{option}: {value!r} is neither a count nor LOW:HIGH")
    return Lengths(int(low), int(high or low))


def levels(args: argparse.Namespace) -> list["Level"]:
    """The loads to run, in order."""
    from deploy.load.generator import Level

    requests = args.requests or (None if args.seconds else 32)
    if args.rate:
        return [Level(rate=rate, requests=requests, seconds=args.seconds) for rate in args.rate]
    return [Level(concurrency=size, requests=requests, seconds=args.seconds) for size in args.concurrency or [8]]


def target(args: argparse.Namespace) -> "Endpoint":
    """Where to; asks the endpoint for its model where none is named. ConfigError when it does not answer."""
    from deploy.cli.fetch import api_key, base_of, get
    from deploy.load.request import Endpoint

    url, key = base_of(args.url), api_key(args.api_key)
    model = args.model
    if model is None:
        try:
            model = get(f"{url}/v1/models", key=key).json()["data"][0]["id"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"{url}/v1/models names no model: say --model") from error
    return Endpoint(url, model, args.api, key, not args.no_stream, not args.eos, args.temperature, args.timeout)


def run(args: argparse.Namespace) -> int:
    """Runs every level, prints what came of it, and says by its code whether all is accounted for."""
    import asyncio

    if args.plot is not None:
        from deploy.load.plot import check_plot

        check_plot(args.plot)
    shapes = lengths(args.prompt, "--prompt"), lengths(args.output, "--output")
    where = target(args)
    runs = asyncio.run(_levels(where, shapes, levels(args), args))
    found = [result for _, _, result in runs]
    if args.plot is not None:
        from deploy.load.plot import draw

        draw(args.plot, f"{where.model}: prompt {args.prompt}, output {args.output} tokens", runs)
    value = {
        "target": {"url": where.url, "model": where.model, "api": where.api, "stream": where.stream},
        "workload": {"prompt": args.prompt, "output": args.output, "ignore_eos": where.ignore_eos, "seed": args.seed},
        "levels": found,
    }
    emit(value, parts(where, found), as_json=args.json)
    return OK if all(good(result, args.tolerate) for result in found) else NO


Run = tuple[str, "Ledger", dict[str, Any]]


async def _levels(
    where: "Endpoint", shapes: tuple["Lengths", "Lengths"], wanted: list["Level"], args: argparse.Namespace
) -> list[Run]:
    from deploy.load.generator import LoadRun, Prompts, calibrate, connected

    runs: list[Run] = []
    async with connected(where) as client:
        prompts = Prompts(*shapes, await calibrate(client, where, args.seed), args.seed)
        for level in wanted:
            with progress(str(level), level.requests) as advance:
                load = LoadRun(client, where, prompts, advance)
                runs.append((str(level), load.ledger, await _measured(load, level, args.metrics, where.key)))
            if load.interrupted:
                break
    return runs


async def _measured(load: Any, level: "Level", exporter: str | None, key: str | None) -> dict[str, Any]:
    """Run a level; with an exporter, between two scrapes."""
    from deploy.cli.scrape import find
    from deploy.load.summary import against_server, summary

    if exporter is None:
        return summary(level, await load.run(level))
    urls = find(exporter, key)  # once: behind one address there may be several replicas, and the next answer another one's
    before = _counters(urls)
    ledger = await load.run(level)
    return {**summary(level, ledger), "server": against_server(ledger, before, _counters(urls))}


def _counters(urls: list[str]) -> dict[str, float]:
    from deploy.cli.scrape import scrape

    now = scrape(urls)
    return {"received": now.total(RECEIVED) or 0.0, "generated": now.total(GENERATED) or 0.0}


def good(result: dict[str, Any], tolerate: float) -> bool:
    """Accounted for, and enough of it finished."""
    requests = result["requests"]
    lost = requests["sent"] - requests["finished"]
    kept = result.get("server", {}).get("conserved", True)
    return bool(requests["conserved"] and kept and requests["finished"] and lost <= tolerate * requests["sent"])


def parts(where: "Endpoint", found: list[dict[str, Any]]) -> Iterator[Part]:
    """The report as text: a block a level, and one table over several."""
    yield f"{where.model} at {where.address}"
    for result in found:
        yield from _block(result)
    if len(found) > 1:
        yield _overview(found)


def _block(result: dict[str, Any]) -> Iterator[Part]:
    from deploy.load.summary import SHARES, TIMES

    yield ""
    heads = ("mean", *(f"p{share}" for share in SHARES), "max")
    rows = [(label, *(_ms(result[name][head]) for head in heads)) for name, label in TIMES.items() if result[name]]
    yield Table(f"{_label(result)}, {result['seconds']:.1f} s", ("ms", *(f">{head}" for head in heads)), rows)
    yield _throughput(result)
    yield _ends(result["requests"])
    yield from result["problems"]
    if result["short"]:
        yield f"{result['short']} answers are shorter than asked"
    if "server" in result:
        server = result["server"]
        agreed = "agrees" if server["conserved"] else "DOES NOT AGREE"
        yield f"the server {agreed}: client {server['client']}, server {server['server']}"
    lag = result["client_lag"]
    if lag and lag["p99"] > _LATE_S:
        yield f"this client was late itself (p99 {_ms(lag['p99'])} ms): its times are upper bounds; run it elsewhere, or with less"


def _label(result: dict[str, Any]) -> str:
    return f"concurrency {result['concurrency']}" if result["concurrency"] else f"rate {result['rate']:g}/s"


def _throughput(result: dict[str, Any]) -> str:
    tokens = f"{result['output_tokens_per_s']:,.1f} output and {result['prompt_tokens_per_s']:,.1f} prompt tokens a second"
    return f"{result['requests_per_s']:.2f} requests, {tokens}"


def _ends(requests: dict[str, Any]) -> str:
    from deploy.load.request import ENDS

    terms = " + ".join(f"{requests[end]} {end}" for end in ENDS if requests[end] or end == "finished")
    if requests["conserved"]:
        return f"sent {requests['sent']} = {terms}"
    return f"NOT CONSERVED: sent {requests['sent']}, but {terms}; missing {requests['missing']}, twice {requests['twice']}"


def _overview(found: list[dict[str, Any]]) -> Table:
    columns = ("load", ">requests/s", ">output tok/s", ">first p50", ">first p99", ">token p50", ">token p99", ">finished")
    rows = [
        (
            _label(result), f"{result['requests_per_s']:.2f}", f"{result['output_tokens_per_s']:,.1f}",
            *(_ms(result[name][share]) if result[name] else "-" for name in ("ttft", "tpot") for share in ("p50", "p99")),
            f"{result['requests']['finished']} of {result['requests']['sent']}",
        )
        for result in found
    ]  # fmt: skip
    return Table("all levels, times in ms", columns, rows)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"
