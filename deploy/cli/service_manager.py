"""Reports the service's state to systemd, as sd_notify."""

import os
import socket
import sys

READY = "READY=1"
STOPPING = "STOPPING=1"


def notify(*states: str) -> None:
    """`states`: such as `READY` or `STATUS=...`. No effect without a service manager."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = f"\0{address[1:]}"  # an abstract socket
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.sendto("\n".join(states).encode(), address)
    except OSError as error:  # serving goes on
        print(f"quartet: systemd was not told {states[0]}: {error.strerror}", file=sys.stderr)
