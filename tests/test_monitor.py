"""The run folder and the one log call."""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers.config import TrainConfig
from helpers.errors import InputError
from helpers.files import replace_text, write_json
from helpers.monitor import RunLog, StepClock, new_run_folder
from helpers.progress import Progress

QUIET = TrainConfig(progress=False)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scalars(folder, name):
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, round(event.value, 4)) for event in accumulator.Scalars(name)]


def test_one_call_reaches_text_json_lines_and_tensorboard(tmp_path):
    with RunLog(tmp_path, QUIET) as log:
        log.log("train", 10, loss=0.5, lr=0.001)
        log.log("eval", 10, loss=float("nan"), accuracy=0.75)
        log.say("a sentence")
    assert lines(tmp_path)[0] == {"kind": "train", "step": 10, "loss": 0.5, "lr": 0.001}
    assert lines(tmp_path)[1]["loss"] is None, "JSON has no nan"
    text = (tmp_path / "train.log").read_text()
    assert "loss 0.5" in text and "a sentence" in text
    assert scalars(tmp_path, "train/loss") == [(10, 0.5)] and scalars(tmp_path, "eval/accuracy") == [(10, 0.75)]
    assert json.loads((tmp_path / "config.json").read_text())["lr"] == QUIET.lr


def test_a_continued_run_drops_what_happened_after_its_checkpoint(tmp_path):
    with RunLog(tmp_path, QUIET) as log:
        for step in (1, 2, 3, 4):
            log.log("train", step, loss=float(step))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')  # a run that was killed while writing
    with RunLog(tmp_path, QUIET, after_step=2) as log:
        for step in (3, 4):
            log.log("train", step, loss=step * 10.0)
    assert [(entry["step"], entry["loss"]) for entry in lines(tmp_path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
        (4, 40.0),
    ]
    assert scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


def test_two_trainings_cannot_write_one_folder(tmp_path):
    with RunLog(tmp_path, QUIET), pytest.raises(InputError, match="being written by another"):
        RunLog(tmp_path, QUIET, after_step=0)


def test_a_used_folder_is_never_mixed_with_a_new_run(tmp_path):
    folder = new_run_folder(TrainConfig(run_dir=str(tmp_path / "a" / "b")))
    (folder / "note.txt").write_text("mine")
    for path in (folder, folder / "note.txt"):
        with pytest.raises(InputError, match="already in use"):
            new_run_folder(TrainConfig(run_dir=str(path)))
    with pytest.raises(InputError, match=r"cannot be made.*--run-dir"):
        new_run_folder(TrainConfig(run_dir=str(folder / "note.txt" / "x")))


def test_unnamed_runs_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = {new_run_folder(QUIET) for _ in range(5)}
    assert len(folders) == 5 and all(folder.parent.name == "runs" for folder in folders)


def test_progress_is_silent_when_off(tmp_path, capfd):
    with RunLog(tmp_path, QUIET, total_steps=5) as log:
        log.say("nothing to see")
        log.log("train", 1, loss=1.0)
    assert capfd.readouterr() == ("", "")


def test_files_are_replaced_whole(tmp_path):
    write_json(tmp_path / "a.json", {"x": float("inf"), "y": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": None, "y": 1}
    with pytest.raises(UnicodeEncodeError):
        replace_text(tmp_path / "a.json", "\udcff")
    assert json.loads((tmp_path / "a.json").read_text())["y"] == 1 and len(list(tmp_path.iterdir())) == 1


def test_clock_books_time_to_phases(monkeypatch):
    times = iter([0.0, 10.0, 12.0, 15.0, 15.5])
    monkeypatch.setattr("helpers.monitor.time.perf_counter", lambda: next(times))
    clock = StepClock()
    clock.start()
    for phase in ("load", "forward", "load"):
        clock.mark(phase)
    assert dict(clock.seconds) == {"load": 2.5, "forward": 3.0}


def test_steady_rate_leaves_the_first_epoch_out():
    progress = Progress()
    assert progress.images_per_s() is None and progress.data_wait_share() is None
    for images, seconds in ((100, 50.0), (100, 10.0), (100, 5.0), (100, 4.0)):
        progress.add_part(images // 2, seconds / 2, seconds / 8)
        progress.add_part(images // 2, seconds / 2, seconds / 8)  # an epoch that was interrupted and continued
        progress.next_epoch()
    assert progress.images_per_s() == 20.0 and progress.data_wait_share() == 0.25
    only = Progress()
    only.add_part(10, 2.0, 1.0)
    assert only.images_per_s() == 5.0
