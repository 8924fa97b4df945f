"""`quartet serve` beyond the one stack that test_stack shares: what it refuses, and a second signal."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.repo_rules import ROOT
from tests.support.stack.serve_process import Reader, Stack, command_line, folders, free_port, wait

pytestmark = pytest.mark.serve


# Neither is on this machine: nothing is downloaded before it is seen that they do not belong together.
STRANGERS = {"model": "google/gemma-4-31B-it", "mtp": {"model": "google/gemma-4-E2B-it-assistant"}}


def test_too_few_gpus_is_one_line_and_exit_code_2() -> None:
    """The launcher says what is missing and points to nano.yaml, before Ray is up, and leaves nothing."""
    before = folders()
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "deploy.cli", "serve", "deploy/gemma4.yaml", "--port", str(free_port())]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for word in ("4 GPUs on one node", "deploy/nano.yaml", "wait_for_nodes"):
        assert word in done.stderr
    assert folders() <= before


@pytest.mark.parametrize(
    ("http", "args", "error"),
    [
        (None, {}, "http_options: None is no mapping"),
        ({"port": free_port(), "prot": 1}, {}, "http_options.prot: unknown key, which Serve would ignore"),
        ({"port": "eighty"}, {}, "http_options.port: invalid literal for int() with base 10: 'eighty'"),
        ({"port": 0}, {}, "cannot listen on 127.0.0.1:0: it is no address that clients could use (--port chooses another)"),
        ({"port": free_port()}, {"model": "/no"}, " is no folder here, and no hub id (<owner>/<name>), nano: or dummy:<member>"),
        ({"port": free_port()}, {"model": "a/b"}, "is set; download it where there is a network, or give a folder"),
        ({"port": free_port()}, {"chat_template": "/no"}, "chat template /no: [Errno 2] No such file or directory: '/no'"),
        ({"port": free_port()}, {"attention": "triton"}, "runs on the CPU, where reference is the backend"),
        ({"port": free_port()}, {"mtp": {"model": "nano:31b"}}, "31b/config.json: model_type 'gemma4' is no Gemma 4 assistant"),
        ({"port": free_port()}, STRANGERS, "KV heads of layer 2 1, not 16; KV heads of layer 3 1, not 4"),
    ],
)
def test_a_config_that_cannot_be_served_is_one_line_and_exit_code_2(
    http: object, args: dict[str, Any], error: str, tmp_path: Path
) -> None:
    """As `check-config` says it, before Ray is up, and nothing is left."""
    before, config = folders(), yaml.safe_load((ROOT / "deploy" / "nano.yaml").read_text())
    path = tmp_path / "nano.yaml"
    config["applications"][0]["args"] |= args
    path.write_text(yaml.safe_dump(config | {"http_options": http}))
    command = [sys.executable, "-m", "deploy.cli", "serve", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"{error}\n")
    assert len(done.stderr.splitlines()) == 1
    assert folders() <= before  # what dead ones left is swept


def test_a_signal_at_boot_leaves_nothing(tmp_path: Path) -> None:
    """While the engine starts; Ray has a handler of its own by then, with which the launcher would end at once."""
    stack = Stack(tmp_path)
    try:
        stack.start(until="Serve up")
        folder = stack.folder
        assert stack.end(signal.SIGTERM) == 0, stack.said()
        assert [pid for pid in stack.tree if command_line(pid)] == []
        assert not folder.exists()
        assert stack.lines[-1] == "quartet: stopping\n"
    finally:
        stack.clean_up()


@pytest.mark.slow
def test_plain_serve_run_says_it_too(tmp_path: Path) -> None:
    """`serve run` of the same file on a cluster without GPUs prints the line within 15 s (on an idle machine) and can be ended."""
    config = yaml.safe_load((ROOT / "deploy" / "gemma4.yaml").read_text())
    config["http_options"]["port"] = free_port()
    path = tmp_path / "gemma4.yaml"
    path.write_text(yaml.safe_dump(config))
    session = tempfile.mkdtemp(prefix="qs-", dir="/tmp")  # short: Ray's sockets lie in it
    ray = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_TMPDIR": session, "TMPDIR": session}
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **ray}
    output = (tmp_path / "out").open("w+")
    serve = Path(sys.executable).with_name("serve")
    process = subprocess.Popen([str(serve), "run", str(path)], cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT)
    try:
        said = (tmp_path / "out").read_text
        took = wait(lambda: "needs 4 GPUs on one node" in said(), 30, said)
        print(f"\nserve run said it after {took:.1f} s")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(40)
        output.close()
        shutil.rmtree(session)


@pytest.mark.slow
def test_a_second_signal_ends_it_now(tmp_path: Path) -> None:
    """The drain would take a minute: the second signal ends open streams with an error event, and nothing is left."""
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": "nano-31b", "messages": messages, "stream": True, "ignore_eos": True, "max_tokens": 1900}
    stack = Stack(tmp_path)
    stack.start()
    try:
        reader = Reader(stack.url, body)
        wait(lambda: "data:" in reader.text, 20, stack.said)
        stack.grow()
        folder = stack.folder
        stack.process.send_signal(signal.SIGINT)
        time.sleep(1.5)
        assert reader.ended is None, "the first signal lets streams go on"
        begun = time.monotonic()
        assert stack.end(signal.SIGTERM) == 0
        assert time.monotonic() - begun < 15
        reader.join(1)
        assert "engine_restarting" in reader.text.rstrip().rpartition("\n\n")[2]
        assert [pid for pid in stack.tree if command_line(pid)] == []
        assert not folder.exists()
    finally:
        stack.clean_up()
