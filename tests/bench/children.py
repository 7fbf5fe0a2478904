"""Fresh processes to measure in, none of which outlives the benchmark."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class ChildFailed(Exception):
    """A child ended with an error: its command, and the end of what it said."""


def say(text: str) -> None:
    """Progress, on stderr: stdout is for the table."""
    print(text, file=sys.stderr, flush=True)


def run(*arguments: str | Path, timeout: float, **environment: str | Path) -> str:
    """Run this Python with ``arguments``, from the repository's root, and return what it printed."""
    settings = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        **{name: str(value) for name, value in environment.items()},
    }
    settings.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, *map(str, arguments)]
    # In a session of its own, so that whatever ends this call (an error, the time limit, Ctrl-C) also ends the
    # child and all that it has started.
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = subprocess.Popen(command, cwd=ROOT, env=settings, start_new_session=True, **pipes)
    try:
        out, err = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise ChildFailed(f"{' '.join(command[1:])}: not finished after {timeout:.0f} s") from None
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if child.returncode:
        raise ChildFailed(f"{' '.join(command[1:])}: exit code {child.returncode}\n{(err or out)[-2000:]}")
    return out


def in_child(module: str, quick: bool, work: Path) -> dict:
    """The numbers of a figure whose sides share one process: a fresh one, of a module that ends with ``answer``."""
    file = work / "answer.json"
    run("-m", module, file, *["--quick"] * quick, timeout=900)
    return json.loads(file.read_text())


def answer(measure: Callable[[bool, Path], dict]) -> None:
    """The other side of ``in_child``. The numbers go through a file, because some libraries print."""
    file = Path(sys.argv[1])
    file.write_text(json.dumps(measure("--quick" in sys.argv, file.parent)))
