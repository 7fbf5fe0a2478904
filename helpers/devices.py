"""Which device, how many cores, and which precision: decided by looking, not by assuming."""

from __future__ import annotations

import copy
import ctypes
import os
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F

from helpers.errors import InputError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Reduced precision costs accuracy in the last bits, so it has to earn its place; the margin also keeps the choice
# stable.
WORTH_IT = 1.15


def usable_cpus() -> int:
    """Cores this process may really use: its affinity, and the CPU quota of its container (cgroup v2 or v1)."""
    cores = len(os.sched_getaffinity(0))
    quota = _cgroup_quota()
    return max(1, min(cores, int(quota))) if quota else cores


def _cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    try:
        limit, period = (root / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit = int((root / "cpu/cpu.cfs_quota_us").read_text())
        return limit / int((root / "cpu/cpu.cfs_period_us").read_text()) if limit > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def cuda_problem(index: int = 0) -> str | None:
    """Why CUDA device ``index`` cannot train, in one line, or None if it can. Runs a kernel: ``is_available()``
    alone does not."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "this build of PyTorch is for CPUs only"
    with warnings.catch_warnings(record=True) as caught:  # an old driver is reported as a warning, and then as "no GPU"
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            return "CUDA_VISIBLE_DEVICES hides every GPU"
        reason = next((str(w.message).splitlines()[0] for w in caught if "driver" in str(w.message)), None)
        return reason or "no NVIDIA GPU with a working driver was found"
    if index >= torch.cuda.device_count():
        return f"there is no cuda:{index}; {torch.cuda.device_count()} GPU(s) are here"
    major, minor = torch.cuda.get_device_capability(index)
    name = torch.cuda.get_device_name(index)
    try:
        if torch.ones(2, device=f"cuda:{index}").sum().item() == 2:
            return None
        return f"{name} computes wrong results"
    except RuntimeError as error:
        built_for = " ".join(torch.cuda.get_arch_list())
        return f"{name} (capability {major}.{minor}) cannot run this build ({built_for}): {str(error).splitlines()[0]}"


def pick_device(name: str = "auto") -> torch.device:
    """The device to train on. ``auto`` takes the first GPU that really runs a kernel, otherwise the CPU.

    Raises InputError for a device that is not here or cannot run.
    """
    if name == "auto":
        return torch.device("cpu" if cuda_problem() else "cuda:0")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device '{name}' is not known; use auto, cpu, cuda or cuda:0") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise InputError(f"device '{name}' is not supported here; use auto, cpu, cuda or cuda:0")
    problem = cuda_problem(device.index or 0)
    if problem:
        raise InputError(f"device '{name}' cannot be used: {problem}; use --device cpu")
    return torch.device("cuda", device.index or 0)


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the next allocation, for the rest of this process; False where that is not to be had.

    By default it maps each large tensor anew and unmaps it when freed, so every step of a training on the CPU pays for tens of
    thousands of page faults. The price: the process stays at its peak size.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    trim_threshold, mmap_threshold = -1, -3
    kept = mallopt(mmap_threshold, 1 << 30) or mallopt(
        mmap_threshold, 32 << 20
    )  # older versions take no more than 32 MB
    return bool(mallopt(trim_threshold, 2**31 - 1) and kept)


def autocast_for(device: torch.device, precision: str):
    """A reusable autocast context for ``precision`` ('fp32', 'bf16', 'fp16'); fp32 needs none."""
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, DTYPES[precision])


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given; a CPU has already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fastest_precision(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, rounds: int = 3) -> str:
    """Measure one forward and backward in each precision this device offers and name the fastest.

    ``images`` (N×3×H×W float32) and ``labels`` (N) are one batch on the model's device. Works on a copy of the
    model, in interleaved rounds; the quickest round of each counts, for other programs only ever add time. A
    reduced precision is chosen only if it is at least 1.15× faster. Model and random state stay as they are.
    """
    device = images.device
    candidates = (
        ["fp32", "bf16"] if device.type == "cpu" or torch.cuda.get_device_capability(device)[0] >= 8 else ["fp32"]
    )
    if device.type == "cuda":
        candidates.append("fp16")
    probe = copy.deepcopy(model).train()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for round_number in range(rounds + 1):
            for name in candidates:
                synchronize(device)
                start = time.perf_counter()
                with autocast_for(device, name):
                    loss = F.cross_entropy(probe(images).float(), labels)
                loss.backward()
                synchronize(device)
                if round_number:  # the first round pays for allocation and kernel selection
                    seconds[name].append(time.perf_counter() - start)
    quickest = {name: min(times) for name, times in seconds.items()}
    best = min(quickest, key=quickest.get)
    return best if quickest["fp32"] / quickest[best] >= WORTH_IT else "fp32"
