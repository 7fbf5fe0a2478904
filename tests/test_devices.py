"""Devices, cores and precision."""

import os

import pytest
import torch

from helpers import devices
from helpers.devices import autocast_for, cuda_problem, fastest_precision, pick_device, usable_cpus
from helpers.errors import InputError
from helpers.models import SmallCNN


def test_cores_follow_affinity():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu.max": "nonsense"}, None),
        ({}, None),
    ],
)
def test_container_quota_is_read_from_either_cgroup(tmp_path, files, quota):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert devices._cgroup_quota(tmp_path) == quota


def test_half_a_core_still_counts_as_one(monkeypatch):
    monkeypatch.setattr(devices, "_cgroup_quota", lambda: 0.5)
    assert usable_cpus() == 1


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "", "mps", "cuda:99", "meta"])
def test_a_device_that_is_not_here_is_one_line(name):
    with pytest.raises(InputError) as caught:
        pick_device(name)
    assert "\n" not in str(caught.value) and ("cpu" in str(caught.value))


def test_auto_falls_back_to_the_cpu_and_says_why_elsewhere():
    device = pick_device("auto")
    assert (device.type == "cpu") == (cuda_problem() is not None)
    assert pick_device("cpu") == torch.device("cpu")


def test_a_gpu_that_cannot_run_this_build_is_not_used(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (3, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Old GPU")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80"])

    def fails(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")

    monkeypatch.setattr(torch, "ones", fails)
    assert cuda_problem() == (
        "Old GPU (capability 3.5) cannot run this build (sm_80): "
        "CUDA error: no kernel image is available for execution on the device"
    )
    assert pick_device("auto").type == "cpu"


def test_precision_is_measured_without_a_trace():
    torch.manual_seed(0)
    model = SmallCNN(10).to(memory_format=torch.channels_last)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images = torch.randn(8, 3, 32, 32)
    state = torch.get_rng_state()
    assert fastest_precision(model, images, torch.zeros(8, dtype=torch.long), rounds=2) in ("fp32", "bf16")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())


def test_reduced_precision_must_be_clearly_faster(monkeypatch):
    cost = {"fp32": 1.1, "bf16": 1.0}
    now = [0.0]

    class Costly:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            now[0] += cost[self.name]

        def __exit__(self, *_):
            return False

    monkeypatch.setattr(devices.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(devices, "autocast_for", lambda device, name: Costly(name))
    batch = torch.randn(2, 3, 16, 16), torch.zeros(2, dtype=torch.long)
    assert fastest_precision(SmallCNN(2), *batch) == "fp32"
    cost["fp32"] = 2.0
    assert fastest_precision(SmallCNN(2), *batch) == "bf16"


def test_freed_memory_is_kept_only_where_asked(monkeypatch):
    assert devices.keep_freed_memory() in (True, False)
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: object())
    assert devices.keep_freed_memory() is False


def test_fp32_needs_no_autocast():
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with autocast_for(torch.device("cpu"), precision):
            assert torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype == dtype
