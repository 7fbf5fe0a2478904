"""What the README says is so: its table is what was recorded, its links lead somewhere, its picture is the chapter's."""

import base64
import json
import re
from pathlib import Path

import nbformat

from helpers.config import TrainConfig
from tests.bench import readme

REPO = Path(__file__).resolve().parents[1]
TEXT = (REPO / "README.md").read_text(encoding="utf-8")


def test_the_table_is_what_make_bench_recorded():
    recorded = json.loads(readme.RESULTS.read_text(encoding="utf-8"))
    assert readme.BLOCK.search(TEXT).group() == readme.markdown(recorded), "run python -m tests.bench.readme"


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert targets and all(target.startswith("https://") or (REPO / target).exists() for target in targets)


def test_flags_and_targets_exist():
    flags = set(re.findall(r"(?<![\w-])--([a-z][a-z-]*)", TEXT)) - {"help", "logdir"}
    assert flags and all(flag.replace("-", "_") in TrainConfig.__dataclass_fields__ for flag in flags)
    makefile = (REPO / "Makefile").read_text()
    assert all(f"\n{target}:" in makefile for target in re.findall(r"make ([a-z]+)", TEXT))


def test_every_chapter_is_in_the_map():
    chapters = [path.name for path in (REPO / "notebooks").glob("[0-9][0-9]_*.ipynb")]
    assert all(f"notebooks/{name}" in TEXT for name in chapters)


def test_the_picture_is_the_one_in_the_chapter():
    cells = nbformat.read(REPO / "notebooks/00_start_here.ipynb", as_version=4).cells
    pictures = [
        o.data["image/png"]
        for c in cells
        if c.cell_type == "code"
        for o in c.outputs
        if "image/png" in o.get("data", {})
    ]
    assert base64.b64decode(pictures[-1]) == (REPO / ".github/step_bars.png").read_bytes(), "run make notebooks"


def test_every_dependency_has_its_reason():
    import tomllib

    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.match(r"[\w-]+", item).group() for items in lists for item in items}
    table = TEXT.split("## Dependencies")[1]
    assert {name for name in names if name.removesuffix("-core") not in table} == set()
