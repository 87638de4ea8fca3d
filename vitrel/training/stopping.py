"""The end of processes that were told to stop and wait for each other instead."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def gone_after(seconds: float, last_words: Callable[[], str]) -> Iterator[None]:
    """Within it a process that has got SIGTERM is gone after ``seconds``, whatever it waits for.

    Lightning's handler of SIGTERM exchanges a message with the other processes. One that was stopped within another
    exchange waits for ever, and runs no Python; the signal is therefore seen by a thread, through a wake-up descriptor.

    Args:
        seconds: From the signal to the end, with status 143.
        last_words: Gives the line that is then written to the error stream; an empty one is left out.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    left = threading.Event()

    def watch() -> None:
        while numbers := reader.recv(64):
            if signal.SIGTERM in numbers and not left.wait(seconds):
                try:
                    if line := last_words():
                        print(line, file=sys.stderr, flush=True)
                finally:
                    os._exit(143)

    thread = threading.Thread(target=watch, daemon=True)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(before)
        writer.close()
        thread.join()
        reader.close()
