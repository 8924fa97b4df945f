"""sglang.bench_serving, with each backend that speaks to us; installed without what its engine needs."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients.cases import Server, case, expect, main

TOKENIZER = Path(__file__).resolve().parents[2] / "deploy" / "models" / "nano" / "trained" / "31b"
REQUESTS, INPUT, OUTPUT = 4, 32, 16
BENCH_S = 120


def bench(server: Server, backend: str) -> None:
    """Every request of a small run must be counted as completed, with all its tokens."""
    address = server.url.removeprefix("http://")
    host, _, port = address.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.jsonl"
        sizes = ["--num-prompts", str(REQUESTS), "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT)]
        data = ["--dataset-name", "random-ids", "--random-range-ratio", "1.0", *sizes]
        place = ["--host", host, "--port", port or "80", "--model", server.model, "--tokenizer", str(TOKENIZER)]
        command = [sys.executable, "-m", "sglang.bench_serving", "--backend", backend, *place, *data, "--output-file", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BENCH_S)
        assert done.returncode == 0, (done.stderr.strip() or done.stdout.strip()).splitlines()[-1]
        result = json.loads(out.read_text().splitlines()[-1])
    expect((result["completed"], result["total_output_tokens"]), (REQUESTS, REQUESTS * OUTPUT))


@case("--backend sglang")
def native(server: Server) -> None:
    bench(server, "sglang")


@case("--backend sglang-oai")
def completions(server: Server) -> None:
    bench(server, "sglang-oai")


@case("--backend sglang-oai-chat")
def chat(server: Server) -> None:
    bench(server, "sglang-oai-chat")


if __name__ == "__main__":
    main()
