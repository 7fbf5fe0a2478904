"""``python -m tests.bench [--only NAME …] [--quick] [--json PATH] [--record]``: a table; exit code 1 if a bar is
missed."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.bench import importing, limit, loader, machine, overhead, training
from tests.bench.children import ChildFailed, in_child, say
from tests.bench.verdict import Row, table

RESULTS = Path(__file__).with_name("results.json")
# Of each figure: what measures it, and what makes rows of its numbers on the machine described.
FIGURES: dict[str, tuple[Callable[[bool, Path], dict], Callable[[dict, dict], list[Row]]]] = {
    "import": (importing.measure, importing.rows),
    "overhead": (partial(in_child, "tests.bench.overhead"), overhead.rows),
    "limit": (partial(in_child, "tests.bench.limit"), limit.rows),
    "loader": (partial(in_child, "tests.bench.loader"), loader.rows),
    "speed": (training.measure_speed, training.speed_rows),
    "target": (training.measure_target, training.target_rows),
}


def measure(names: list[str], quick: bool) -> dict:
    """Measure figures, print the table, and return all numbers."""
    facts = machine.describe()
    say(", ".join(f"{name} {value}" for name, value in facts.items()))
    if facts["load_before"] > 0.5:
        say("other programs are busy on this machine: the figures will be noisy")
    rows, figures = [], {}
    for name, (numbers, judge) in FIGURES.items():
        if name not in names:
            continue
        say(f"measuring {name} …")
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="bench-") as work:
            try:
                raw = numbers(quick, Path(work))
            except ChildFailed as error:
                say(str(error))
                raw, new = {"error": str(error)}, [Row(name, "failed", "", [], at_least=0)]
            else:
                new = judge(raw, facts)
        rows += new
        seconds = round(time.monotonic() - start, 1)
        figures[name] = {"rows": [row.as_dict() for row in new], "seconds": seconds, "raw": raw}
    print(table(rows), flush=True)
    reached = all(row.reached is not False for row in rows)
    return {"machine": facts, "quick": quick, "reached": reached, "figures": figures}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measure the course on two cores.")
    names = {"nargs": "+", "choices": list(FIGURES), "default": list(FIGURES), "metavar": "NAME"}
    parser.add_argument("--only", **names, help=", ".join(FIGURES))
    parser.add_argument("--quick", action="store_true", help="few rounds: whether it runs, not how fast")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every number there")
    parser.add_argument("--record", action="store_true", help=f"write them to tests/bench/{RESULTS.name}")
    options = parser.parse_args(arguments)
    if options.record and options.quick:
        parser.error("--record is not for --quick")
    if options.record and len(set(options.only)) < len(FIGURES) and not RESULTS.exists():
        parser.error("--record needs a full run first; then --only can measure a figure anew")
    if not machine.keep_to_two_cores():
        parser.error(f"the figures are for {machine.CORES} cores, and fewer are usable here")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # tidies up on its way out
    try:
        results = measure(options.only, options.quick)
    except KeyboardInterrupt:
        say("stopped; nothing was written")
        return 130
    if options.record and RESULTS.exists():
        before = json.loads(RESULTS.read_text(encoding="utf-8"))["figures"]
        results["figures"] = {name: results["figures"].get(name) or before[name] for name in FIGURES}
        rows = [row for figure in results["figures"].values() for row in figure["rows"]]
        results["reached"] = all(row["reached"] is not False for row in rows)
    text = json.dumps(results, indent=1, ensure_ascii=False) + "\n"
    for path in [options.json] * bool(options.json) + [RESULTS] * options.record:
        path.write_text(text, encoding="utf-8")
    return 0 if results["reached"] else 1


if __name__ == "__main__":
    sys.exit(main())
