"""sglang.bench_serving, with each backend that speaks to us; its own code, without the engine that its package imports first."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients.cases import Server, case, expect, main

TOKENIZER = Path(__file__).resolve().parents[2] / "deploy" / "models" / "nano" / "trained" / "31b"
REQUESTS, INPUT, OUTPUT = 4, 32, 16
BENCH_S = 120

# sglang.bench_serving, but for the __init__ of four packages, which import torch and kernels that the client does not use. The one
# module of those that it takes something from has a constant, for a kind of server that we are not.
PROGRAM = """
import importlib.util, sys, types
root = importlib.util.find_spec("sglang").submodule_search_locations[0]
for name in ("", ".srt", ".srt.utils", ".srt.disaggregation"):
    package = sys.modules["sglang" + name] = types.ModuleType("sglang" + name)
    package.__path__ = [root + name.replace(".", "/")]
constants = sys.modules["sglang.srt.disaggregation.utils"] = types.ModuleType("sglang.srt.disaggregation.utils")
constants.FAKE_BOOTSTRAP_HOST = ""
from sglang.benchmark.serving import cli_main
cli_main()
"""


def bench(server: Server, backend: str) -> None:
    """Every request of a small run must be counted as completed, with all its tokens."""
    address = server.url.removeprefix("http://")
    host, _, port = address.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.jsonl"
        sizes = ["--num-prompts", str(REQUESTS), "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT)]
        data = ["--dataset-name", "random-ids", "--random-range-ratio", "1.0", *sizes]
        place = ["--host", host, "--port", port or "80", "--model", server.model, "--tokenizer", str(TOKENIZER)]
        command = [sys.executable, "-c", PROGRAM, "--backend", backend, *place, *data, "--output-file", str(out)]
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
