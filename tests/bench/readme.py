"""The table in the README, made from the recorded results: `python -m tests.bench.readme` writes it anew."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.bench.verdict import number

HERE = Path(__file__).resolve().parent
README, RESULTS = HERE.parents[1] / "README.md", HERE / "results.json"
BLOCK = re.compile(r"(?<=<!-- make bench -->\n).*?(?=<!-- end -->)", re.DOTALL)
TITLES = {
    "speed": "Training speed",
    "target": "Time to 90 % validation accuracy",
    "limit": "Distance to the limit",
    "overhead": "Cost of the loop, a step of a tiny MLP",
    "loader": "Loading JPEGs without a cache, two workers",
    "import": "Importing the package",
}


def markdown(results: dict) -> str:
    """What was measured, its median with the spread over rounds, and what it must reach; one line on the machine."""
    lines = ["| | what | median (min–max) | must reach |", "| --- | --- | --- | --- |"]
    for name, title in TITLES.items():
        for row in (row for row in results["figures"][name]["rows"] if row["must"]):
            median, low, high = (number(row[key]) for key in ("median", "min", "max"))
            must = row["must"] + ("" if row["reached"] in (True, None) else " (not reached)")
            lines.append(f"| {title} | {row['what']} | {median} {row['unit']} ({low}–{high}) | {must} |")
            title = ""
    machine = results["machine"]
    bf16 = "with" if machine["bf16_hardware"] else "without"
    where = f"{machine['cores'].split()[0]} cores of an {machine['processor']} ({machine['instructions']}, {bf16} bf16 hardware)"
    versions = f"torch {machine['torch']}, Python {machine['python']}, {machine['date']}"
    lines += [
        "",
        f"Measured by `make bench` on {where}, {versions}; every number: [results.json](tests/bench/results.json).",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    table = markdown(json.loads(RESULTS.read_text(encoding="utf-8")))
    README.write_text(BLOCK.sub(lambda _: table, README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
