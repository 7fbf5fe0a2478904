"""The design as a test: two shelves, imports one way down their floors, modules that stay small."""

import ast
from pathlib import Path

import pytest

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
MODULES = sorted(HELPERS.rglob("*.py"))

# Each floor may import from those below it, and within itself; helpers.lab stands on all of them.
FLOORS = [
    {"errors", "files", "bars"},
    {"devices", "models", "transforms", "processes", "progress", "data"},
    {"config"},
    {"limits", "loading", "optim", "checkpoint", "monitor"},
    {"run"},
    {"cli", "train"},
]


def imported(path):
    """The helpers modules that a file imports, at the top or inside a function, as dotted names without 'helpers.'."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "helpers":
            names = [node.module] if node.module != "helpers" else [f"helpers.{alias.name}" for alias in node.names]
            found |= {name.removeprefix("helpers.") for name in names}
    return found


def name_of(path):
    return ".".join(path.relative_to(HELPERS).with_suffix("").parts)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_one_way(path):
    name = name_of(path)
    if name.startswith("lab"):
        return
    top = name.split(".")[0]
    targets = {target.split(".")[0] for target in imported(path)}
    assert "lab" not in targets, "the lab imports the training code, never the other way"
    if name in ("__init__", "data.__init__"):
        assert not targets
        return
    floor = next(number for number, names in enumerate(FLOORS) if top in names)
    above = set().union(*FLOORS[floor + 1 :])
    assert not targets & above


def test_no_two_modules_import_each_other():
    graph = {name_of(path): imported(path) for path in MODULES}
    graph["train"] -= {"cli"}  # its command line is started from its last two lines
    done, path = set(), []

    def visit(name):
        assert name not in path, " → ".join([*path[path.index(name) :], name])
        if name in done or name not in graph:
            return
        path.append(name)
        for target in graph[name]:
            visit(target)
        path.pop()
        done.add(name)

    for name in graph:
        visit(name)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_stay_small(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 325


def test_the_loop_stays_under_150_lines():
    tree = ast.parse((HELPERS / "train.py").read_text())
    trainer = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Trainer")
    loop = next(node for node in trainer.body if getattr(node, "name", "") == "train_epoch")
    assert loop.end_lineno - loop.lineno < 60 and trainer.end_lineno - trainer.lineno < 200


def test_public_functions_have_docstrings():
    for path in MODULES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{name_of(path)}.{node.name}"
