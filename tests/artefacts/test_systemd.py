"""The unit: well formed, and under a real systemd in a container it starts, drains, comes back and stays down as it says."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.repo_rules import ROOT

pytestmark = [pytest.mark.artefacts, pytest.mark.slow, pytest.mark.timeout(2400)]  # the first test builds the image

UNIT = ROOT / "deploy" / "systemd" / "quartet.service"
SCRIPT = Path(__file__).with_name("unit.sh")
NSPAWN = ("systemd-nspawn", "--quiet", "--boot", "--private-network", "--register=no", "--keep-unit")
TEST_UNIT = """\
[Unit]
After=network.target
[Service]
Type=oneshot
ExecStart=/bin/bash /unit.sh
[Install]
WantedBy=multi-user.target
"""


def run(*command: str, timeout_s: float = 600) -> str:
    """Runs a command, and returns what it printed. CalledProcessError: it failed."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=timeout_s).stdout.strip()


@pytest.fixture(scope="module")
def container(image: str) -> Iterator[Path]:
    """The root folder of a container of the image, with systemd in it, which is removed afterwards."""
    if shutil.which("systemd-nspawn") is None or shutil.which("buildah") is None or os.geteuid() != 0:
        pytest.skip("needs root and Debian's buildah and systemd-container")
    os.environ["BUILDAH_ISOLATION"] = "chroot"
    name = run("buildah", "from", image)
    try:
        install = "apt-get update && apt-get install --yes --no-install-recommends systemd-sysv procps"
        run("buildah", "run", "--user", "root", "--network", "host", name, "--", "bash", "-c", install)
        yield Path(run("buildah", "mount", name))
    finally:
        run("buildah", "rm", name)


@pytest.fixture(scope="module")
def log(container: Path) -> dict[str, str]:
    """What unit.sh saw."""
    nano = (ROOT / "deploy" / "nano.yaml").read_text()
    (container / "opt/quartet/.venv").symlink_to("/opt/venv")
    (container / "etc/quartet").mkdir()
    (container / "etc/quartet/config.yaml").write_text(nano)
    shutil.copy(UNIT, container / "etc/systemd/system/quartet.service")
    shutil.copy(SCRIPT, container / "unit.sh")
    (container / "etc/systemd/system/test.service").write_text(TEST_UNIT)
    (container / "var/cache/quartet").rmdir()  # the unit makes its own
    wanted = container / "etc/systemd/system/multi-user.target.wants"
    wanted.mkdir(exist_ok=True)
    (wanted / "test.service").symlink_to("../test.service")
    run(*NSPAWN, "--directory", str(container), timeout_s=1000)
    return dict(line.split(": ", 1) for line in (container / "log").read_text().splitlines())


def test_the_unit_is_well_formed(tmp_path: Path) -> None:
    """systemd-analyze has nothing to say against the unit, and something against a misspelt key."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    program = "/bin/true"  # the checkout is not at /opt/quartet here
    text = UNIT.read_text().replace("/opt/quartet/.venv/bin/quartet", program).replace("/usr/bin/nvidia-modprobe", program)
    path = tmp_path / "quartet.service"
    for planted, complaints in (("KillMode=mixed", False), ("KilMode=mixed", True)):
        path.write_text(text.replace("KillMode=mixed", planted))
        done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=60, check=False)
        assert ("KilMode" in done.stderr) == complaints
        assert bool(done.stderr) == complaints, done.stderr


def test_start_returns_when_it_serves(log: dict[str, str]) -> None:
    """`systemctl start` ends when the first request is answered; the service is not root, and its status has the first curl."""
    assert log["start"] == "0"
    assert log["answers_when_started"] == "yes"
    assert log["user"] not in ("root", "")
    assert log["status"].startswith("ready. Try: curl")


def test_stop_lets_an_open_stream_end(log: dict[str, str]) -> None:
    """A stream that is open at `systemctl stop` gets its last event, and nothing is left then."""
    assert int(log["events_before_stop"]) > 3
    assert log["stream_end"] == "data: [DONE]"
    assert log["result_of_stop"] == "success"
    assert log["processes_left"] == "0"
    print(f"stopped after {log['stop_seconds']} s")


def test_a_killed_launcher_comes_back(log: dict[str, str]) -> None:
    """After `kill -9` it is started again, and serves within the time of a boot and the second that systemd waits."""
    assert log["back_after_kill"] == "yes"
    boot_s, back_s = (int(log[name]) for name in ("boot_seconds", "back_seconds"))
    print(f"boot {boot_s} s, back after {back_s} s")
    assert back_s <= 1.25 * boot_s + 2  # whole seconds, and a machine that is not always equally busy


def test_exit_code_2_stays_down(log: dict[str, str]) -> None:
    """A config that cannot be served ends the service for good: it is not started again."""
    assert log["code"] == "2"
    assert log["state_after_exit_2"] == "failed"
    assert log["restarts_after_exit_2"] == "0"
