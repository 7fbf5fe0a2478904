"""The exceptions that have a meaning of their own; the command line turns each into one line and an exit code."""


class InputError(Exception):
    """Something the reader can put right, told in one line that says what to do. Exit code 2."""


class NonFinite(RuntimeError):
    """The loss or the weights became nan or infinite; the message says where, and where the last good checkpoint
    is. Exit code 1."""


class LoaderDied(RuntimeError):
    """A loader process was killed or hung; the message says what to try. Exit code 1."""


class Stopped(KeyboardInterrupt):
    """Training was stopped by a signal, between two steps, after a checkpoint was written. Exit code 128 + signal
    (Ctrl-C: 130)."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.signal_number = signal_number
