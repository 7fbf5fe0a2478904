"""The run folder, and one ``log()`` call that reaches the text log, JSON lines, TensorBoard and the progress
bar."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
import time
from collections import defaultdict
from pathlib import Path

from helpers.bars import progress_bar
from helpers.config import TrainConfig
from helpers.errors import InputError
from helpers.files import jsonable, replace_text, write_json


def require_free(config: TrainConfig) -> None:
    """Raise InputError if ``config.run_dir`` holds anything already: two runs in one folder give zigzag curves."""
    folder = Path(config.run_dir) if config.run_dir is not None else None
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            f"--run-dir {folder}: already in use; give another folder, or continue it with --resume {folder}"
        )


def new_run_folder(config: TrainConfig) -> Path:
    """Make the folder of a new run: ``config.run_dir``, or one named for preset and time under runs/. Raises
    InputError if it cannot."""
    require_free(config)
    stem = Path(config.run_dir or Path("runs") / f"{config.preset}-{time.strftime('%Y%m%d-%H%M%S')}")
    for number in itertools.count():
        folder = stem if number == 0 else stem.with_name(f"{stem.name}-{number}")
        try:
            folder.mkdir(parents=True, exist_ok=config.run_dir is not None)
            return folder
        except FileExistsError:
            if config.run_dir is not None:
                raise
        except OSError as error:
            raise InputError(
                f"the run folder {folder} cannot be made ({error.strerror}); give another with --run-dir"
            ) from None


class RunLog:
    """Writes a run folder: config.json, train.log, metrics.jsonl, TensorBoard events, summary.json.

    ``after_step``: the run continues from that optimiser step; what was logged beyond it belongs to a past that
    did not happen and is dropped (in TensorBoard by ``purge_step``).
    """

    def __init__(
        self, folder: Path, config: TrainConfig, *, total_steps: int | None = None, after_step: int | None = None
    ):
        self.folder = folder
        self._progress = config.progress
        self._text = open(folder / "train.log", "a", encoding="utf-8")  # noqa: SIM115  (closed in close())
        try:
            fcntl.flock(self._text, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._text.close()
            raise InputError(
                f"{folder} is being written by another training; wait for it, or give another --run-dir"
            ) from None
        if after_step is None:
            write_json(folder / "config.json", dataclasses.asdict(config))
        else:
            self._drop_after(after_step)
        self._lines = open(folder / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        self._board = None
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # a second to import, so only when asked for

            purge = None if after_step is None else after_step + 1
            self._board = SummaryWriter(str(folder), purge_step=purge)
        self._bar = progress_bar(show=config.progress, total=total_steps, initial=after_step or 0, unit="step")

    def _drop_after(self, step: int) -> None:
        path = self.folder / "metrics.jsonl"
        kept = []
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                with contextlib.suppress(ValueError):  # the last line of a killed run may be half written
                    if json.loads(line)["step"] <= step:
                        kept.append(line)
            replace_text(path, "".join(kept))

    def log(self, kind: str, step: int, **values) -> None:
        """Record ``values`` (numbers) of a kind ('train', 'eval') at an optimiser step, everywhere at once."""
        self._lines.write(json.dumps({"kind": kind, "step": step, **jsonable(values)}) + "\n")
        self._lines.flush()
        if self._board:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(f"{kind}/{name}", value, step)
        self._write(
            f"step {step:>6} {kind:>5}  " + "  ".join(f"{name} {_short(value)}" for name, value in values.items())
        )
        if not self._bar.disable:
            self._bar.set_postfix(
                {name: _short(values[name]) for name in ("loss", "accuracy") if name in values}, refresh=False
            )
            self._bar.update(step - self._bar.n)

    def say(self, text: str) -> None:
        """A sentence for the reader: in the text log, and on the screen unless progress is off."""
        self._write(text)
        if self._progress:
            if self._bar.disable:
                print(text, flush=True)
            else:
                self._bar.write(text)

    def _write(self, text: str) -> None:
        self._text.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")
        self._text.flush()

    def summary(self, values: dict) -> None:
        """Write summary.json, atomically."""
        write_json(self.folder / "summary.json", values)

    def close(self) -> None:
        for part in (self._bar, self._board, self._lines, self._text):
            if part is not None:
                part.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_):
        self.close()


class StepClock:
    """Where the time of a step goes: ``mark(phase)`` books the time since the last mark. Seconds by phase in
    ``seconds``.

    The loop marks 'load', 'copy', 'forward', 'backward' for each micro-batch, 'optimizer' and 'other' once a step.

    On a GPU the host runs ahead, so only 'load' (the host waits for the loader) is true without synchronising;
    ``helpers.lab.measure.SyncedClock`` waits at every mark and makes all phases true, at a price.
    """

    def __init__(self):
        self.seconds: dict[str, float] = defaultdict(float)
        self.last = time.perf_counter()

    def start(self) -> None:
        """Forget the time since the last mark; call it before asking for the first batch."""
        self.last = time.perf_counter()

    def mark(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self.last
        self.last = now


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
