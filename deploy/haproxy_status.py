"""HAProxy's state from its admin socket (`show stat`)."""

import csv
import socket
from pathlib import Path


def routed(admin_socket: Path) -> int:
    """Applications routed to a replica, not to Serve's proxy; 0 while it starts."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(2.0)
            connection.connect(str(admin_socket))
            connection.sendall(b"show stat\n")
            table = b"".join(iter(lambda: connection.recv(65536), b"")).decode()  # HAProxy closes the connection after its answer
    except OSError:
        return 0
    rows = csv.DictReader(table.removeprefix("# ").splitlines())
    return sum(row["svname"] == "BACKEND" and int(row["act"] or 0) > 0 for row in rows)
