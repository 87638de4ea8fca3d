import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from vitrel.training.stopping import gone_after

_CONTEXT = multiprocessing.get_context("fork")


def _works(log, handler, seconds, ready):
    sys.stderr = Path(log).open("w")  # noqa: SIM115 (until the process ends)
    signal.signal(signal.SIGTERM, handler)
    try:
        with gone_after(seconds, lambda: "stopped: 3 epochs are saved"):
            ready.set()
            threading.Event().wait(20)
            os._exit(1)
    except KeyboardInterrupt:
        os._exit(7)


def _waits_for_ever(number, frame):
    threading.Event().wait(20)  # as in an exchange with a process that does not answer


def _ends(number, frame):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("handler", "status", "line"), [(_waits_for_ever, 143, "stopped: 3 epochs are saved\n"), (_ends, 7, "")]
)
def test_a_process_that_waits_is_gone_in_time_and_one_that_ends_is_left_alone(handler, status, line, tmp_path):
    ready = _CONTEXT.Event()
    process = _CONTEXT.Process(target=_works, args=(str(tmp_path / "log"), handler, 0.5, ready))
    process.start()
    assert ready.wait(20)
    time.sleep(0.1)
    process.terminate()
    process.join(15)
    assert process.exitcode == status
    assert (tmp_path / "log").read_text() == line


def test_nothing_stays_behind():
    before, threads = signal.set_wakeup_fd(-1), threading.active_count()
    with gone_after(1, str):
        assert threading.active_count() == threads + 1
    assert threading.active_count() == threads
    assert signal.set_wakeup_fd(before) == -1


def test_another_thread_than_the_first_is_let_through():
    reached = []

    def work():
        with gone_after(1, str):
            reached.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert reached == [True]
