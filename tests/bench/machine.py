"""What the figures were measured on, in words, and the restriction to two cores."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import torch

from helpers.devices import usable_cpus

CORES = 2
# What multiplies bfloat16 in hardware, on x86 and Arm; elsewhere it is emulated, and slower than float32.
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def keep_to_two_cores() -> bool:
    """Restrict this process, and all it starts, to two cores (not two threads of one); False if there are fewer."""
    one_of_each = {_siblings(cpu): cpu for cpu in os.sched_getaffinity(0)}
    chosen = sorted(one_of_each.values())[:CORES]
    if len(chosen) < CORES or usable_cpus() < CORES:
        return False
    os.sched_setaffinity(0, chosen)
    return True


def _siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def describe() -> dict:
    """The machine in words, without its name."""
    return {
        "cores": f"{CORES} of {os.cpu_count()}",
        "processor": _cpuinfo("model name") or platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "bf16_hardware": bool(BF16_FLAGS & {*(_cpuinfo("flags") or _cpuinfo("Features") or "").split()}),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def _cpuinfo(field: str) -> str | None:
    try:
        lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    except OSError:
        return None
    return next((value.strip() for name, _, value in lines if name.strip() == field), None)
