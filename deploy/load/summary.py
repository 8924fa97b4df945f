"""Figures of a run: percentiles, throughput, and whether the ledger balances, alone and against the server's own counters."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from deploy.load.generator import Ledger, Level
from deploy.load.request import RequestResult

SHARES = (50, 90, 95, 99)
TIMES = {"ttft": "time to first token", "tpot": "time per output token", "itl": "between events", "e2e": "whole request"}
_DETAILS = 5


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Count, mean, percentiles (linear between neighbours) and extremes; None of nothing."""
    found = np.fromiter(values, dtype=np.float64)
    if not found.size:
        return None
    shares = dict(zip((f"p{share}" for share in SHARES), np.percentile(found, SHARES).tolist(), strict=True))
    return {"count": int(found.size), "mean": float(found.mean()), **shares, "min": float(found.min()), "max": float(found.max())}


def times(records: list[RequestResult]) -> dict[str, list[float]]:
    """Seconds of each kind, of the requests that finished. Without a stream there are only whole requests."""
    return {
        "ttft": [each.ttft for each in records if each.ttft is not None],
        "tpot": [each.tpot for each in records if each.tpot is not None],
        "itl": [gap for each in records for gap in each.gaps],
        "e2e": [each.e2e for each in records],
    }


def summary(level: Level, ledger: Ledger) -> dict[str, Any]:
    """Everything about one level, as plain data; seconds and tokens."""
    finished = [record for record in ledger.records if record.end == "finished"]
    seconds = max(ledger.seconds, 1e-9)
    output, prompt = (sum(getattr(each, name) for each in finished) for name in ("output_tokens", "prompt_tokens"))
    return {
        "concurrency": level.concurrency,
        "rate": level.rate,
        "seconds": ledger.seconds,
        "requests": ledger.balance(),
        "problems": problems(ledger.records),
        "short": sum(each.output_tokens < each.wanted for each in finished),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_s": len(finished) / seconds,
        "prompt_tokens_per_s": prompt / seconds,
        "output_tokens_per_s": output / seconds,
        "prompt_length": spread(each.prompt_tokens for each in finished),
        "output_length": spread(each.output_tokens for each in finished),
        **{name: spread(found) for name, found in times(finished).items()},
        "client_lag": spread(ledger.lag),
    }


def problems(records: list[RequestResult]) -> list[str]:
    """The commonest ends other than `finished`, with their details."""
    ends = Counter(f"{each.end}: {each.detail}" for each in records if each.end != "finished")
    return [f"{times} x {what}" for what, times in ends.most_common(_DETAILS)]


def against_server(ledger: Ledger, before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """The client's counts beside what the server's counters grew by meanwhile; `conserved` when they are equal.

    Holds when this client was the only one, and nothing was interrupted: an answer that was cut has tokens that no usage told.
    """
    reached = sum(record.end in ("finished", "failed", "cut", "timeout", "cancelled") for record in ledger.records)
    client = {"received": reached, "generated": sum(record.output_tokens for record in ledger.records)}
    server = {name: after[name] - before[name] for name in client}
    return {"client": client, "server": server, "conserved": client == server}
