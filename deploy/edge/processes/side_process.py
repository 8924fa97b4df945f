"""A side process forks a bounded process for each task, since tasks run foreign code on any
client's data.

    edge --a socket for each task--> side process --fork--> a process: reads its task, answers, and is gone

Common state is loaded before the fork. A socket's first byte brings the pidfd with which the edge
can kill the task.
"""

import contextlib
import ctypes
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

TAKEN = b"t"  # a process gets the task; with its pidfd
BEGUN = b"+"  # and bounds itself from here on
_PR_SET_NO_NEW_PRIVS = 38


def fork_for_each(load: Callable[[], Callable[[socket.socket], None]]) -> None:
    """`load` returns what serves a socket in a forked process. Runs until the edge closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the edge's to handle
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    serve = load()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    gc.freeze()  # a collection in a child would write to every page that it shares
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with parent_end, child_end:
            child = os.fork()
            if not child:
                control.close()
                parent_end.close()
                control = child_end
            else:
                pidfd = os.pidfd_open(child)
            descriptors = socket.recv_fds(control, 1, 1)[1]
            if not descriptors:
                return
            with socket.socket(fileno=descriptors[0]) as connection:
                if not child:
                    serve(connection)
                    connection.shutdown(socket.SHUT_RDWR)  # the answer ends here, not once this process' memory is gone
                    os._exit(0)
                with contextlib.suppress(ConnectionError):  # the edge or the process is gone: the task ends with its socket
                    socket.send_fds(connection, [TAKEN], [pidfd])
                    socket.send_fds(parent_end, [b"t"], descriptors)
                os.close(pidfd)


def begin(connection: socket.socket, cpu_s: int, memory_bytes: int) -> None:
    """Bound this process from now on, and report that it has the task."""
    most = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize() + memory_bytes  # on top of data and stack
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    connection.sendall(BEGUN)
