"""Real clients against a running server: `python -m tests.clients.run [--only openai anthropic ...] [--url http://127.0.0.1:8000]`.

Each client has a virtual environment of its own under the cache folder, with the newest version that pip finds, and a script
`with_NAME.py` of what people do with it. Prints a table in Markdown: client, version, case, ok or why not; what a script printed
is in a log beside its environment. Exit code 1 when a case failed. The server is `make serve`, or any that serves the trained nano
model: the scripts ask what it was trained on.
"""

import argparse
import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.nano.random_models import cache_folder

ROOT = Path(__file__).resolve().parents[2]
INSTALL_S = 900
SCRIPT_S = 300
REASON = 160  # characters of a reason in the table
QUIET = {"DO_NOT_TRACK": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}  # nothing but the server is asked


@dataclass(frozen=True)
class Client:
    """`packages` are pip's requirements, those in `bare` are installed without their own; `source`: what a replay was written from.

    The version in the table is the first package's, or `source`.
    """

    name: str
    packages: Sequence[str]
    bare: Sequence[str] = ()
    source: str = ""

    @property
    def module(self) -> str:
        """Its script."""
        return f"tests.clients.with_{self.name}"


_BENCH_NEEDS = (
    "aiohttp", "datasets", "msgspec", "numpy", "orjson", "pillow", "psutil", "pybase64", "pyzmq", "requests", "transformers",
)  # fmt: skip
CLIENTS = (
    Client("openai", ["openai", "pydantic"]),
    Client("anthropic", ["anthropic"]),
    Client("langchain", ["langchain-openai", "langchain"]),
    Client("llamaindex", ["llama-index-llms-openai-like", "llama-index-core"]),
    Client("litellm", ["litellm", "mcp"]),
    Client("instructor", ["instructor", "openai"]),
    Client("pydantic_ai", ["pydantic-ai-slim[openai]"]),
    Client("lm_eval", ["lm-eval[api]", "transformers"]),
    Client("vllm_bench", ["httpx"], source="requests as at 02cfb53"),
    Client("sglang_bench", ["sglang", *_BENCH_NEEDS], bare=["sglang"]),
)


@dataclass(frozen=True)
class Target:
    """The server: its address without a path, the model's name there, and a key, which a server without keys ignores."""

    url: str
    model: str
    api_key: str


@dataclass(frozen=True)
class Row:
    """One line of the table. `reason`: why it failed, None where it did not."""

    client: str
    version: str
    case: str
    reason: str | None

    def __str__(self) -> str:
        return f"| {self.client} | {self.version} | {self.case} | {_one_line(self.reason) if self.reason is not None else 'ok'} |"


def _one_line(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= REASON else line[: REASON - 3] + "..."


def install(client: Client, folder: Path) -> Path:
    """The client's Python, its packages at their newest. RuntimeError has pip's last words."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True, clear=True)
    needed = [package for package in client.packages if package not in client.bare]
    for packages, options in ((needed, ()), (client.bare, ("--no-deps",))):
        if packages:
            _pip(python, [*options, "--upgrade", *packages])
    return python


def _pip(python: Path, arguments: Sequence[str]) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"not installed within {INSTALL_S} s") from error
    if done.returncode:
        raise RuntimeError(f"pip: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}")


def version(client: Client, python: Path) -> str:
    """Of the client's first package; or what its requests are replayed from."""
    if client.source:
        return client.source
    name = client.packages[0].partition("[")[0]
    command = [str(python), "-c", f"import importlib.metadata as m; print(m.version({name!r}))"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def ask(module: str, python: Path, folder: Path, target: Target, *, limit_s: float = SCRIPT_S) -> Iterator[tuple[str, str | None]]:
    """(case, reason or None) of a script; cases that it did not come to fail with what ended it."""
    report, log = folder / "report.jsonl", folder / "log.txt"
    report.unlink(missing_ok=True)
    command = [str(python), "-m", module, "--url", target.url, "--model", target.model, "--report", str(report)]
    with log.open("w") as output:
        ended = _ended(command, target.api_key, output.fileno(), limit_s)
    lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    if not lines:
        yield "start", f"{ended}: {_last_line(log)}"
        return
    found = {line["case"]: line["reason"] for line in lines[1:]}
    for name in lines[0]["cases"]:
        yield name, found.get(name, f"no outcome: {ended}")


def _ended(command: Sequence[str], api_key: str, output: int, limit_s: float) -> str:
    """Runs a command at the repository's root; how it ended."""
    environ = {**os.environ, "OPENAI_API_KEY": api_key, "ANTHROPIC_API_KEY": api_key, **QUIET}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environ, stdout=output, stderr=output, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"the script did not end within {limit_s:.0f} s"
    return f"the script ended with exit code {done.returncode}"


def _last_line(log: Path) -> str:
    said = log.read_text(errors="replace").strip().splitlines()
    return said[-1] if said else "it said nothing"


def rows(client: Client, cache: Path, target: Target) -> Iterator[Row]:
    """A client's part of the table."""
    folder = cache / client.name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        python = install(client, folder / "environment")
    except RuntimeError as error:
        yield Row(client.name, "", "install", str(error))
        return
    installed = version(client, python)
    for name, reason in ask(client.module, python, folder, target):
        yield Row(client.name, installed, name, reason)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.run", description="Real clients against a running server.")
    names = [client.name for client in CLIENTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CLIENT", help=", ".join(names))
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server, without a path")
    parser.add_argument("--model", default="nano-31b")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--cache", type=Path, default=cache_folder() / "clients", help="where the environments lie")
    args = parser.parse_args(arguments)
    target = Target(args.url, args.model, args.api_key)
    sys.stdout.write("| client | version | case | result |\n|---|---|---|---|\n")
    failed = total = 0
    for client in CLIENTS:
        for row in rows(client, args.cache, target) if client.name in args.only else ():
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()
            total, failed = total + 1, failed + (row.reason is not None)
    sys.stdout.write(f"\n{total - failed} of {total} cases ok\n")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
