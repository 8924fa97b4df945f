"""What HAProxy says of itself on its admin socket (`show stat` of its management guide)."""

import csv
import socket
from pathlib import Path

_TIMEOUT_S = 2.0


def routed(admin_socket: Path) -> int:
    """The applications of which HAProxy sends requests to a replica, not to its fallback, Serve's own proxy; 0 while it starts."""
    try:
        table = _ask(admin_socket, "show stat")
    except OSError:
        return 0
    rows = csv.DictReader(table.removeprefix("# ").splitlines())
    return sum(row["svname"] == "BACKEND" and int(row["act"] or 0) > 0 for row in rows)


def _ask(admin_socket: Path, command: str) -> str:
    """HAProxy closes the connection behind its answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(str(admin_socket))
        connection.sendall(command.encode() + b"\n")
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()
