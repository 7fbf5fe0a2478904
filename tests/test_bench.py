"""The benchmark's arithmetic: ratios, verdicts, the table, and what is recorded. Nothing is timed here."""

import json
import math
import os
import platform
import subprocess

import pytest

from tests.bench import __main__ as bench
from tests.bench import children, importing, limit, loader, machine, overhead, training
from tests.bench.verdict import Row, differences, number, ratios, table

WITH_BF16, WITHOUT = {"bf16_hardware": True}, {"bf16_hardware": False}


def reached(rows):
    return [row.reached for row in rows if row.must]


def test_each_round_is_compared_with_itself():
    rounds = [{"a": 6.0, "b": 2.0}, {"a": 30.0, "b": 10.0}, {"a": 8.0, "b": 2.0}]
    assert ratios(rounds, "a", "b") == [3.0, 3.0, 4.0]
    assert differences(rounds, "a", "b") == [4.0, 20.0, 6.0]


@pytest.mark.parametrize(
    ("values", "bars", "verdict"),
    [
        ([1.0, 3.0, 9.0], {"at_least": 3}, True),
        ([1.0, 2.9, 9.0], {"at_least": 3}, False),
        ([1.0, 3.0, 9.0], {"at_most": 3}, True),
        ([1.0, 3.1, 9.0], {"at_most": 3}, False),
        ([1.0, 3.0, 9.0], {"at_most": 3, "worst": True}, False),
        ([1.0, 3.0, 9.0], {"at_least": 2, "worst": True}, False),
        ([3.0, 3.0, 9.0], {"at_least": 3, "at_most": 9, "worst": True}, True),
        ([math.inf, 3.0], {"at_most": 60, "worst": True}, False),
        ([], {"at_least": 0}, False),
        ([5.0], {}, None),
    ],
)
def test_the_bar_is_for_the_median_or_for_each_value(values, bars, verdict):
    assert Row("speed", "", "×", values, **bars).reached is verdict


def test_numbers_are_short():
    assert [number(v) for v in (0.123, 3.5, 25, 1234.5, -0.001, -46.9, math.inf)] == [
        "0.12", "3.50", "25.0", "1234", "0.00", "-46.9", "never",
    ]  # fmt: skip


def test_the_table_names_what_is_not_reached():
    rows = [
        Row("speed", "tuned ÷ naive", "×", [3.0, 4.0, 5.0], at_least=3.5),
        Row("target", "tuned", "s", [30.0, 70.0], at_most=60, worst=True),
        Row("limit", "memory", "images/s", [1000.0]),
        Row("loader", "failed", "", [], at_least=0),
    ]
    lines = table(rows).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["figure", "speed", "target", "limit", "loader"]
    assert lines[1].split("  ")[-1] == "reached"
    assert "4.00 ×" in lines[1] and "3.00–5.00 (3)" in lines[1] and "≥ 3.50" in lines[1]
    assert lines[2].endswith("NOT REACHED") and "≤ 60.0, each" in lines[2]
    assert lines[3].endswith("(1)")
    assert lines[4].endswith("NOT REACHED")


def test_json_has_no_infinity():
    row = Row("target", "tuned", "s", [30.0, math.inf, math.inf], at_most=60, worst=True).as_dict()
    assert row["values"] == [30.0, None, None] and row["median"] is None and row["reached"] is False
    json.dumps(row, allow_nan=False)


def test_speed_asks_less_where_bf16_is_emulated():
    pair = {"naive": {"images_per_s": 100.0}, "tuned": {"images_per_s": 300.0}}
    raw = {"rounds": [pair]}
    assert reached(training.speed_rows(raw, WITH_BF16)) == [False]
    assert reached(training.speed_rows(raw, WITHOUT)) == [True]


def test_target_counts_a_run_that_never_arrives():
    def pair(naive, tuned):
        sides = {"naive": naive, "tuned": tuned}
        return {name: {"seconds_to_target": seconds, "seconds": 200.0} for name, seconds in sides.items()}

    fine = {"goal": "0.9", "rounds": [pair(100.0, 30.0), pair(None, 40.0), pair(90.0, 35.0)]}
    assert reached(training.target_rows(fine, WITH_BF16)) == [True, True]
    assert training.target_rows(fine, WITH_BF16)[2].values == [100.0, 200.0, 90.0]
    lost = {"goal": "0.9", "rounds": [pair(100.0, 30.0), pair(100.0, None), pair(90.0, 35.0)]}
    assert reached(training.target_rows(lost, WITH_BF16)) == [True, False]


def test_limit_compares_with_the_epochs_around():
    rounds = [
        {"tuned": 95.0, "before": 110.0, "after": 90.0},
        {"tuned": 80.0, "before": 90.0, "after": 110.0},
    ]
    rows = limit.rows({"rounds": rounds}, WITH_BF16)
    assert rows[0].values == pytest.approx([0.95, 0.8])
    assert rows[0].reached is False


def test_overhead_needs_all_three():
    rounds = [{"bare": 100.0, "ours": 115.0, "fabric": 130.0, "accelerate": 110.0}]
    assert reached(overhead.rows({"rounds": rounds}, WITH_BF16)) == [True, True, False]


def test_loader_is_held_to_the_better_peer():
    plain = {"ours": 110.0, "WebDataset": 100.0, "SPDL": 90.0}
    rounds = [plain | {"ours, scaled": 125.0, "WebDataset, scaled": 120.0, "SPDL, scaled": 130.0}]
    rows = loader.rows({"rounds": rounds}, WITH_BF16)
    assert [row.what for row in rows[:3]] == [
        "ours ÷ WebDataset, same decoder",
        "ours, scaled ÷ WebDataset",
        "ours, scaled ÷ SPDL, scaled",
    ]
    assert reached(rows) == [True, False]


def test_import_is_the_difference():
    rows = importing.rows({"rounds": [{"torch": 1.0, "ours": 1.2, "added": 0.2}]}, WITH_BF16)
    assert rows[0].values == pytest.approx([0.2]) and reached(rows) == [True]


def test_a_child_gets_its_environment_and_its_failure_is_told():
    assert children.run("-c", "import os; print(os.environ['COURSE_X'])", timeout=20, COURSE_X="7") == "7\n"
    with pytest.raises(children.ChildFailed, match="exit code 3\nwhy"):
        children.run("-c", "import sys; print('why', file=sys.stderr); sys.exit(3)", timeout=20)


def test_nothing_outlives_a_child_that_takes_too_long(tmp_path):
    """The grandchild holds a named pipe open: that it can be read to its end shows that the grandchild has ended."""
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    grandchild = f"import time; pipe = open({pipe!r}, 'w'); time.sleep(60)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    reader = subprocess.Popen(["cat", pipe])
    try:
        with pytest.raises(children.ChildFailed, match="not finished after 1 s"):
            children.run("-c", child, timeout=1)
        assert reader.wait(timeout=10) == 0
    finally:
        reader.kill()
        reader.wait()


def test_a_figure_that_fails_is_not_reached_and_the_others_go_on(monkeypatch, capsys):
    def broken(quick, work):
        raise children.ChildFailed("it broke")

    good = {"rounds": [{"torch": 1.0, "ours": 1.1, "added": 0.1}]}
    figures = {"speed": (broken, None), "import": (lambda quick, work: good, importing.rows)}
    monkeypatch.setattr(bench, "FIGURES", figures)
    results = bench.measure(["speed", "import"], quick=True)
    assert results["reached"] is False
    assert [results["figures"][name]["rows"][0]["reached"] for name in figures] == [False, True]
    printed = capsys.readouterr()
    assert "it broke" in printed.err and "NOT REACHED" in printed.out


def test_only_a_full_run_starts_a_record(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results.json")
    for arguments, hint in (
        (["--record", "--quick"], "not for --quick"),
        (["--record", "--only", "speed"], "a full run first"),
    ):
        with pytest.raises(SystemExit) as stop:
            bench.main(arguments)
        assert stop.value.code == 2
        assert hint in capsys.readouterr().err


def test_one_figure_can_be_measured_anew(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(bench.machine, "keep_to_two_cores", lambda: True)
    old = {name: {"rows": [{"reached": True}], "raw": {}} for name in bench.FIGURES}
    bench.RESULTS.write_text(json.dumps({"machine": {}, "quick": False, "reached": True, "figures": old}))
    new = {"speed": {"rows": [{"reached": False}], "raw": {"new": 1}}}
    monkeypatch.setattr(
        bench, "measure", lambda names, quick: {"machine": {}, "quick": quick, "reached": False, "figures": new}
    )
    assert bench.main(["--record", "--only", "speed"]) == 1
    recorded = json.loads(bench.RESULTS.read_text())
    assert recorded["figures"] == {**old, **new} and recorded["reached"] is False


def test_the_machine_is_described_without_its_name():
    facts = machine.describe()
    assert {"cores", "instructions", "bf16_hardware", "torch", "python", "date"} <= facts.keys()
    assert isinstance(facts["bf16_hardware"], bool)
    assert platform.node() not in facts.values()


def test_the_recorded_results_are_whole_and_judged_as_they_would_be_now():
    if not bench.RESULTS.exists():
        pytest.skip("no results are recorded")
    results = json.loads(bench.RESULTS.read_text(encoding="utf-8"))
    assert results.keys() == {"machine", "quick", "reached", "figures"} and results["quick"] is False
    assert results["figures"].keys() == bench.FIGURES.keys()
    for name, (_, judge) in bench.FIGURES.items():
        figure = results["figures"][name]
        again = [row.as_dict() for row in judge(figure["raw"], results["machine"])]
        assert json.loads(json.dumps(again)) == figure["rows"]
    verdicts = [row["reached"] for figure in results["figures"].values() for row in figure["rows"]]
    assert results["reached"] is (False not in verdicts)
