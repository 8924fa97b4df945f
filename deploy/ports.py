"""The ports of one launcher, kept from other launchers of this machine.

HAProxy binds its ports, a block of the launcher's own, seconds after they are chosen. Serve's proxy
uses SO_REUSEPORT, so two stacks on one port would answer for each other: bound sockets that do not
listen keep its ports.
"""

import socket
from contextlib import ExitStack, suppress

from engine.errors import ConfigError

HAPROXY_PORTS = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
PROXY_PORTS = ("RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT")
REPLICA_RANGE = ("RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT", "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT")
BLOCK = 100  # ports, of which the first is kept to mark the others as taken
_FIRST, _BLOCKS = 20_000, 100  # between Ray's workers' ports (to 19999) and the kernel's own choice (from 32768)


class Ports:
    """Keeps ports until closed, or the process ends."""

    def __init__(self) -> None:
        self._kept = ExitStack()

    def choose(self, seed: int) -> dict[str, int]:
        metrics, stats, first, *_, last = self._block(seed)
        block = dict(zip((*HAPROXY_PORTS, *REPLICA_RANGE), (metrics, stats, first, last), strict=True))
        return block | {name: self._keep(0) for name in PROXY_PORTS}

    def _block(self, seed: int) -> range:
        """A block for HAProxy and the replicas. HAProxy knows a port slightly longer than its
        replica lives."""
        for turn in range(_BLOCKS):
            first = _FIRST + BLOCK * ((seed + turn) % _BLOCKS)
            block = range(first + 1, first + BLOCK)
            with suppress(OSError, ConfigError):  # another launcher has it, or anybody listens where HAProxy is to
                self._keep(first)
                for port in block[: len(HAPROXY_PORTS)]:
                    check_port("127.0.0.1", port)
                return block
        raise ConfigError(f"no block of {BLOCK} ports from {_FIRST} on is free")

    def _keep(self, port: int) -> int:
        """`port` 0: a free one. OSError: taken."""
        kept = self._kept.enter_context(socket.socket())
        kept.bind(("", port))
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # only now: launchers do not share
        return int(kept.getsockname()[1])

    def keep_api(self, host: str, port: int) -> None:
        """Keep the API's port, which HAProxy binds seconds later. ConfigError: taken, or no
        address."""
        check_port(host, port)
        try:  # HAProxy does not share: what is kept is a name, which goes with this process
            self._kept.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0quartet-{port}")
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: another `quartet serve` is about to (--port chooses another)"
            ) from error

    def close(self) -> None:
        self._kept.close()


def check_port(host: str, port: int, advice: str = "--port chooses another", least: int = 1) -> None:
    """ConfigError: someone listens here, or no address. `least` 0: any port."""
    if not host or port < least:
        raise ConfigError(f"cannot listen on {host}:{port}: it is no address that clients could use ({advice})")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {getattr(error, 'strerror', error)} ({advice})") from error

