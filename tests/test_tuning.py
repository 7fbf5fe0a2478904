"""The loader tuned by measurement: the choice as arithmetic, and the search on data whose answer is known."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from helpers import limits
from helpers.config import preset
from helpers.errors import InputError
from helpers.lab import tuning as search
from helpers.lab.loader_rounds import others_busy, run_round
from helpers.lab.measure import Spread
from helpers.lab.tuning import _ladder, choose, explain, tune, tune_dataset, tune_loader
from helpers.lab.tuning_choice import Row, Setting, Tuning


def row(workers, rate, spread=0.0, rounds=4, **setting):
    low, high = rate * (1 - spread), rate * (1 + spread)
    return Row(Setting(workers, **setting), Spread(rate, low, high), 0.1, 0.5, rounds)


@pytest.mark.parametrize(
    ("rows", "workers"),
    [
        ([row(0, 100)], 0),
        ([row(0, 100), row(1, 95), row(2, 190), row(4, 195)], 2),
        ([row(4, 195), row(2, 190), row(0, 100)], 2),
        ([row(0, 96), row(2, 100)], 0),
        ([row(0, 94), row(2, 100)], 2),
        ([row(0, 88, 0.15), row(2, 100)], 0),  # within its noise
        ([row(0, 80, 0.12), row(2, 100, 0.12)], 0),
        ([row(0, 70, 0.1), row(2, 100, 0.1)], 2),
        ([row(0, 100), row(2, 200, rounds=1)], 0),  # chance
        ([row(0, 100, rounds=1), row(2, 200, rounds=1)], 2),  # no time for more
        ([row(0, 1000), row(1, 130), row(2, 160)], 0),
    ],
)
def test_the_simplest_setting_as_good_as_the_best_is_chosen(rows, workers):
    assert choose(rows).setting.workers == workers


def test_among_equal_workers_the_usual_setting_is_chosen():
    rows = [row(2, 100, prefetch=4), row(2, 98), row(2, 101, pin_memory=True), row(2, 102, start_method="spawn")]
    assert choose(rows).setting == Setting(2)
    assert choose([*rows, row(2, 150, pin_memory=True, prefetch=4)]).setting == Setting(2, 4, True)


def test_one_round_is_not_called_a_null_result():
    assert "no difference" not in explain([row(0, 100), row(2, 200), row(2, 200, rounds=1, prefetch=4)], 2)


def test_why_tells_the_gain_and_what_brought_none():
    rows = [row(0, 412), row(1, 400), row(2, 803), row(4, 790), row(2, 810, prefetch=4)]
    assert explain(rows, cores=2) == (
        "2 workers: 803 images/s, 1.9× the 412 without workers. 4 workers were no better (790): 2 cores. "
        "Prefetch 4 made no difference."
    )


@pytest.mark.parametrize(
    ("rows", "facts", "said"),
    [
        ([row(0, 9000), row(1, 1200), row(2, 1500)], {}, "2 workers were slower (1,500): handing a batch over costs"),
        ([row(0, 100), row(1, 101)], {"cores": 1}, "1 worker was no better (101): 1 core"),
        ([row(0, 600), row(1, 639), row(2, 640)], {"takes": 640}, "all that the consumer takes (640). 2 workers were"),
        ([row(0, 600), row(1, 639), row(2, 640)], {"takes": 640}, "no better (640): the consumer is the limit"),
        ([row(0, 100), row(1, 80)], {"busy": True, "takes": 200}, "2 cores, and the consumer computes on them too"),
        ([row(0, 100), row(4, 390)], {"waits": True}, "3.9× the 100 without workers; loading waits more than it"),
        ([row(0, 100)], {}, "0 workers: 100 images/s."),
        ([row(0, 90, 0.1), row(2, 100, 0.1)], {}, "2 workers were no better within the noise (100): 2 cores."),
    ],
)
def test_why_names_the_cause(rows, facts, said):
    assert said in explain(rows, **{"cores": 2, **facts})


def test_table_has_a_line_for_each_setting_and_marks_the_chosen():
    rows = [row(2, 800.4), row(0, 412, rounds=1), row(2, 790, pin_memory=True, start_method="spawn")]
    head, none, two, other = Tuning(rows, Setting(2), "").table().splitlines()
    assert head.split()[:3] == ["workers", "prefetch", "images/s"]
    assert none.split()[:5] == ["0", "–", "412", "one", "round"] and two.split()[:3] == ["2", "2", "800"]
    assert two.endswith("← chosen") and "chosen" not in none + other and other.endswith("pinned  spawn")


def test_options_are_legal_arguments_for_a_loader(recwarn):
    for setting in (Setting(0, 4, start_method="fork"), Setting(1, 4), Setting(1, start_method="spawn")):
        loader = DataLoader(TensorDataset(torch.zeros(4)), **setting.options())
        assert loader.num_workers == setting.workers
    assert not recwarn.list


@pytest.mark.parametrize(
    ("cores", "waits", "steps"),
    [
        (1, False, [1, 2]),
        (2, False, [1, 2, 4]),
        (3, False, [1, 2, 3, 4, 6]),
        (16, False, [1, 2, 4, 8, 16]),
        (16, True, [1, 2, 4, 8, 16, 32]),
        (6, False, [1, 2, 4, 6]),
    ],
)
def test_workers_that_are_tried(cores, waits, steps):
    assert _ladder(cores, waits) == steps


class Sleeps(Dataset):
    """Each item waits, as if for a disk or a network, and computes nothing."""

    def __init__(self, seconds, n=400):
        self.seconds, self.n = seconds, n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.zeros(8), index


def children():
    return multiprocessing.active_children()


def test_data_that_waits_gets_workers():
    start = time.perf_counter()
    tuning = tune_dataset(Sleeps(0.004), 8, budget_s=4.0)
    assert time.perf_counter() - start < 40
    rates = {row.setting.workers: row.images_per_s.median for row in tuning.rows}
    assert tuning.setting.workers >= 2 and rates[tuning.setting.workers] > 1.6 * rates[0], tuning.table()
    assert "without workers" in tuning.why and "waits" in tuning.why and tuning.config is None
    assert next(row.cpu_share for row in tuning.rows if row.setting.workers == 0) < 0.5
    assert not children()


def test_data_in_memory_gets_none_and_that_is_measured(digits):
    config = preset("tuned", data=str(digits), cache=True, image_size=32, device="cpu", progress=False)
    assert config.workers == -1
    tuning = tune_loader(config, budget_s=3.0)
    assert tuning.setting.workers == 0 and tuning.config == config.replace(workers=0), tuning.table()
    assert {row.setting.workers for row in tuning.rows} >= {0, 1} and tuning.why.count(".") >= 2
    assert not children()


def test_a_slow_consumer_needs_no_more_than_it_takes(digits):
    config = preset("tuned", data=str(digits), cache=True, image_size=32, device="cpu", progress=False)
    tuning = tune_loader(config, budget_s=3.0, step_s=0.05)
    assert tuning.setting.workers == 0, tuning.table()
    assert tuning.rows[0].images_per_s.median < 64 / 0.05


def test_a_busy_consumer_computes():
    before = time.process_time()
    tuning = tune_dataset(TensorDataset(torch.zeros(64, 4)), 8, budget_s=1.0, step_s=0.01, consumer="busy")
    assert time.process_time() - before > 0.05
    assert tuning.rows[0].cpu_share < 0.9, "the consumer's time is not the loader's"


def test_a_loader_of_ones_own_and_start_methods(recwarn):
    asked = []

    def loader_from(setting):
        asked.append(setting)
        return DataLoader(Sleeps(0.002, n=40), 8, **setting.options())

    tuning = tune(loader_from, budget_s=6.0, start_methods=["fork"])
    assert {setting.workers for setting in asked} >= {0, 1}
    assert tuning.setting.workers == 0 or any(s.start_method == "fork" for s in asked)
    assert not children() and not [w for w in recwarn.list if "DataLoader" in str(w.message)]


def test_without_time_the_answer_is_what_could_be_measured():
    tuning = tune_dataset(Sleeps(0.002), 8, budget_s=0.01)
    assert [row.setting.workers for row in tuning.rows] == [0]
    assert "no time to try 1, 2" in tuning.why


def test_a_busy_machine_is_noticed(monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        assert 0.3 / len(os.sched_getaffinity(0)) < others_busy() <= 1
    finally:
        child.kill()
        child.wait()
    for share, said in ((0.5, True), (0.1, False)):
        monkeypatch.setattr(search, "others_busy", lambda share=share: share)
        why = tune_dataset(Sleeps(0.001), 8, budget_s=0.01).why
        assert ("Other programs kept 50% of the cores busy" in why) == said


def test_workers_that_do_not_fit_are_not_tried(monkeypatch):
    monkeypatch.setattr(limits, "shared_memory_free", lambda: 1000)
    tuning = tune_dataset(Sleeps(0.001), 8, budget_s=1.0)
    assert [row.setting.workers for row in tuning.rows] == [0]
    assert "1 worker did not work: " in tuning.why and "--shm-size" in tuning.why


class OnlyHere(Sleeps):
    """Holds something that another process cannot use, as an open HDF5 file or a database connection."""

    def __init__(self):
        super().__init__(0.0005)
        self.home = os.getpid()

    def __getitem__(self, index):
        if os.getpid() != self.home:
            raise RuntimeError("not in this process")
        return super().__getitem__(index)


def test_workers_that_fail_are_reported_and_none_are_chosen():
    tuning = tune_dataset(OnlyHere(), 8, budget_s=1.0)
    assert tuning.setting.workers == 0 and "1 worker did not work" in tuning.why
    assert not children()


def test_a_loader_without_batches_is_an_input_error():
    with pytest.raises(InputError, match="no batch"):
        tune(lambda setting: DataLoader(TensorDataset(torch.zeros(3)), 8, drop_last=True, **setting.options()))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_round_counts_images_and_leaves_no_worker(workers):
    loader = DataLoader(TensorDataset(torch.zeros(20, 4)), 8, **Setting(workers).options())
    seen = []
    found = run_round(loader, workers, 0.1, seen.append, 2)
    del loader
    assert {len(batch[0]) for batch in seen} == {8, 4} and 4 < found.batch <= 8
    assert found.rate > 0 and found.first > 0 and not children()


INTERRUPTED = """
import multiprocessing, signal, sys, time
sys.path.insert(0, {tests!r})
from helpers.lab.tuning import tune_dataset
from test_tuning import Sleeps
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print("tuning", flush=True)
    try:
        tune_dataset(Sleeps(0.002), 8, budget_s=300, step_s=0.01)
    except KeyboardInterrupt as error:
        kept = error  # as a notebook keeps the last one
    left = multiprocessing.active_children()
    print("left", len(left), flush=True)
    time.sleep(60)
"""


def descendants(pid):
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    state, parent = file.read().rsplit(")", 1)[1].split()[:2]
            except OSError:
                continue
            if int(parent) == pid and state != "Z":
                found.append(int(entry))
    return found


def test_ctrl_c_leaves_no_worker(tmp_path, child_environment):
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED.format(tests=os.path.dirname(__file__)))
    child = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env=child_environment, start_new_session=True
    )
    try:
        assert child.stdout.readline() == "tuning\n"
        deadline = time.monotonic() + 60
        while not descendants(child.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert descendants(child.pid), "a worker has started"
        time.sleep(0.3)
        os.killpg(child.pid, signal.SIGINT)  # as a terminal does: to the workers too
        assert child.stdout.readline() == "left 0\n"
    finally:
        child.kill()
        child.wait()
