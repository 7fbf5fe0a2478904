"""The lists of dependencies agree: pyproject.toml for pip, environment.yml for conda, and the tested versions."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())
# What conda-forge calls by another name.
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base", "playwright": "playwright-python"}
# What is imported under another name.
IMPORT_NAMES = {"pillow": "PIL", "pyyaml": "yaml", "lightning-fabric": "lightning_fabric", "spdl-core": "spdl"}

# Used where the reader has it, done without where not.
OPTIONAL = {"pillow_heif"}


def numbers(version):
    return [int(part) for part in version.split(".")]


def bounds(lines):
    """{name: lower bound}; anything but a plain `name>=version` is refused, since .ci/environment.py reads no
    more."""
    pairs = [re.fullmatch(r"([a-z0-9-]+)>=(\d+(?:\.\d+)*)", line) for line in lines]
    assert all(pairs), [line for line, pair in zip(lines, pairs, strict=True) if not pair]
    return {pair[1]: pair[2] for pair in pairs}


def test_conda_has_the_same_packages_with_the_same_bounds():
    packages = [line for line in CONDA["dependencies"] if isinstance(line, str) and line != "pip"]
    python = [line for line in packages if line.startswith("python>")]
    assert [line.split(",")[0] for line in python] == ["python" + PROJECT["requires-python"]]
    wanted = bounds(PROJECT["dependencies"] + EXTRAS["test"])
    assert bounds([line for line in packages if line not in python]) == {
        CONDA_NAMES.get(name, name): bound for name, bound in wanted.items()
    }


def test_conda_takes_everything_from_conda_forge_and_only_this_project_from_pip():
    assert CONDA["name"] == PROJECT["name"]
    assert CONDA["channels"] == ["conda-forge", "nodefaults"]
    assert [line for line in CONDA["dependencies"] if isinstance(line, dict)] == [{"pip": ["-e ."]}]
    assert "PIP_NO_DEPS=1 conda env create" in (ROOT / "environment.yml").read_text()


def test_tested_versions_are_exact_and_within_the_bounds():
    lines = (ROOT / ".ci" / "tested-versions.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines)
    wanted = bounds(PROJECT["dependencies"] + [line for extra in EXTRAS.values() for line in extra])
    assert tested.keys() == wanted.keys()
    assert [name for name, bound in wanted.items() if numbers(tested[name]) < numbers(bound)] == []


@pytest.mark.parametrize(
    ("folder", "extras"),
    [("helpers", []), ("tests", ["test", "bench"]), (".ci", ["test"])],
    ids=["helpers", "tests", "ci"],
)
def test_everything_imported_is_declared(folder, extras):
    """A package that is there only because another one needs it can be gone with that one's next release."""
    declared = bounds(PROJECT["dependencies"] + [line for extra in extras for line in EXTRAS[extra]])
    known = {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in declared} | set(sys.stdlib_module_names)
    known |= {"helpers", "tests"}
    # jupyterlab and nbval stand for the parts of Jupyter that they are made of.
    known |= {"IPython", "ipykernel", "jupyter_client", "jupyter_core", "nbformat", "nbclient", "traitlets"}
    known |= OPTIONAL
    modules = list((ROOT / folder).rglob("*.py"))
    known |= {path.stem for path in modules}
    unknown = set()
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            unknown |= {(path.relative_to(ROOT).as_posix(), name) for name in names if name.split(".")[0] not in known}
    assert not unknown
