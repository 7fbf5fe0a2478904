"""What is kept beside a prediction, its summary and export; the pictures of chapter 01 and the one that moves."""

import base64
import io
import json
import time

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure
from PIL import Image

from helpers.lab import lesson, record
from helpers.lab.batch_lab import BatchSize, Learned
from helpers.lab.lesson import main, reveal, short, summary
from helpers.lab.measure import Spread
from helpers.lab.plots import COLOURS, KINDS, bars, learning_picture, live, png, sizes_picture, starving_picture
from helpers.lab.plots import workers_picture as workers_of
from helpers.lab.record import chapter_keys, export, kept, measurement, predictions_file, record_check

TOLD = {"more": "MORE.", "less": "LESS."}


@pytest.fixture(autouse=True)
def a_new_kernel(monkeypatch):
    monkeypatch.setattr(lesson, "_questions", {})
    yield
    plt.close("all")


# ---- measurements, summary, export ----------


def test_reveal_keeps_the_measurement_and_the_question_beside_the_prediction(capsys):
    predictions_file().write_text(json.dumps({"01-other": 3}))
    lesson._questions["01-wait"] = "How long?"
    reveal("01-wait", Spread(2.0, 1.5, 2.5), "s", **TOLD)
    assert capsys.readouterr().out.startswith("How long?\npredicted  (none)\nmeasured   2 s")
    assert measurement("01-wait") == {"median": 2, "low": 1.5, "high": 2.5, "unit": "s", "question": "How long?"}
    assert kept()["01-other"] == 3


def test_summary_puts_predictions_beside_measurements(capsys):
    predictions_file().write_text(json.dumps({"01-a": 9, "01-b": 2.1, "00-z": 1, "01-unmeasured": 4}))
    lesson._questions.update({"01-a": "First", "01-b": "Second, longer"})
    reveal("01-b", Spread(2, 1.9, 2.2), "×", **TOLD)
    reveal("01-a", Spread(4, 3, 5), "s", **TOLD)
    reveal("01-c", Spread(12345.6, 12000, 13000), "images/s", **TOLD)
    reveal("00-z", Spread(1, 1, 1), "s", **TOLD)
    capsys.readouterr()
    summary("01")
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["predicted", "measured"],
        ["Second,", "longer", "2.1", "2", "×", "right"],
        ["First", "9", "4", "s", "too", "much"],
        ["01-c", "–", "12,346", "images/s"],
        ["1", "of", "2", "predictions", "were", "right."],
    ]
    summary("07")
    assert "Nothing of chapter 07" in capsys.readouterr().out


def test_short_numbers():
    assert [short(value) for value in (0.01234, 6.4789, 999.4, 1234.5)] == ["0.0123", "6.48", "999", "1,234"]


def test_a_check_that_passed_stays_passed():
    record_check("pad_collate", False)
    assert record.part("checks") == {"pad_collate": False}
    record_check("pad_collate", True)
    record_check("pad_collate", False)
    assert record.part("checks") == {"pad_collate": True}


def test_export_holds_numbers_and_words_of_the_course_only(monkeypatch):
    measured = {"median": 1, "low": 1, "high": 2, "unit": "s", "question": "Q", "host": "secret"}
    predictions_file().write_text(
        json.dumps(
            {
                "01-a": 2,
                "01-text": "secret",
                "/home/secret": 3,
                "measured": {"01-a": measured, "01-broken": {"median": "secret"}, "secret path": measured},
                "checks": {"pad_collate": True, "secret/path": True, "other": "secret"},
            }
        )
    )
    text = json.dumps(export())
    assert "secret" not in text and str(predictions_file().parent) not in text
    answers = export()["answers"]
    assert answers["01-a"] == {"predicted": 2, "measured": {k: measured[k] for k in record.MEASURED}}
    assert answers["01-broken"] == {"predicted": None, "measured": None}
    assert export()["checks"] == {"pad_collate": True} and set(export()["machine"]) == {
        "cores",
        "gpu",
        "python",
        "torch",
    }


@pytest.mark.parametrize("content", ["{broken", "[1, 2]", '{"measured": 3, "checks": []}', '{"01-a": true}'])
def test_a_damaged_file_stops_nobody(content, capsys):
    predictions_file().write_text(content)
    summary("01")
    assert export()["checks"] == {} and chapter_keys("02") == []
    reveal("02-a", Spread(1, 1, 1), "s", **TOLD)
    record_check("sharded", True)
    assert measurement("02-a")["median"] == 1 and export()["checks"] == {"sharded": True}


def test_export_command_prints_or_writes(capsys, tmp_path):
    reveal("01-a", Spread(1, 1, 1), "×", **TOLD)
    capsys.readouterr()
    main(["export"])
    assert json.loads(capsys.readouterr().out)["answers"]["01-a"]["measured"]["unit"] == "×"
    main(["export", "--to", str(tmp_path / "mine.json")])
    assert json.loads((tmp_path / "mine.json").read_text(encoding="utf-8"))["format"] == 1
    with pytest.raises(SystemExit) as stopped:
        main(["export", "--to", str(tmp_path / "no" / "mine.json")])
    assert stopped.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


# ---- pictures ----------

CURVES = {
    "waiting": {0: Spread(100, 90, 110), 2: Spread(200, 190, 210), 8: Spread(800, 790, 810)},
    "decoding": {0: Spread(1000, 900, 1100), 2: Spread(2000, 1900, 2100), 8: Spread(2000, 1900, 2100)},
}


def test_no_phase_and_no_kind_share_a_colour():
    assert not set(KINDS.values()) & set(COLOURS.values()) and len(set(KINDS.values())) == 3


def test_bars_have_a_unit_a_spread_and_their_values():
    axis = bars({"fork": Spread(0.05, 0.04, 0.06), "spawn": Spread(2, 2, 2.5)}, "seconds", log=True).axes[0]
    assert axis.get_xlabel().startswith("seconds") and "middle half" in axis.get_xlabel()
    assert [text.get_text() for text in axis.get_yticklabels()] == ["fork", "spawn"] and axis.get_xscale() == "log"
    assert [text.get_text() for text in axis.texts] == ["0.05", "2"] and len(axis.lines) == 2


def test_workers_are_drawn_against_none(monkeypatch):
    monkeypatch.setattr("helpers.lab.plots.usable_cpus", lambda: 2)
    axis = workers_of(CURVES).axes[0]
    texts = [text.get_text() for text in axis.texts]
    assert texts == ["waiting: 8×", "decoding: 2×", "2 usable cores"] and axis.lines[0].get_color() == KINDS["waiting"]
    monkeypatch.setattr("helpers.lab.plots.usable_cpus", lambda: 64)
    assert "64 usable cores" not in [text.get_text() for text in workers_of(CURVES).axes[0].texts]


def test_starving_adds_up_without_workers_and_overlaps_with_them():
    axis = starving_picture(CURVES, "decoding", batch=100, step_ms=60).axes[0]
    widths = [patch.get_width() for patch in axis.patches]  # waiting, computing; one row for each number of workers
    assert widths == pytest.approx([100, 60, 0, 60, 0, 60])
    assert [text.get_text() for text in axis.texts][:2] == ["62% waiting", "0% waiting"]
    assert axis.patches[0].get_facecolor()[:3] == pytest.approx(
        tuple(int(COLOURS["load"][i : i + 2], 16) / 255 for i in (1, 3, 5))
    )


def test_batch_pictures_name_their_units():
    sizes = [BatchSize(8, Spread(100, 90, 110), 20), BatchSize(64, Spread(300, 290, 310), 160)]
    assert [axis.get_title(loc="left") for axis in sizes_picture(sizes).axes] == [
        "images per second",
        "peak memory beyond idle, MB",
    ]
    runs = [Learned(32, 1e-3, 300, [10, 20], [1, 2], [0.5, 0.9]), Learned(256, 2e-3, 40, [10, 20], [1, 2], [0.2, 0.6])]
    left, right = learning_picture(runs).axes
    assert (left.get_xlabel(), right.get_xlabel()) == ("images seen", "seconds of training")
    assert [text.get_text() for text in left.get_legend().get_texts()] == [
        "32, rate 0.001: 300 steps",
        "256, rate 0.002: 40 steps",
    ]


@pytest.fixture
def shown(monkeypatch):
    import IPython.display

    bundles = []
    monkeypatch.setattr(IPython.display, "display", lambda bundle, raw: bundles.append(bundle))
    return bundles


def widgets_of(bundle):
    from ipywidgets.widgets.widget import _instances

    return _instances[bundle["application/vnd.jupyter.widget-view+json"]["model_id"]].children


def test_a_live_picture_moves_and_stands_there_without_widgets(shown):
    def draw(kind, step_ms):
        return starving_picture(CURVES, kind, batch=32, step_ms=step_ms)

    live(draw, kind=["decoding", "waiting"], step_ms=(1, 100, 1, 10))
    choice, slider, image = widgets_of(shown[0])
    at_start = image.value
    assert base64.b64decode(shown[0]["image/png"]) == at_start and "kind, step_ms" in shown[0]["text/plain"]
    assert Image.open(io.BytesIO(at_start)).size == (880, 330) and slider.description == "step ms"
    seconds = []
    for step in (40, 60, 80, 100):
        before, start = image.value, time.perf_counter()
        slider.value = step
        seconds.append(time.perf_counter() - start)
        assert image.value != before
    choice.value = "waiting"
    slider.value, choice.value = 10, "decoding"
    assert image.value == at_start, "the same values give the same picture"
    assert plt.get_fignums() == [] and min(seconds) < 0.5


def test_png_closes_what_it_drew():
    assert png(plt.figure()).startswith(b"\x89PNG") and plt.get_fignums() == []
    assert png(Figure()).startswith(b"\x89PNG")
