"""Several "machines" on one: each has a network, a process and a mount namespace of its own, and a link to a common switch.

Nothing of the host's network is touched, so ports and Ray's files in /tmp do not collide with anybody's. It needs root. Killing a
machine's init is pulling the plug; taking its link down is losing the network without a word.
"""

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.support.repo_rules import ROOT
from tests.support.stack.serve_process import wait

T = TypeVar("T")

CAN_MAKE = os.geteuid() == 0 and all(map(shutil.which, ("ip", "nsenter", "setpriv", "unshare")))
REASON = "machines in namespaces need root, ip, nsenter, setpriv and unshare"
CLIENT = "10.77.0.254"  # the address of the switch, where the tests' clients are
INIT = """
case "$2" in  # a checkout below /tmp stays where it is
    /tmp/*) mkdir -p "$0/tmp/${2#/tmp/}" && mount --bind "$2" "$0/tmp/${2#/tmp/}" || exit 1 ;;
esac
mount --rbind "$0/tmp" /tmp && mount -t tmpfs -o size=512m tmpfs /dev/shm || exit 1
exec "$1" -c '
import os, time
os.close(os.open("/tmp/up", os.O_CREAT))
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.05)
'
"""
_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


def ip(*words: str) -> None:
    """Runs `ip`."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@dataclass
class Machine:
    """One machine. `folder` has its /tmp; `port` is its end of the link at the switch."""

    namespace: str
    address: str
    folder: Path
    switch: str
    port: str

    def boot(self) -> None:
        """Start its init; its /tmp is as it was left."""
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        (self.folder / "tmp" / "up").unlink(missing_ok=True)
        space = ["ip", "netns", "exec", self.namespace, "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        init = ["/bin/sh", "-c", INIT, str(self.folder), sys.executable, str(ROOT)]
        # It ends with this process, whatever ends that.
        self._unshare = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *space, *init])
        wait((self.folder / "tmp" / "up").exists, 10)
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text().split()
        self.init = int(children[0])

    def command(self, script: str) -> list[str]:
        """The command line that runs `script` there, in a shell, in the checkout."""
        enter = ["nsenter", "--target", str(self.init), "--mount", "--pid", "--net"]
        return [*enter, "/bin/sh", "-c", f"cd {ROOT} && {script}"]

    def run(self, script: str, environ: dict[str, str], timeout_s: float = 120) -> str:
        """What `script` prints there. AssertionError with all that it said: it failed."""
        command = self.command(script)
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, f"{script}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def processes(self, words: str) -> list[int]:
        """Its living processes whose command line has `words`, by the host's numbers; none while it is off."""
        try:
            space = Path(f"/proc/{self.init}/ns/pid").stat().st_ino
        except FileNotFoundError:
            return []
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and _is_there(path, space, words)]

    def unplug(self) -> None:
        """Take its link down."""
        ip("-n", self.switch, "link", "set", self.port, "down")

    def plug(self) -> None:
        """Bring its link up again."""
        ip("-n", self.switch, "link", "set", self.port, "up")

    def kill(self) -> None:
        """Pull the plug: every process of it ends at once. Idempotent."""
        self._unshare.kill()
        self._unshare.wait(20)


def _is_there(process: Path, space: int, words: str) -> bool:
    try:
        same = (process / "ns" / "pid").stat().st_ino == space
        return same and words.encode() in (process / "cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:  # it has ended
        return False


@dataclass
class Machines:
    """Machines at one switch; the tests' clients are at the switch, too."""

    switch: str
    machines: Sequence[Machine]

    def from_client(self, work: Callable[[], T]) -> T:
        """What `work` returns on a thread whose sockets are at the switch."""
        found: list[T] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                enter_network(self.switch)
                found.append(work())
            except BaseException as error:  # noqa: BLE001 - raised again by who asked
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return found[0]


def enter_network(namespace: str) -> None:
    """Moves this thread, and no other, into a network namespace: the sockets that it makes are there."""
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    finally:
        os.close(handle)


@contextmanager
def machines(folder: Path, count: int) -> Iterator[Machines]:
    """So many machines, booted; they and their networks are gone afterwards."""
    _remove_networks_of_the_dead()
    name = f"q{os.getpid()}-{next(_numbers)}"
    made = [Machine(f"{name}-{i}", f"10.77.0.{i + 1}", folder / f"machine{i}", name, f"port{i}") for i in range(count)]
    try:
        _make_switch(name)
        for machine in made:
            _connect(machine)
            machine.boot()
        yield Machines(name, made)
    finally:
        for machine in made:
            if hasattr(machine, "init"):
                machine.kill()
            subprocess.run(["ip", "netns", "del", machine.namespace], check=False, capture_output=True)
            shutil.rmtree(machine.folder, ignore_errors=True)  # its sockets
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _remove_networks_of_the_dead() -> None:
    """Those of tests that were killed."""
    for network in Path("/run/netns").glob("q*-*"):
        if not Path(f"/proc/{network.name[1:].partition('-')[0]}").exists():
            subprocess.run(["ip", "netns", "del", network.name], check=False, capture_output=True)


def _make_switch(name: str) -> None:
    ip("netns", "add", name)
    ip("-n", name, "link", "set", "lo", "up")
    ip("-n", name, "link", "add", "switch", "type", "bridge")
    ip("-n", name, "address", "add", f"{CLIENT}/24", "dev", "switch")
    ip("-n", name, "link", "set", "switch", "up")


def _connect(machine: Machine) -> None:
    space, switch, port = machine.namespace, machine.switch, machine.port
    ip("netns", "add", space)
    ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
    ip("-n", switch, "link", "set", port, "master", "switch", "up")
    ip("-n", space, "link", "set", "lo", "up")
    ip("-n", space, "address", "add", f"{machine.address}/24", "dev", "eth0")
    ip("-n", space, "link", "set", "eth0", "up")
