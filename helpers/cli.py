"""The command line of ``python -m helpers.train``: made from ``TrainConfig``, with one line for whatever goes
wrong."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import io
import os
import signal
import sys
import threading

import torch

from helpers.checkpoint import load_checkpoint
from helpers.config import TrainConfig, preset
from helpers.errors import InputError, LoaderDied, NonFinite, Stopped
from helpers.processes import interrupt

HEAD = {
    "prog": "helpers.train",
    "description": "Train on images. What is not given comes from --preset, or from the run that --resume names.",
}


def parse(arguments: list[str]) -> TrainConfig:
    """The configuration that a command line asks for, on top of its preset, or of the run that it resumes. Raises
    InputError."""
    import tyro

    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--preset", "--resume", "--device"):  # what the defaults of all the others depend on
        early.add_argument(name)
    with contextlib.suppress(argparse.ArgumentError):  # tyro says it better
        known, _ = early.parse_known_args(arguments)
        default = _defaults(known)
        return _one_line(lambda: tyro.cli(TrainConfig, args=arguments, default=default, **HEAD))
    return _one_line(lambda: tyro.cli(TrainConfig, args=arguments, **HEAD))


def _defaults(known: argparse.Namespace) -> TrainConfig:
    if not known.resume:
        return preset(known.preset or "tuned", device=known.device or "auto")
    saved = load_checkpoint(known.resume, log=lambda text: None)["config"]
    if known.preset and known.preset != saved["preset"]:
        raise InputError(
            f"--resume {known.resume}: was started with --preset {saved['preset']}, not {known.preset}; leave "
            "--preset out"
        )
    names = {f.name for f in dataclasses.fields(TrainConfig)}
    # Where the earlier run was told to stop and to write does not bind this one.
    kept = {
        name: value for name, value in saved.items() if name in names - {"max_steps", "run_dir", "resume", "reschedule"}
    }
    return TrainConfig(**kept)


def _one_line(parse_arguments) -> TrainConfig:
    """tyro explains a wrong flag in a box of five to nine lines; keep the sentence in it."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return parse_arguments()
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
    lines = [line.strip(" │╭╮╰╯─-") for line in box.getvalue().splitlines()]  # its frame, on a terminal and in a file
    blank = [number for number, line in enumerate(lines[1:], start=1) if not line]
    start = 2 if blank[:1] == [1] else 1  # after the title, and a rule below it where there is one
    end = next((number for number in blank if number > start), len(lines))
    raise InputError(f"{' '.join(lines[start:end]).rstrip('.')}; see --help") from None


def main(arguments: list[str] | None = None) -> int:
    """Train as the command line says; returns the exit code, and prints one line for whatever ends a run early."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        return _run(arguments)
    signal.signal(signal.SIGINT, interrupt)  # in place of the one for the time of imports
    try:
        return _run(arguments)
    finally:
        signal.signal(signal.SIGINT, before)


def _run(arguments: list[str] | None) -> int:
    from helpers.train import train

    try:
        summary = train(parse(sys.argv[1:] if arguments is None else arguments))
    except Stopped as stop:
        return _end(str(stop), 128 + stop.signal_number)
    except KeyboardInterrupt:
        return _end("stopped by Ctrl-C before training began; start it again", 130)
    except InputError as error:
        return _end(str(error), 2)
    except (NonFinite, LoaderDied) as error:
        return _end(str(error), 1)
    except torch.OutOfMemoryError as error:
        first = str(error).splitlines()[0]
        return _end(f"{first} Try half the --batch-size with twice the --accumulate", 1)
    except BrokenPipeError:  # whoever read our output, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        return _end(
            f"cannot write {error.filename or 'the run folder'}: {error.strerror}; free space, or name another --run-dir",
            2,
        )
    rate, accuracy = summary["images_per_s"], summary["val_accuracy"]
    parts = [f"{summary['steps']} steps in {summary['seconds']:.1f} s"]
    parts += [f"{rate:.0f} images/s"] if rate else []
    parts += [f"validation accuracy {accuracy:.1%}"] if accuracy is not None else []
    print(f"{', '.join(parts)}; run folder {summary['run_dir']}")
    return 0


def _end(line: str, code: int) -> int:
    print(f"helpers.train: {' '.join(line.split())}", file=sys.stderr, flush=True)
    return code
