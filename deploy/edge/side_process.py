"""A side process forks a process for each task, before it comes, which is bounded and can do no harm.

    edge --a socket for each task--> side process --fork--> a process: reads its task, answers, and is gone

What it runs was written by others, and reads what anybody sends. A process of its own has one task, a time of CPU and a memory, and
whatever it did ends with it. What all of them need is loaded once, before any fork. It ends when the edge closes its end.
"""

import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

BEGUN = b"+"  # a process has the task


def fork_for_each(load: Callable[[], Callable[[socket.socket], None]]) -> None:
    """Have each socket that comes served in a process of its own, by what `load` returns, until the edge closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the edge's to handle
    serve = load()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    gc.freeze()  # a collection in a child would write to every page that it shares
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with parent_end, child_end:
            if is_child := os.fork() == 0:
                control.close()
                parent_end.close()
                control = child_end
            descriptors = socket.recv_fds(control, 1, 1)[1]
            if not descriptors:
                return
            with socket.socket(fileno=descriptors[0]) as connection:
                if is_child:
                    serve(connection)
                    connection.shutdown(socket.SHUT_RDWR)  # the answer ends here, not once this process' memory is gone
                    os._exit(0)
                socket.send_fds(parent_end, [b"t"], descriptors)


def begin(connection: socket.socket, cpu_s: int, memory_bytes: int) -> None:
    """Bound this process from now on, beside what it has, and say that it has the task."""
    most = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize() + memory_bytes  # beside data and stack
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    connection.sendall(BEGUN)
