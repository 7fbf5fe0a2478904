"""`make lab` and `make test` in a copy of the repository's set-up, with stand-ins for pip, Jupyter and pytest: no
network.

Each stand-in is a module that notes how it was called. An interpreter is a small script that can pretend to be of
any version.
"""

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BASE_PYTHON = os.path.realpath(sys.executable)
HERE = "{}.{}".format(*sys.version_info)
STAND_IN = """
import json, os, signal, sys
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps([{name!r}, *sys.argv[1:], sys.prefix]) + "\\n")
"""
PIP = """
if os.environ.get("PIP_FAILS"):
    sys.exit("WARNING: slow\\nERROR: torch did not fit\\nERROR: no space left on device\\n")
if os.environ.get("PIP_INTERRUPTED"):
    os.kill(os.getppid(), signal.SIGINT)
    sys.exit(1)
"""
PYTEST = """
if "tests" in sys.argv:
    sys.exit(int(os.environ.get("TESTS_EXIT", 0)))
sys.exit(int(os.environ.get("NOTEBOOKS_EXIT", 0)))
"""


def load_environment(path=ROOT / ".ci" / "environment.py"):
    spec = importlib.util.spec_from_file_location("environment", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def add_distribution(site, name, version, direct_url=None):
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if direct_url:
        (folder / "direct_url.json").write_text(json.dumps({"url": direct_url, "dir_info": {"editable": True}}))


class Machine:
    """A clone, a search path with nothing on it but what a test puts there, and the stand-ins."""

    def __init__(self, folder):
        self.repo, self.bin, self.calls_file = folder / "re po", folder / "bin", folder / "calls"
        for name in (".ci/environment.py", ".ci/tested-versions.txt", "Makefile", "pyproject.toml"):
            (self.repo / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.repo / name)
        for name in ("notebooks/00_start_here.ipynb", "notebooks/01_next.ipynb", "tests/test_nothing.py"):
            (self.repo / name).parent.mkdir(exist_ok=True)
            (self.repo / name).touch()
        self.bin.mkdir()
        for name in ("make", "rm", "find"):
            (self.bin / name).symlink_to(shutil.which(name))
        modules = folder / "modules"
        for name, behaviour in {"pip": PIP, "jupyterlab": "", "pytest": PYTEST}.items():
            (modules / name).mkdir(parents=True)
            (modules / name / "__main__.py").write_text(STAND_IN.format(name=name) + behaviour)
        add_distribution(modules, "pip", "26.0")
        self.variables = {
            "PATH": str(self.bin),
            "PYTHONPATH": str(modules),
            "CALLS": str(self.calls_file),
            "HOME": str(folder),
        }

    def add_python(self, name="python3", version="3.12", complete=True):
        path = self.bin / name
        answer = f'case "$2" in *ensurepip*) echo {version}; exit {0 if complete else 1};; esac'
        path.write_text(f'#!/bin/sh\n{answer}\nexec "{BASE_PYTHON}" "$@"\n')
        path.chmod(0o755)
        return path

    def add_environment(self, name, extras=(), leave_out=(), project=True):
        """An environment, as activated ones are, with the distributions that pyproject.toml asks for."""
        folder = self.repo.parent / name
        subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", folder], check=True)
        site = next(folder.glob("lib/python*/site-packages"))
        cwd = os.getcwd()
        os.chdir(self.repo)
        try:
            wanted = load_environment().requirements(extras)
        finally:
            os.chdir(cwd)
        for requirement in wanted:
            if requirement.split(">=")[0] not in leave_out:
                add_distribution(site, *requirement.split(">="))
        if project:
            clone = self.repo if project is True else project
            add_distribution(site, "efficient-batch-training", "1.0.0", clone.as_uri())
        return folder

    def make(self, target, *settings, **variables):
        """Run it: the exit status, stdout, and stderr without make's own line."""
        self.calls_file.unlink(missing_ok=True)
        child = subprocess.run(
            [self.bin / "make", target, *settings],
            cwd=self.repo,
            env=self.variables | {name: str(value) for name, value in variables.items()},
            capture_output=True,
            text=True,
            timeout=60,
        )
        errors = [line for line in child.stderr.splitlines() if not line.startswith("make:")]
        return child.returncode, child.stdout, errors

    def calls(self, program):
        """How a stand-in was called in the last run, without the sys.prefix that ends each note."""
        return [call[1:-1] for call in self.notes() if call[0] == program]

    def notes(self):
        return (
            [json.loads(line) for line in self.calls_file.read_text().splitlines()] if self.calls_file.exists() else []
        )


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


# --- which interpreter ----------


def test_old_interpreters_understand_the_file():
    ast.parse((ROOT / ".ci" / "environment.py").read_text(), feature_version=(3, 6))


@pytest.mark.parametrize("version", ["3.6", "3.10", "3.15"])
def test_unsuitable_python_is_one_plain_line(machine, version):
    machine.add_python(version=version)
    status, _, errors = machine.make("lab")
    assert status == 2
    assert len(errors) == 1 and f"found Python {version}:" in errors[0] and "needs Python 3.11 to 3.14" in errors[0]
    assert not (machine.repo / ".venv").exists()


def test_missing_venv_module_is_one_plain_line(machine):
    machine.add_python(complete=False)
    status, _, errors = machine.make("test")
    assert status == 2
    assert len(errors) == 1 and "apt install python3-venv" in errors[0]


def test_a_newer_python_beside_an_old_one_is_found(machine):
    machine.add_python(version="3.9")
    machine.add_python("python3.13", "3.13", complete=False)
    machine.add_python("python3.12", "3.12")
    status, output, _ = machine.make("lab")
    assert status == 0 and "Making .venv with python3.12." in output


def test_the_python_asked_for_wins(machine):
    machine.add_python(version="3.12")
    asked = machine.add_python("mine", version=HERE)
    status, output, _ = machine.make("lab", f"PYTHON={asked}")
    assert status == 0 and f"Making .venv with {asked}." in output
    other = machine.add_python("other", version="3.99")
    status, _, errors = machine.make("lab", f"PYTHON={other}")
    assert status == 2 and len(errors) == 1 and "delete .venv" in errors[0]


# --- our own .venv ----------


def test_the_second_run_installs_nothing(machine):
    machine.add_python()
    status, output, _ = machine.make("lab")
    assert status == 0 and "Making .venv" in output
    assert machine.calls("pip") == [["install", "--disable-pip-version-check", "--editable", "."]]
    assert {note[-1] for note in machine.notes()} == {str(machine.repo / ".venv")}
    status, output, _ = machine.make("lab")
    assert status == 0 and "Making" not in output and "Installing" not in output
    assert machine.calls("pip") == [] and len(machine.calls("jupyterlab")) == 1


def test_only_a_change_of_the_dependencies_installs_again(machine):
    machine.add_python()
    machine.make("test")
    assert machine.calls("pip")[0][-1] == ".[test]"
    machine.make("lab")  # needs less, so nothing is missing
    assert machine.calls("pip") == []
    pyproject = machine.repo / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace("line-length = 127", "line-length = 100"))
    machine.make("test")
    assert machine.calls("pip") == []
    pyproject.write_text(pyproject.read_text().replace('"tqdm>=4.67"', '"tqdm>=4.68"'))
    machine.make("lab")
    assert len(machine.calls("pip")) == 1
    machine.make("test")
    assert machine.calls("pip") == []


def test_a_moved_clone_installs_again(machine):
    """The project is installed by its path."""
    machine.add_python()
    machine.make("lab")
    machine.repo = machine.repo.rename(machine.repo.with_name("moved"))
    machine.make("lab")
    assert len(machine.calls("pip")) == 1


def test_torch_cpu_comes_from_pytorchs_cpu_index(machine):
    machine.add_python()
    status, _, _ = machine.make("lab", "TORCH=cpu")
    assert status == 0
    first, second = machine.calls("pip")
    assert first[2:4] == ["--index-url", "https://download.pytorch.org/whl/cpu"]
    assert [line.split(">=")[0] for line in first[4:]] == ["torch", "torchvision", "torchcodec"]
    assert second[2:] == ["--editable", "."]
    machine.make("lab")  # the build that is there stays
    assert machine.calls("pip") == []


def test_torch_cpu_does_not_pass_over_a_cuda_build(machine):
    machine.add_python()
    machine.make("lab")
    site = next(machine.repo.glob(".venv/lib/python*/site-packages"))
    add_distribution(site, "torch", "2.14.1")
    status, _, errors = machine.make("lab", "TORCH=cpu")
    assert status == 2 and len(errors) == 1 and "delete .venv" in errors[0]


def test_tested_versions_are_constraints(machine):
    machine.add_python()
    machine.make("lab")
    machine.make("lab", "TESTED=1")
    assert machine.calls("pip")[0][2:4] == ["--constraint", ".ci/tested-versions.txt"]
    machine.make("lab")
    assert machine.calls("pip") == []


def test_a_failing_pip_is_one_line_and_leaves_no_note(machine):
    machine.add_python()
    status, _, errors = machine.make("lab", PIP_FAILS=1)
    assert status == 2
    assert errors[-1].startswith(
        "pip stopped (ERROR: no space left on device). Running the same command again continues"
    )
    assert not (machine.repo / ".venv" / "installed.json").exists()
    assert machine.calls("jupyterlab") == []
    status, output, _ = machine.make("lab")
    assert status == 0 and "Making .venv" not in output and len(machine.calls("pip")) == 1
    machine.make("test", PIP_FAILS=1)  # may have left anything half done, also what the lab needs
    machine.make("lab")
    assert len(machine.calls("pip")) == 1


def test_an_interrupted_install_leaves_no_note(machine):
    machine.add_python()
    status, _, errors = machine.make("test", PIP_INTERRUPTED=1)
    assert status == 2
    assert errors[-1] == "Interrupted. Running the same command again continues." and "Traceback" not in "".join(errors)
    assert not (machine.repo / ".venv" / "installed.json").exists()
    machine.make("test")
    assert len(machine.calls("pip")) == 1


@pytest.mark.parametrize(
    ("torch", "free", "enough"), [("", 5.0, False), ("", 9.0, True), ("cpu", 2.0, False), ("cpu", 5.0, True)]
)
def test_disk_space_is_checked_before_pytorch_comes(machine, monkeypatch, capsys, torch, free, enough):
    environment = load_environment()
    ran = []
    monkeypatch.chdir(machine.repo)
    monkeypatch.setenv("TORCH", torch)
    monkeypatch.setattr(environment, "installed", lambda name: None)
    monkeypatch.setattr(environment, "pip", ran.append)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: type("Usage", (), {"free": free * 1e9}))
    if enough:
        environment.install([])
        assert ran
    else:
        with pytest.raises(SystemExit) as stopped:
            environment.install([])
        assert stopped.value.code == 2 and not ran
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and f"{free:.1f} GB are free" in lines[0]
        assert ("TORCH=cpu" in lines[0]) == (torch == "")


# --- environments that are active ----------


def test_an_active_virtualenv_is_used_as_it_is(machine):
    active = machine.add_environment("active", extras=["test"])
    machine.add_python(version="3.6")  # not looked at
    for target in ("lab", "test"):
        status, _, errors = machine.make(target, VIRTUAL_ENV=active)
        assert status == 0 and errors == []
        assert machine.calls("pip") == []
        assert {note[-1] for note in machine.notes()} == {str(active)}
    assert not (machine.repo / ".venv").exists()


@pytest.mark.parametrize("project", [False, Path("/another/clone")])
def test_only_the_project_is_added_where_only_that_is_missing(machine, project):
    """Also where another clone is installed: its helpers would be the ones that run."""
    active = machine.add_environment("active", project=project)
    machine.add_python()
    machine.make("lab", VIRTUAL_ENV=active)
    assert machine.calls("pip") == [
        ["install", "--disable-pip-version-check", "--quiet", "--no-deps", "--editable", "."]
    ]


def test_what_is_missing_is_added_to_a_virtualenv(machine):
    active = machine.add_environment("active", leave_out=["tyro"])
    machine.add_python()
    status, output, _ = machine.make("lab", VIRTUAL_ENV=active)
    assert status == 0 and "Installing into the active environment" in output and "tyro>=1.0" in output
    assert machine.calls("pip")[0][-2:] == ["--editable", "."]


def test_a_conda_environment_that_lacks_something_is_one_plain_line(machine):
    active = machine.add_environment("active", leave_out=["torch", "tyro"])
    machine.add_python()
    status, _, errors = machine.make("lab", CONDA_PREFIX=active, CONDA_DEFAULT_ENV="course")
    assert status == 2
    assert len(errors) == 1 and "lacks torch>=2.11, tyro>=1.0." in errors[0]
    assert "conda env update -f environment.yml" in errors[0] and str(active) in errors[0]
    assert machine.notes() == []


def test_a_complete_conda_environment_gets_the_project_only(machine):
    active = machine.add_environment("active", project=False)
    machine.add_python()
    status, _, _ = machine.make("lab", CONDA_PREFIX=active, CONDA_DEFAULT_ENV="course")
    assert status == 0
    assert machine.calls("pip")[0][2:] == ["--quiet", "--no-deps", "--editable", "."]


def test_conda_base_is_left_alone(machine):
    base = machine.add_environment("base", project=False)
    machine.add_python()
    status, output, _ = machine.make("lab", CONDA_PREFIX=base, CONDA_DEFAULT_ENV="base")
    assert status == 0
    assert [line for line in output.splitlines() if "base" in line] == [
        "conda's base environment does not hold the course and is left alone: using .venv instead."
    ]
    assert {note[-1] for note in machine.notes()} == {str(machine.repo / ".venv")}


def test_conda_base_with_the_course_in_it_is_used(machine):
    base = machine.add_environment("base")
    machine.add_python()
    machine.make("lab", CONDA_PREFIX=base, CONDA_DEFAULT_ENV="base")
    assert {note[-1] for note in machine.notes()} == {str(base)}


def test_an_active_environment_without_python_is_one_plain_line(machine):
    machine.add_python()
    status, _, errors = machine.make("lab", VIRTUAL_ENV=machine.repo / "gone")
    assert status == 2 and len(errors) == 1 and "has no Python" in errors[0]


# --- what is started ----------


@pytest.fixture
def ready(machine):
    machine.add_python()
    machine.variables["VIRTUAL_ENV"] = str(machine.add_environment("active", extras=["test"]))
    return machine


def test_lab_opens_the_first_chapter_without_questions(ready):
    ready.make("lab", "LAB_ARGS=--port 9000 --log-level=INFO '--notebook-dir=a b'")
    (arguments,) = ready.calls("jupyterlab")
    assert arguments[-4:] == ["--port", "9000", "--log-level=INFO", "--notebook-dir=a b"]
    assert "--LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb" in arguments
    assert [option for option in arguments if option.startswith("--log-level")] == ["--log-level=INFO"]
    assert ("--allow-root" in arguments) == (os.geteuid() == 0)
    # The address stays on this machine and needs the token: that is Jupyter's default, which nothing here may
    # change.
    assert not [option for option in arguments if "token" in option or "password" in option or "ip=" in option]


def test_lab_asks_nothing_about_news(ready):
    """JupyterLab reads our page config beside what the reader has."""
    jupyter = ready.repo.parent / "modules" / "jupyterlab" / "__main__.py"
    jupyter.write_text('import os; print(os.environ["JUPYTER_CONFIG_PATH"])')
    _, output, _ = ready.make("lab", JUPYTER_CONFIG_PATH="/of/the/reader")
    assert output.splitlines()[-1] == f"{ready.repo / '.ci' / 'jupyter'}:/of/the/reader"
    config = json.loads((ROOT / ".ci" / "jupyter" / "labconfig" / "page_config.json").read_text())
    assert config == {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}


def test_lab_opens_a_browser_only_where_there_is_one(ready):
    ready.make("lab")
    assert "--no-browser" in ready.calls("jupyterlab")[0]
    ready.make("lab", DISPLAY=":0")
    assert "--no-browser" not in ready.calls("jupyterlab")[0]


def test_tests_and_notebooks_both_run(ready):
    status, _, _ = ready.make("test", "TEST_ARGS=-x -m 'not slow'")
    tests, notebooks = ready.calls("pytest")
    assert status == 0
    assert tests == ["tests", "-x", "-m", "not slow"]
    assert notebooks[-5:] == ["notebooks/00_start_here.ipynb", "notebooks/01_next.ipynb", "-x", "-m", "not slow"]
    assert {"--nbval", "--nbval-current-env"} <= set(notebooks)


@pytest.mark.parametrize(("tests", "notebooks"), [(1, 0), (0, 1), (5, 0)])
def test_either_failure_fails(ready, tests, notebooks):
    status, _, _ = ready.make("test", TESTS_EXIT=tests, NOTEBOOKS_EXIT=notebooks)
    assert status != 0 and len(ready.calls("pytest")) == 2


def test_options_may_select_nothing_in_one_of_the_two_runs(ready):
    status, _, _ = ready.make("test", "TEST_ARGS=-k checkpoint", NOTEBOOKS_EXIT=5)
    assert status == 0


def test_clean_keeps_what_is_the_readers(machine):
    kept = [
        ".venv/bin/python",
        "notebooks/.predictions.json",
        "notebooks/runs/a/log",
        "runs/b/log",
        "data/digits/0.jpg",
    ]
    gone = ["site/index.html", ".pytest_cache/x", "tests/__pycache__/x.pyc", "efficient_batch_training.egg-info/x"]
    for name in kept + gone + ["helpers/x.py"]:
        (machine.repo / name).parent.mkdir(parents=True, exist_ok=True)
        (machine.repo / name).touch()
    status, output, _ = machine.make("clean")
    assert status == 0 and "Kept: .venv" in output
    assert all((machine.repo / name).exists() for name in kept)
    assert not any((machine.repo / name).exists() for name in gone)
