"""The laboratory: the clock, measured steps, predictions and pictures."""

import json
import re

import pytest
import torch

from helpers.config import preset
from helpers.lab import lesson
from helpers.lab.lesson import banner, predict, reveal, show_changes, show_source, workload
from helpers.lab.measure import PHASES, Spread, Steps, SyncedClock, measure_steps, ratio
from helpers.lab.plots import COLOURS, contact_sheet, step_bars


def steps(name="naive", load=0.3, images=32):
    one = dict.fromkeys(PHASES, 0.1)
    return Steps(name, [{**one, "load": load + 0.01 * n} for n in range(5)], images, {**one, "load": 3.0})


def test_spread_is_median_and_middle_half():
    assert Spread.of([1, 2, 3, 4, 5]) == Spread(3, 2, 4) and Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


def test_shares_and_ratios_are_of_the_steps():
    slow, fast = steps(load=0.5), steps(load=0.0, images=64)
    assert slow.total().median == pytest.approx(1.02) and slow.share("load").median == pytest.approx(100 * 0.52 / 1.02)
    times = ratio(slow, fast)
    assert times.median == pytest.approx(2 * 1.02 / 0.52) and times.low < times.median < times.high


def test_clock_keeps_steps_apart_and_waits_for_the_device(monkeypatch):
    waits, now = [], iter(range(100))
    monkeypatch.setattr("helpers.lab.measure.synchronize", waits.append)
    monkeypatch.setattr("helpers.monitor.time.perf_counter", lambda: next(now))
    clock = SyncedClock(torch.device("cpu"))
    for phase in ("load", "backward", "load", "backward", "optimizer", "other", "load", "other"):
        clock.mark(phase)
    assert len(waits) == 8
    assert [(s["load"], s["backward"], s["other"]) for s in clock.steps] == [(2, 2, 1), (1, 0, 1)]


def test_measuring_runs_the_real_loop_and_leaves_nothing(digits, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    measured = measure_steps(preset("naive", data=str(digits), image_size=32, device="cpu"), steps=6, warmup=2)
    assert len(measured.seconds) == 6 and measured.images == 32 and measured.name == "naive"
    assert all(
        step["load"] > 0 and step["forward"] > 0 and step["backward"] > 0 and step["optimizer"] > 0
        for step in measured.seconds
    )
    assert list(tmp_path.glob("runs*")) == [] and capfd.readouterr() == ("", "")


def test_banner_names_cores_and_says_why_there_is_no_gpu(capsys, monkeypatch):
    monkeypatch.setattr(lesson, "cuda_problem", lambda index=0: "the driver is too old")
    monkeypatch.setattr(lesson, "torchcodec_reason", lambda: "not installed")
    banner()
    out = capsys.readouterr().out
    assert "usable of" in out and "the driver is too old" in out and "Pillow takes its place: not installed" in out


def test_workload_is_scaled_to_the_device(monkeypatch):
    assert workload("naive", device="cpu").model == "small_cnn"
    monkeypatch.setattr(lesson, "pick_device", lambda name: torch.device("cuda:0"))
    assert (workload("naive").model, workload("naive").image_size) == ("resnet50", 224)
    assert workload("tuned", model="resnet18").model == "resnet18"


def test_changes_list_only_what_differs(capsys):
    show_changes("naive", "tuned")
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split() == ["setting", "naive", "tuned"] and "cache False True" in [
        " ".join(row.split()) for row in rows
    ]
    assert not any(row.split()[0] in ("seed", "device", "image_size") for row in rows[1:])


def test_source_is_shown_as_it_runs(capsys):
    show_source(SyncedClock.mark, Spread.of)
    out = capsys.readouterr().out
    assert out.startswith("def mark(self, phase") and "synchronize(self.device)" in out and "def of(cls" in out


@pytest.fixture
def box(monkeypatch):
    """The widgets of a prediction: the text box and the answer beside it."""
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda bundle, raw: shown.append(bundle))

    def ask(key="k"):
        import ipywidgets

        predict(key, "How long?", "ms")
        view = shown[-1]["application/vnd.jupyter.widget-view+json"]["model_id"]
        row = ipywidgets.Widget._instances[view].children[1] if hasattr(ipywidgets.Widget, "_instances") else None
        if row is None:
            from ipywidgets.widgets.widget import _instances

            row = _instances[view].children[1]
        return row.children[0], row.children[2], shown[-1]["text/plain"]

    return ask


def test_a_prediction_is_kept_outside_the_notebook_and_comes_back(box):
    text, answer, plain = box()
    assert text.value == "" and plain == "How long?  [      ] ms"
    text.value = "12,5"
    assert json.loads(lesson.predictions_file().read_text()) == {"k": 12.5} and answer.value == "kept"
    text.value = "a lot"
    assert "not a number" in answer.value and json.loads(lesson.predictions_file().read_text()) == {"k": 12.5}
    assert box()[0].value == "12.5" and box("other")[0].value == ""
    text.value = ""
    assert json.loads(lesson.predictions_file().read_text()) == {}


def test_a_damaged_or_unwritable_predictions_file_stops_nobody(box, monkeypatch, tmp_path):
    lesson.predictions_file().write_text("{broken")
    box()[0].value = "3"
    monkeypatch.setenv("COURSE_PREDICTIONS", str(tmp_path / "no" / "such" / "folder" / "p.json"))
    box()[0].value = "4"


@pytest.mark.parametrize(
    ("predicted", "said"), [(None, None), (90, "TOO MUCH"), (10, "TOO LITTLE"), (52, "what your machine does")]
)
def test_reveal_says_what_a_miss_means(capsys, predicted, said):
    if predicted is not None:
        lesson.predictions_file().write_text(json.dumps({"k": predicted}))
    reveal("k", Spread(50, 48, 53), "%", more="TOO MUCH", less="TOO LITTLE")
    out = capsys.readouterr().out
    assert "50 %" in out and "48 to 53" in out
    assert ("(none)" in out) == (predicted is None)
    assert all((word in out) == (word == said) for word in ("TOO MUCH", "TOO LITTLE", "what your machine does"))


def test_pictures_have_units_spread_and_fixed_colours(digits):
    from helpers.data.sources import open_data

    data = open_data(str(digits), 32, verify=False)
    sheet = contact_sheet(data.train, data.classes, rows=2)
    assert len(sheet.axes) == 20 and re.fullmatch(r"\d+×\d+", sheet.axes[0].get_title())
    axis = step_bars(steps(), steps("tuned", 0.0)).axes[0]
    assert "milliseconds per image" in axis.get_xlabel() and "middle half" in axis.get_xlabel()
    assert [text.get_text() for text in axis.get_yticklabels()] == ["naive", "tuned"]
    assert set(COLOURS) == set(PHASES) and len(axis.patches) == 2 * len(PHASES)
    assert axis.patches[0].get_width() == pytest.approx(1e3 * 0.32 / 32)
