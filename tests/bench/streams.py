"""What a streamed token costs the CPU between engine and client: `python -m tests.bench.streams [--streams 32] [--step-ms 10]`.

The whole stack with the nano model on one rank or, with --step-ms, a rank that only waits so long in each step, which gives the
rate of a GPU: what wakes up once a step, or once a second, then serves more tokens. CPU of the replica's process (not of core and
rank, its children) and of HAProxy's, from /proc, over a closed load of endless answers, divided by the tokens that the client
received. What both use while nobody asks (Ray's own threads, heartbeats, scrapes of figures) is measured first and shown as it is
and as its part of each token.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.load.generator import Level
from tests.support.stack.load_steps import MODEL, send
from tests.support.stack.serve_process import Stack

IDLE_S = 10
HZ = os.sysconf("SC_CLK_TCK")


def cpu_s(pids: Sequence[int]) -> float:
    """CPU seconds that the processes have used, user and system, their children's not."""
    fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(found[11]) + int(found[12]) for found in fields) / HZ


def measured(stack: Stack, streams: int, tokens: int) -> dict[str, float]:
    """CPU microseconds a token of replica and ingress, and the tokens a second at which they were seen."""
    asyncio.run(send(stack.url, Level(concurrency=streams, requests=streams), 32, 0))  # warm
    processes = {"replica": stack.find("ServeReplica"), "haproxy": stack.find("haproxy")}
    everything = [pid for pids in processes.values() for pid in pids]
    idle = -cpu_s(everything)
    time.sleep(IDLE_S)
    idle = (idle + cpu_s(everything)) / IDLE_S
    before = {name: cpu_s(pids) for name, pids in processes.items()}
    ledger = asyncio.run(send(stack.url, Level(concurrency=streams, requests=streams), tokens, 1))
    used = {name: cpu_s(pids) - before[name] for name, pids in processes.items()}
    records = ledger.finished
    assert len(records) == streams, ledger.balance()
    count = sum(record.output_tokens for record in records)
    seconds = max(record.done for record in records) - min(record.sent for record in records)
    found = {f"{name}_us": round(value / count * 1e6, 1) for name, value in used.items()}
    return {"streams": streams, "tokens": count, "tokens_per_s": round(count / seconds), **found,
            "us_a_token": round(sum(used.values()) / count * 1e6, 1), "idle_ms_a_s": round(1e3 * idle, 1),
            "idle_us_a_token": round(1e6 * idle * seconds / count, 1)}  # fmt: skip


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.streams", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, help="no model: a rank that only waits, in each step, for so long")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = {"model": "nano:e2b", "tp": 1, "max_seqs": args.streams, "mtp": {}}
        paced = {"cli": "tests.support.stack.paced_cli", "environ": {"QUARTET_TEST_STEP_S": str((args.step_ms or 0) / 1e3)}}
        stack = Stack(Path(folder), args=engine | {"served_model_name": MODEL}, **(paced if args.step_ms else {}))
        try:
            stack.start()
            for _ in range(args.rounds):
                print(json.dumps(measured(stack, args.streams, args.tokens)), flush=True)
            stack.end()
        finally:
            stack.clean_up()


if __name__ == "__main__":
    main()
