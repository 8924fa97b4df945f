"""HAProxy with the lines of Serve's template that matter to us, started by the wrapper that Serve starts it by."""

import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deploy.environment import WRAPPER, haproxy_binary
from tests.support.stack.serve_process import free_port, wait

PLAIN = haproxy_binary() or ""  # which takes Serve's configuration as it is
CONFIG = """
global
    stats socket {folder}/admin.sock level admin

defaults
    mode http
    timeout client {client_timeout}
    timeout connect {connect_timeout}
    timeout server {server_timeout}
    option abortonclose
    option splice-request
    errorfile 502 {folder}/500.http
    errorfile 503 {folder}/500.http
    errorfile 504 {folder}/500.http

frontend prometheus
    bind :{metrics_port}
    http-request return status 200

frontend http_frontend
    bind *:{port}
    {route}
    default_backend default_backend

backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path '%[path]' not found."

backend replica
    http-reuse always
    server one {address}:{behind}

backend at_zero_replicas
    server fallback {address}:{behind} backup
"""


@contextmanager
def haproxy(
    folder: Path,
    behind: int,
    wrapper: Path | str = WRAPPER,
    *,
    head_timeout: str = "10s",
    server_timeout: str = "10s",
    route: str = "use_backend replica if { path_beg / }",
    client_timeout: str = "5s",
    connect_timeout: str = "100ms",
    address: str = "127.0.0.1",
    metrics_port: int = 0,
    namespace: Sequence[str] = (),
) -> Iterator[str]:
    """HAProxy before the port `behind` at `address`, with its files in `folder`; the URL. `namespace`: the words that enter one."""
    (folder / "500.http").write_text("HTTP/1.1 500 Internal Server Error\r\nContent-Type: text/plain\r\n\r\nInternal Server Error")
    port = free_port()
    path = folder / "haproxy.cfg"
    path.write_text(
        CONFIG.format(
            folder=folder,
            port=port,
            metrics_port=metrics_port or free_port(),
            behind=behind,
            address=address,
            route=route,
            server_timeout=server_timeout,
            client_timeout=client_timeout,
            connect_timeout=connect_timeout,
        )
    )
    environ = {**os.environ, "QUARTET_HAPROXY": PLAIN, "QUARTET_HEAD_TIMEOUT": head_timeout}
    process = subprocess.Popen([*namespace, str(wrapper), "-db", "-f", str(path)], env=environ, stderr=subprocess.DEVNULL)
    try:
        wait(lambda: _answers(folder / "admin.sock"), 10)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)
        (folder / "admin.sock").unlink(missing_ok=True)


def _answers(admin: Path) -> bool:
    """Whether it has bound its ports: it takes connections at its admin socket then."""
    with socket.socket(socket.AF_UNIX) as made:
        return made.connect_ex(str(admin)) == 0
