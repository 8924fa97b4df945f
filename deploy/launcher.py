"""Starts Ray and Serve on this machine, and ends them without leaving a process, port, socket or
file.

Ray's processes become descendants (PR_SET_CHILD_SUBREAPER), so the end can find and kill them. ray
is imported after its environment is set.
"""

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import NoReturn

from cluster.attention_choice import attention_here
from cluster.capability import probe
from cluster.children import python_path
from deploy import environment
from deploy.edge.edge_settings import WILDCARDS, url_host
from deploy.edge.keys.key_file import parse, read
from deploy.haproxy_status import routed
from deploy.nodes import check_nodes, check_replicas
from deploy.placement import place
from deploy.ports import Ports, check_port
from deploy.processes import adopt_orphans, descendants, is_ray_server, lives, reap, started_with
from deploy.settings import ServeConfig, Settings, applications, http_address, read_models
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDead

_POLL_S = 0.3
ROUTED_S = 60.0  # HAProxy learns of a replica within a few seconds
_OWNER = "launcher.pid"
_CUT_S = 0.5
_SHUT_S = 15.0
_TMP = "/tmp"  # noqa: S108 - short: sockets lie below it
_ROOM = 256 << 20  # bytes


def private_folder() -> Path:
    if (free := shutil.disk_usage(_TMP).free) < _ROOM:
        raise ConfigError(f"{_TMP} has {free >> 20} MiB free: Ray's session needs {_ROOM >> 20} MiB there")
    return Path(tempfile.mkdtemp(prefix="q-", dir=_TMP))


def check_log_folder(folder: str) -> None:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"logs.folder: {folder} cannot be written: {error.strerror}") from error


def check_host(host: str) -> None:
    """ConfigError if HAProxy, on loopback, could not reach replicas at this host."""
    if host not in ("127.0.0.1", "localhost", *WILDCARDS) and os.environ.get("RAY_SERVE_ENABLE_HA_PROXY", "1") == "1":
        raise ConfigError(
            f"http_options.host: {host}: HAProxy finds no replica there: "
            "127.0.0.1 for this machine alone, 0.0.0.0 or :: for all its interfaces"
        )


@dataclass
class Launch:
    """One run of one config. `say` takes progress lines."""

    config: ServeConfig
    settings: Settings
    say: Callable[[str], None]
    folder: Path = field(default_factory=private_folder)
    _started: float = field(default_factory=monotonic)
    _ports: Ports = field(default_factory=Ports)
    drains: bool = False
    _servers: list[int] = field(default_factory=list)  # GCS and raylet: without them Ray's calls only wait

    @property
    def models(self) -> dict[str, Settings]:
        return read_models(self.config, "the config")

    @property
    def address(self) -> tuple[str, int]:
        return http_address(self.config)

    @property
    def url(self) -> str:
        """For clients on this machine."""
        host, port = self.address
        return f"http://{'127.0.0.1' if host in WILDCARDS else url_host(host)}:{port}"

    def check(self) -> EngineConfig:
        """Check ports, logs, keys, GPUs and attention before Ray is up. ConfigError."""
        _sweep()
        self._ports.keep_api(*self.address)
        check_host(self.address[0])
        settings = self.settings
        metrics = settings.metrics
        check_port(metrics.host or "127.0.0.1", metrics.port, "metrics.host and metrics.port choose another", least=0)
        if settings.logs.folder is not None:
            check_log_folder(settings.logs.folder)
        if settings.keys.needed:
            parse(read(settings.keys))
        configs = list[EngineConfig]()
        for model in self.models.values():
            check_nodes(model, [len(probe().gpus)])
            configs.append(place(model))  # a model of the hub is downloaded
            attention_here(configs[-1])
        return configs[0]

    def start(self) -> None:
        """Returns once requests can be answered. ConfigError; EngineDead."""
        (self.folder / _OWNER).write_text(str(os.getpid()))
        adopt_orphans()
        environment.prepare(os.environ, self.folder, self._ports.choose(os.getpid()))
        os.environ["PYTHONPATH"] = python_path(os.environ)
        for name, value in environment.guard(self.models, self.address[0]).items():
            os.environ.setdefault(name, value)
        from deploy.serve_schema import check_schema  # Serve reads the environment when it is imported

        check_schema(self.config, "the config")
        there = {"CPU": os.cpu_count() or 1, "GPU": len(probe().gpus)}
        for app, model in zip(applications(self.config, "the config"), self.models.values(), strict=True):
            check_replicas({"applications": [app]}, model, there)
        self._init_ray()
        self._deploy()
        self._wait_running()
        self._wait_answering()
        self.drains = True

    def _init_ray(self) -> None:
        import ray

        from deploy import ray_private

        ray_private.keep_signal_handlers()
        self._servers = [0]  # no process: what is half there is no Ray to end in order, and may crash
        try:
            ray.init(
                address="local",
                namespace="serve",
                include_dashboard=False,
                logging_level="warning",
                _temp_dir=str(self.folder / "ray"),
            )
        except Exception as error:  # Ray raises plain ones, such as of a time-out
            raise EngineDead(f"Ray could not start: {last_error(str(error))}") from error
        signal.signal(signal.SIGTERM, interrupt)  # Ray's C++ has put its own in its place
        self._servers = [pid for pid in descendants() if is_ray_server(pid)]
        self._mark("Ray")

    def _deploy(self) -> None:
        from ray.exceptions import RayError

        from deploy import ray_private

        try:
            ray_private.deploy(self.config)
        except RayError as error:
            raise EngineDead(f"Serve could not start: {last_error(str(error))}") from error
        self._mark("Serve")

    def _wait_running(self) -> None:
        from ray import serve

        while True:
            applications = serve.status().applications
            for name, status in applications.items():
                if status.status == "DEPLOY_FAILED":
                    # the deployments' messages say more than the application's
                    said = "\n".join([status.message, *(deployment.message for deployment in status.deployments.values())])
                    raise EngineDead(f"{name} could not start: {last_error(said)}")
            if applications and all(status.status == "RUNNING" for status in applications.values()):
                break
            sleep(_POLL_S)
        self._mark("engine")

    def _wait_answering(self) -> None:
        url = f"{self.url}/-/healthz"  # /health/ready would start a replica where there are none
        if not _comes(lambda: _answers(url) and _all_routed(), ROUTED_S):
            raise EngineDead(f"{url} did not answer within {ROUTED_S:g} s, though the replica runs")
        self._mark("HTTP")

    def watch(self) -> NoReturn:
        while all(map(lives, self._servers)):
            sleep(1.0)
        raise EngineDead("a server of Ray has ended, and nothing is served any more")

    def _mark(self, phase: str) -> None:
        self.say(f"{phase} up after {monotonic() - self._started:.1f} s")

    def drain(self, bound_s: float) -> None:
        """Stop accepting; open answers have `bound_s`, then end with an error event. No effect if a
        signal also ended Ray's servers."""
        if self.drains:
            self._while_ray_lives(lambda: self._drain(bound_s), bound_s + _SHUT_S)

    def _while_ray_lives(self, work: Callable[[], None], bound_s: float) -> bool:
        """Run `work` in a thread. False if Ray's servers end first, or the bound passes."""
        if not all(map(lives, self._servers)):
            return False
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        _comes(lambda: not (thread.is_alive() and all(map(lives, self._servers))), bound_s)
        return not thread.is_alive()

    def _drain(self, bound_s: float) -> None:
        from ray import serve
        from ray.exceptions import RayError

        with contextlib.suppress(RayError):  # Ray ends: it was sent the signal, too
            for name in list(serve.status().applications):
                serve.delete(name, _blocking=False)
            if not _comes(lambda: not serve.status().applications, bound_s):
                self.cut()

    def cut(self) -> None:
        """End the groups, so that replicas end open streams properly; Serve would not."""
        for pid in descendants(b"engine.core.loop"):
            os.kill(pid, signal.SIGKILL)
        sleep(_CUT_S)

    def end(self) -> bool:
        """Take everything down. False: Ray's exit hooks would wait, so leave by `os._exit`."""
        orderly = not self._servers or self._while_ray_lives(_shut_ray, _SHUT_S)
        for pid in descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._ports.close()
        return orderly


def interrupt(_number: int, _frame: object) -> NoReturn:
    """Repeat KeyboardInterrupt, the only exception that Ray's calls let through: Python drops those
    raised in finalizers."""
    signal.setitimer(signal.ITIMER_REAL, _CUT_S)
    raise KeyboardInterrupt


@contextlib.contextmanager
def handling(handler: Callable[[int, object], None] | signal.Handlers) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, previous in before.items():
            signal.signal(number, previous)


def _sweep() -> None:
    """Remove processes, which may hold ports, and folders of killed launchers."""
    for owner in Path(_TMP).glob(f"q-*/{_OWNER}"):
        with contextlib.suppress(OSError, ValueError):  # another user's, or just being removed; of a pipe a read may not end
            if owner.is_file() and not Path(f"/proc/{int(owner.read_text())}").exists():
                for pid in started_with(bytes(owner.with_name("admin.sock"))):
                    os.kill(pid, signal.SIGKILL)
                shutil.rmtree(owner.parent)


def _shut_ray() -> None:
    import ray

    from deploy import ray_private

    ray_private.silence_workers()  # from here on they only report each other's end
    with contextlib.suppress(Exception):  # whatever is broken by now: the processes are killed next
        _shut_serve()
    ray.shutdown()


def _shut_serve() -> None:
    """`serve.shutdown` without Ray's messages: it only fails because the controller ends."""
    from deploy import ray_private

    controllers = descendants(b"ServeController")
    ray_private.shut_serve(_SHUT_S)
    _comes(lambda: not any(map(lives, controllers)), _SHUT_S)


def _comes(condition: Callable[[], bool], bound_s: float) -> bool:
    deadline = monotonic() + bound_s
    while not (holds := condition()) and monotonic() < deadline:
        sleep(_POLL_S)
    return holds


def last_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [index for index, line in enumerate(lines) if "Error: " in line or "EngineDead: " in line]
    return " ".join(lines[errors[-1] if errors else -1 :])[:2000] or "no reason given"


def _all_routed() -> bool:
    from ray import serve

    if (admins := environment.haproxy_sockets(os.environ)) is None:
        return True
    deployments = [application.deployments.values() for application in serve.status().applications.values()]
    running = sum(any(status.replica_states.get("RUNNING") for status in statuses) for statuses in deployments)
    return any(routed(admin) >= running for admin in admins)


def _answers(url: str) -> bool:
    try:  # directly: a proxy of the environment would look elsewhere
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=2).close()
    except OSError as error:  # urllib's own errors, too: any status but a good one, or 403 where `limits.hosts` lacks this name
        return getattr(error, "code", 0) == 403
    return True
