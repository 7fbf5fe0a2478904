"""The contract every chapter keeps, so that nbval really compares it and a reader finds it as the next."""

import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

REPO = Path(__file__).resolve().parents[1]
CHAPTERS = sorted((REPO / "notebooks").glob("[0-9][0-9]_*.ipynb"))
IGNORED = "nbval-ignore-output"


@pytest.fixture(params=CHAPTERS, ids=lambda path: path.stem)
def chapter(request):
    return request.param


def cells(path, kind):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def text_of(output):
    data = output.get("data", {})
    return output.get("text", "") + "".join(str(data[kind]) for kind in data if kind.startswith("text/"))


def test_there_is_a_first_chapter():
    assert CHAPTERS and CHAPTERS[0].name == "00_start_here.ipynb"


def test_notebooks_are_valid_and_in_canonical_form(chapter, tmp_path):
    nbformat.validate(nbformat.read(chapter, as_version=4))
    copy = tmp_path / chapter.name
    copy.write_bytes(chapter.read_bytes())
    subprocess.run([sys.executable, REPO / ".ci/notebooks.py", "canonical", copy], check=True, capture_output=True)
    assert copy.read_bytes() == chapter.read_bytes(), "run make notebooks"


def test_every_code_cell_has_been_run_in_order(chapter):
    counts = [cell.execution_count for cell in cells(chapter, "code")]
    assert counts == list(range(1, len(counts) + 1)), (
        "nbval never compares a cell that has not been run; run make notebooks"
    )


def test_the_only_tag_is_the_one_nbval_knows(chapter):
    for cell in cells(chapter, "code"):
        assert set(cell.metadata.get("tags", [])) <= {IGNORED}
        assert not re.search(r"#\s*NBVAL", cell.source), "markers belong in the tags, not in the reader's face"


def test_nbval_compares_at_least_five_texts(chapter):
    compared = [c for c in cells(chapter, "code") if IGNORED not in c.metadata.get("tags", [])]
    assert sum(any(text_of(output).strip() for output in cell.outputs) for cell in compared) >= 5


def test_outputs_hold_no_error_warning_path_or_host(chapter):
    outputs = [output for cell in cells(chapter, "code") for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    for output in outputs:
        assert not re.search(r"/(root|home|tmp|work|Users|usr|opt)/|0x[0-9a-f]{6,}|https?://\w+:\d+", text_of(output))


def test_cells_are_short_and_call_no_shell(chapter):
    code = cells(chapter, "code")
    assert 10 <= len(code) <= 20
    for cell in code:
        assert len(cell.source.splitlines()) <= 15
        assert not re.search(r"^\s*[!%]", cell.source, re.M), "commands go through a helper that has a time limit"
        assert not cell.source.rstrip().endswith(";"), "IPython prints it all the same under nbval; end with plt.show()"


def test_a_chapter_says_what_it_costs_predicts_checks_and_sums_up(chapter):
    prose = "\n".join(cell.source for cell in cells(chapter, "markdown"))
    code = "\n".join(cell.source for cell in cells(chapter, "code"))
    assert re.search(r"^# \d\d · ", prose) and "minute" in prose.split("\n\n")[1]
    assert "predict(" in code and "reveal(" in code and "check(" in code and "banner()" in code
    assert "## Exercise" in prose and "## What to take with you" in prose and "Shut Down Kernel" in prose
    for name in re.findall(r"%load (\S+\.py)", prose):
        assert (chapter.parent / name).exists()


def test_links_lead_somewhere(chapter):
    for cell in cells(chapter, "markdown"):
        for target in re.findall(r"\]\(([^)#]+)", cell.source):
            assert target.startswith("https://") or (chapter.parent / target).exists(), target


def test_settings_named_in_prose_exist(chapter):
    from helpers.config import TrainConfig

    prose = "\n".join(cell.source for cell in cells(chapter, "markdown"))
    for flag in re.findall(r"(?<![\w-])--([a-z][a-z-]*)", prose):
        assert (
            hasattr(TrainConfig, flag.replace("-", "_")) or flag.replace("-", "_") in TrainConfig.__dataclass_fields__
        ), flag


def test_file_ends_once(chapter):
    text = chapter.read_text(encoding="utf-8")
    assert text.endswith("}\n") and not text.endswith("\n\n") and "\r" not in text
    json.loads(text)
