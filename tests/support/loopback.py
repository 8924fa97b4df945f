"""The loopback addresses of this machine, as parameters of a test, and the end of a server there."""

from pathlib import Path
from socketserver import BaseServer

import pytest

_IPV6 = Path("/proc/net/if_inet6")
_NONE = pytest.mark.skipif(not _IPV6.exists() or not _IPV6.read_text(), reason="this machine has no IPv6")
LOOPBACKS = ["127.0.0.1", pytest.param("::1", marks=_NONE)]


def stop(server: BaseServer) -> None:
    """End a server that serves on a thread, and give its port back."""
    server.shutdown()
    server.server_close()
