"""`python -m deploy.edge.processes.grammar_process FD FOLDER`: the side process that compiles
grammars."""

import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from deploy.edge.processes.side_pool import SidePool
from deploy.edge.processes.side_process import begin, fork_for_each
from engine.matcher import CHECK_STACK_BYTES, Vocabulary, compile_stack

CPU_S = 2  # for a grammar; those that people write take a tenth of it
MEMORY_BYTES = 64 << 20


def complaint(pool: SidePool, rules: str) -> str | None:
    """Why a grammar cannot be kept, or None. Blocks. Overloaded: there is no process."""
    answer = pool.run(rules.encode())
    if answer is None:
        return f"compiling it takes more than {CPU_S} s of CPU, {MEMORY_BYTES >> 20} MiB or {CHECK_STACK_BYTES >> 20} MiB of stack"
    return answer[1:].decode() or None


def _load() -> Callable[[socket.socket], None]:
    vocabulary = Vocabulary.read(Path(sys.argv[2]))
    vocabulary.complaint("start: /a/")  # what llguidance makes once

    def serve(connection: socket.socket) -> None:
        with connection.makefile("rb") as stream:
            rules = stream.read().decode()
        os.dup2(0, 2)  # where it takes too much memory, llguidance says so at length
        with compile_stack(CHECK_STACK_BYTES):
            thread = threading.Thread(target=answer, args=(connection, rules))
            thread.start()
        thread.join()

    def answer(connection: socket.socket, rules: str) -> None:
        begin(connection, CPU_S, MEMORY_BYTES)  # here, so that the stack of this thread counts as what the process has
        connection.sendall(b"=" + (vocabulary.complaint(rules) or "").encode())

    return serve


if __name__ == "__main__":
    fork_for_each(_load)
