"""Checkpoints of plain types and tensors: written atomically, the previous one kept, loaded without running
anyone's code."""

from __future__ import annotations

import dataclasses
import os
import random
from pathlib import Path

import numpy as np
import torch

from helpers.config import TrainConfig
from helpers.errors import InputError

FORMAT = "efficient-batch-training checkpoint 1"
NAME = "last.pt"
PREVIOUS = "previous.pt"


def save_checkpoint(folder: Path, state: dict) -> Path:
    """Write ``state`` (plain types and tensors) to ``folder/last.pt`` and keep the one before as ``previous.pt``.

    At every moment, also while this runs, ``last.pt`` is absent or complete. Raises InputError if the disk does
    not take it; the checkpoints that were there stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target, partial = folder / NAME, folder / f".{NAME}.{os.getpid()}"
    try:
        with open(partial, "wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            link = folder / f".{PREVIOUS}.{os.getpid()}"
            link.unlink(missing_ok=True)
            os.link(target, link)
            os.replace(link, folder / PREVIOUS)
        os.replace(partial, target)
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"cannot save {target}: {_first_line(error)}; free space there, then continue with --resume"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return target


def load_checkpoint(source: str | Path, log=print) -> dict:
    """Read a checkpoint file, or the newest whole one of a run folder, onto the CPU.

    ``log`` is told when ``last.pt`` was broken and ``previous.pt`` is used. Raises InputError for one that is
    missing, broken or of another program. Only tensors and plain types are unpickled.
    """
    source = Path(source)
    if source.is_dir():
        folder = source / "checkpoints" if (source / "checkpoints").is_dir() else source
        candidates = [folder / NAME, folder / PREVIOUS]
    else:
        candidates = [source]
        if source.name == NAME:
            candidates.append(source.with_name(PREVIOUS))
    candidates = [path for path in candidates if path.is_file()]
    if not candidates:
        raise InputError(
            f"--resume {source}: there is no checkpoint; give a run folder (with checkpoints/{NAME}) or a .pt file"
        )
    problem = ""
    for path in candidates:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a broken file fails in many ways: zip, pickle, end of file, decoding …
            problem = problem or f"{path} cannot be read ({_first_line(error)})"
            continue
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise InputError(f"--resume {path}: this is not a checkpoint of helpers.train; it cannot be continued here")
        if problem:
            log(f"{problem}; continuing from {path.name}, the one before")
        return state
    raise InputError(f"--resume {problem}; it is damaged or no checkpoint, start again without --resume")


def run_folder_of(config: TrainConfig) -> Path | None:
    """The run folder that ``config`` continues in: that of the checkpoint it resumes from, unless another run_dir
    is named."""
    if not config.resume:
        return None
    source = Path(config.resume)
    if source.is_file():
        source = source.parent
    folder = source.parent if source.name == "checkpoints" else source
    if not (
        folder / "config.json"
    ).exists():  # a checkpoint file that was copied somewhere else: not a run to write into
        return None
    return folder if config.run_dir is None or Path(config.run_dir).resolve() == folder.resolve() else None


# A run that is continued with other values of these is another run, or has another learning-rate schedule.
SAME_RUN = ("data", "split_seed", "image_size", "model", "optimizer")
SAME_SCHEDULE = ("epochs", "batch_size", "accumulate", "drop_last", "lr", "schedule", "warmup")


def check_continuation(config: TrainConfig, state: dict) -> None:
    """Raise InputError where ``config`` would silently continue something else than what ``state`` was saved
    from."""
    then, now = state["config"], dataclasses.asdict(config)
    for name in SAME_RUN:
        if then[name] != now[name] and not (name == "data" and Path(then[name]).resolve() == Path(now[name]).resolve()):
            raise InputError(
                f"--resume {config.resume}: was trained with {_flag(name)} {then[name]}, not {now[name]}; "
                "start a new run for that"
            )
    changed = [f"{_flag(name)} {then[name]} → {now[name]}" for name in SAME_SCHEDULE if then[name] != now[name]]
    if changed and not config.reschedule:
        raise InputError(
            f"--resume {config.resume}: {', '.join(changed)} plans another learning-rate schedule, and the rate "
            "would jump; "
            "add --reschedule if that is what you want"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def random_state() -> dict:
    """The global random state of Python, NumPy and torch (CPU and every GPU) as plain types."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_state(state: dict) -> None:
    """Put back what ``random_state`` took. States of GPUs that are not here are left out."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for index, gpu in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(gpu, index)


def seed_everything(seed: int) -> None:
    """Start the global random states of Python, NumPy and torch from one seed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def machine_facts() -> dict:
    """What bit-equality depends on beside the seed: versions, thread count, instruction set, GPU."""
    return {
        "torch": torch.__version__.split("+")[0],
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
