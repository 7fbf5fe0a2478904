"""What all exercises share: the list of checks, and the one line that a reader is told."""

from __future__ import annotations

from collections.abc import Callable

from helpers.lab.record import record_check


class Mistake(Exception):
    """What is wrong with an answer, in one sentence to its author."""


CHECKS: dict[str, Callable] = {}


def check(name: str, answer: Callable) -> None:
    """Run the check called ``name`` on the reader's ``answer`` and print one line: passed, not attempted, or what
    is wrong with it."""
    try:
        praise = CHECKS[name](answer)
    except NotImplementedError:
        return print(f"{name}: not attempted yet")
    except Mistake as mistake:
        print(f"{name}: not yet. {mistake}")
    except Exception as error:  # the reader's own exception: it is theirs to see, without our frames around it
        print(f"{name}: your code raised {brief(error)}")
    else:
        print(f"{name}: passed. {praise}")
        return record_check(name, True)
    record_check(name, False)


def brief(error: Exception) -> str:
    """Kind and first line: some of torch's errors go on for a page."""
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])


def exercise(function: Callable) -> Callable:
    """Register a check under its function's name."""
    CHECKS[function.__name__] = function
    return function
