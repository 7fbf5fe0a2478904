"""Signals and processes: a clean stop for the trainer, and no loader worker that outlives it."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from pathlib import Path

_interrupted = False


def interrupt(*_) -> None:
    """A SIGINT handler for the time before training: raises KeyboardInterrupt, and remembers it. Some libraries swallow whatever
    is raised while they are imported; training then would begin as if nobody had asked it to stop."""
    global _interrupted
    _interrupted = True
    raise KeyboardInterrupt


class StopSignal:
    """Turns Ctrl-C (SIGINT) and SIGTERM into a flag that the loop reads between two steps.

    Saving inside ``except KeyboardInterrupt`` could save between the two halves of a step; a flag cannot. A second
    Ctrl-C is not held back: it raises KeyboardInterrupt at once. Outside the main thread, where signals never
    arrive, it does nothing.
    """

    def __init__(self):
        self.received: int | None = None
        self._before: dict[int, object] = {}

    def __bool__(self) -> bool:
        return self.received is not None

    def __enter__(self) -> StopSignal:
        if _interrupted:
            raise KeyboardInterrupt
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                # A background job of a shell script has SIGINT ignored on purpose; leave that as it is.
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _handle(self, number, _frame):
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number


def end_on_ctrl_c(name: str) -> None:
    """Until another handler is set, Ctrl-C ends this process with one line: for the seconds in which torch is imported."""

    def end(*_):
        sys.stderr.write(f"{name}: stopped by Ctrl-C before training began; start it again\n")
        sys.stderr.flush()
        os._exit(130)

    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, end)


HELD = {signal.SIGINT, signal.SIGTERM}


@contextlib.contextmanager
def signals_held():
    """Hold back Ctrl-C and SIGTERM in this thread. Processes started meanwhile inherit that, so a signal to the
    whole process group (a terminal, Slurm, Docker) stops the trainer alone, which then ends its workers in good
    order."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def follow_parent() -> None:
    """Called in a worker process: end when the process that started it has gone, however it died, or when *it*
    sends SIGTERM.

    DataLoader's own watchdog looks at the parent of the process, which under forkserver is the server and lives
    on.
    """
    parent = multiprocessing.parent_process()
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    # A spawned worker that is told to stop while its queue's thread is still in torch would be aborted by Python's own
    # tidying up ("terminate called without an active exception"); there is nothing to tidy up any more.
    atexit.register(os._exit, 0)

    def outlive_nobody():
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    def obey_parent():
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
            pass
        os._exit(1)

    for watch in (outlive_nobody, obey_parent):
        threading.Thread(target=watch, name=watch.__name__, daemon=True).start()


def peak_resident_mb(pid: int) -> float:
    """Peak resident memory of a process in MB (10^6 bytes); 0 if it has gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def reset_peak_resident() -> None:
    """Start this process's peak resident memory anew (Linux: clear_refs); where that is not allowed the old peak
    stays."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
