"""Find or make the course's Python environment, then run something in it. `make` calls this file.

    environment.py lab                  JupyterLab on the first chapter (LAB_ARGS: more options for it)
    environment.py test                 the tests, then every notebook (TEST_ARGS: more options for pytest)
    environment.py run EXTRAS ARG ...   `python ARG ...`, with these extras of pyproject.toml (a,b; or - for none)

An activated conda or virtual environment is used as it is. Otherwise `.venv` is made here, and what was installed
is noted in it, so that the next run installs nothing. TORCH=cpu takes PyTorch's CPU build, TESTED=1 the exact
versions of .ci/tested-versions.txt, PYTHON=... another interpreter for `.venv`.

The file runs twice: under whatever interpreter there is, to find the environment, and then under the environment's
own. So it is written for very old interpreters too: they must get far enough to say that they are too old.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OWN = os.path.join(ROOT, ".venv")
TESTED_VERSIONS = os.path.join(".ci", "tested-versions.txt")
FIRST_CHAPTER = "notebooks/00_start_here.ipynb"
PROJECT = "efficient-batch-training"
OLDEST, NEWEST = (3, 11), (3, 14)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
GIGABYTES = {"cpu": 2.5, "": 7.0}


def say(message):
    sys.stdout.write(message + "\n")
    sys.stdout.flush()


def stop(message, code=2):
    sys.stdout.flush()
    sys.stderr.write(message + "\n")
    raise SystemExit(code)


def dotted(version):
    return "%d.%d" % tuple(version[:2])


# --- first half, under any interpreter: which environment? ----------


def find_environment():
    """(kind, folder) of the active environment, or of our own."""
    active, conda = os.environ.get("VIRTUAL_ENV"), os.environ.get("CONDA_PREFIX")
    if active:
        return ("own" if os.path.realpath(active) == os.path.realpath(OWN) else "virtualenv"), active
    if conda:
        # Many installations activate `base` in every shell; the reader did not choose it, so nothing is put into
        # it.
        if os.environ.get("CONDA_DEFAULT_ENV") != "base" or holds_project(conda):
            return "conda", conda
        say("conda's base environment does not hold the course and is left alone: using .venv instead.")
    return "own", OWN


def python_of(folder):
    return os.path.join(folder, "bin", "python")


def holds_project(folder):
    code = "import importlib.metadata as m; m.version(%r)" % PROJECT
    try:
        return subprocess.call([python_of(folder), "-c", code], stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def probe(name):
    """(version, whether it can make environments) of an interpreter; None where there is none of that name."""
    code = "import sys; print('%d.%d' % sys.version_info[:2]); sys.stdout.flush(); import venv, ensurepip"
    try:
        child = subprocess.Popen([name, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        printed = re.match(r"(\d+)\.(\d+)\s", child.communicate()[0].decode())
    except OSError:
        return None
    return printed and (tuple(int(part) for part in printed.groups()), child.returncode == 0)


def find_python():
    """The interpreter for .venv: the one asked for, else the first suitable one on the path."""
    asked = os.environ.get("PYTHON")
    found, incomplete = [], None
    for name in (
        [asked] if asked else ["python3"] + ["python3.%d" % minor for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]
    ):
        version, complete = probe(name) or (None, False)
        if version is None:
            continue
        found.append(dotted(version))
        if version < OLDEST or (version > NEWEST and not asked):
            continue
        if complete:
            return name
        incomplete = incomplete or name
    if incomplete:
        package = os.path.basename(incomplete)
        package = package if package.startswith("python3") else "python3"
        stop(
            "%s has no venv or ensurepip module: apt install %s-venv, then run the command again."
            % (incomplete, package)
        )
    stop(
        "The course needs Python %s to %s, but found %s: install one of them, or name it with "
        "PYTHON=/path/to/python."
        % (dotted(OLDEST), dotted(NEWEST), "Python " + ", ".join(found) if found else "no " + (asked or "python3"))
    )


def make_own():
    python = find_python()
    say("Making .venv with %s." % python)
    # --clear: what is left of a .venv without a working Python is of no use. pip comes in the second half, where
    # an interrupted run is taken up again as well.
    if subprocess.call([python, "-m", "venv", "--clear", "--without-pip", OWN]):
        stop("%s could not make .venv; what it said is above." % python)


# --- second half, under the environment's own Python: is everything there? ----------


def requirements(extras):
    """What pyproject.toml asks for: the plain list and these extras, as `name>=version` strings."""
    import tomllib

    with open("pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    return project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]


def installed(name):
    """The version of an installed distribution, or None."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def numbers(version):
    return [int(part) for part in re.findall(r"\d+", version.split("+")[0])]


def satisfied(requirement):
    name, bound = requirement.split(">=")
    version = installed(name)
    return version is not None and numbers(version) >= numbers(bound)


def project_is_here():
    """Is the project installed, and from this folder? Another clone's `helpers` must not be the one that runs."""
    from importlib import metadata
    from urllib.parse import unquote, urlparse

    try:
        source = metadata.distribution(PROJECT).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return False
    folder = unquote(urlparse(json.loads(source)["url"]).path) if source else ""
    return os.path.realpath(folder) == os.path.realpath(ROOT)


def check_disk():
    torch = os.environ.get("TORCH", "")
    free = shutil.disk_usage(sys.prefix).free / 1e9
    if free < GIGABYTES[torch]:
        hint = "" if torch else "; the CPU build, TORCH=cpu, needs %.1f GB" % GIGABYTES["cpu"]
        stop("Not enough disk space: PyTorch needs about %.1f GB, %.1f GB are free%s." % (GIGABYTES[torch], free, hint))


def pip(arguments):
    """pip install. Its progress stays on the terminal; of its errors, the last one is kept for our own line."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    child = subprocess.Popen(command + arguments, stderr=subprocess.PIPE, universal_newlines=True)
    lines = []
    try:
        for line in child.stderr:
            sys.stderr.write(line)
            lines.append(line.strip())
    finally:
        code = child.wait()
    if code:
        lines = (
            [line for line in lines if line.lower().startswith("error")]
            or [line for line in lines if line]
            or ["no reason"]
        )
        stop(
            "pip stopped (%s). Running the same command again continues; what was downloaded is kept."
            % lines[-1].rstrip(".")
        )


def install(extras):
    """Install the project with these extras: what is there already stays as it is."""
    pinned = ["--constraint", TESTED_VERSIONS] if os.environ.get("TESTED") else []
    if installed("torch") is None:
        check_disk()
    if os.environ.get("TORCH") == "cpu":
        torch = [line for line in requirements([]) if line.startswith("torch")]
        pip(["--index-url", CPU_INDEX] + pinned + torch)
    if installed("torch"):
        say("Installing the rest, about a minute.")
        pinned += ["--quiet"]  # or pip names each of the hundred packages that are there already
    pip(pinned + ["--editable", ".[%s]" % ",".join(extras) if extras else "."])


def prepare_active(kind, extras):
    """An activated environment belongs to the reader: only what is missing is added, and in conda only the
    project."""
    missing = [requirement for requirement in requirements(extras) if not satisfied(requirement)]
    if kind == "conda" and missing:
        cure = "conda env update -f environment.yml --prefix " + shlex.quote(sys.prefix)
        if not set(missing) & set(requirements(["test"])):
            cure = "python -m pip install " + " ".join(shlex.quote(requirement) for requirement in missing)
        stop("The active conda environment lacks %s. Add what is missing with: %s" % (", ".join(missing), cure))
    if not missing and project_is_here():
        return
    if installed("pip") is None:
        stop("The active environment has no pip: run python -m ensurepip, or deactivate the environment to use .venv.")
    if missing:
        say("Installing into the active environment, %s: %s" % (sys.prefix, ", ".join(missing)))
        install(extras)
    else:
        pip(["--quiet", "--no-deps", "--editable", "."])


def prepare_own(extras):
    """Fill .venv, unless the note in it says that everything is there. The note is written last, and in one
    step."""
    path = os.path.join(sys.prefix, "installed.json")
    asked = os.environ.get("PYTHON")
    if asked and (probe(asked) or [sys.version_info[:2]])[0] != sys.version_info[:2]:
        stop(
            ".venv has Python %s, not that of PYTHON=%s: delete .venv to make it anew."
            % (dotted(sys.version_info), asked)
        )
    if os.environ.get("TORCH") == "cpu" and not (installed("torch") or "+cpu").endswith("+cpu"):
        stop(
            ".venv has PyTorch %s, not a CPU build as TORCH=cpu asks: delete .venv to make it anew."
            % installed("torch")
        )

    tested = ""
    if os.environ.get("TESTED"):
        with open(TESTED_VERSIONS) as file:
            tested = file.read()
    wanted = requirements(extras)
    note = {"root": ROOT, "python": dotted(sys.version_info), "tested": tested, "requirements": sorted(wanted)}
    try:
        with open(path) as file:
            old = json.load(file)
    except (OSError, ValueError):
        old = {}
    same = old.get("root") == ROOT and old.get("python") == note["python"] and tested in ("", old.get("tested"))
    if same and set(wanted) <= set(old["requirements"]):
        return
    if os.path.exists(path):
        os.remove(path)
    if installed("pip") is None:
        subprocess.check_call([sys.executable, "-m", "ensurepip", "--default-pip"], stdout=subprocess.DEVNULL)
    if installed("torch") is None:
        build = (
            "CPU build" if os.environ.get("TORCH") else "CUDA build, several GB; TORCH=cpu takes the smaller CPU build"
        )
        say("Installing into .venv, once (PyTorch: %s)." % build)
    install(extras)
    if same:
        note["requirements"] = sorted(set(wanted) | set(old["requirements"]))
    with open(path + ".part", "w") as file:
        json.dump(note, file, indent=1)
    os.replace(path + ".part", path)


# --- the commands ----------


def lab():
    options = [
        "--LabApp.default_url=/lab/tree/" + FIRST_CHAPTER,
        # At this level Jupyter prints its address, with the token, and little else.
        "--log-level=WARN",
    ]
    if os.geteuid() == 0:
        options.append("--allow-root")
    if not any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")):
        options.append("--no-browser")
    # Jupyter refuses an option that is given twice; the reader's one counts.
    chosen = shlex.split(os.environ.get("LAB_ARGS", ""))
    given = [option.split("=")[0] for option in chosen]
    options = [option for option in options if option.split("=")[0] not in given]
    # The page config in there asks no question about news at the first start (LabApp.news_url=None does not stop
    # it).
    folders = [os.path.join(ROOT, ".ci", "jupyter"), os.environ.get("JUPYTER_CONFIG_PATH")]
    os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(folder for folder in folders if folder)
    say("JupyterLab is starting: open the address that it prints. Ctrl-C here, twice, stops it.")
    replace_by(["-m", "jupyterlab"] + options + chosen)


def test():
    """Both runs, whatever the first one says: one look then shows all that is wrong."""
    options = shlex.split(os.environ.get("TEST_ARGS", ""))
    notebooks = sorted(name for name in os.listdir("notebooks") if name.endswith(".ipynb"))
    nbval = ["--nbval", "--nbval-current-env", "--nbval-cell-timeout=300", "-p", "no:cacheprovider"]
    runs = [["tests"]]
    if notebooks:
        runs += [nbval + [os.path.join("notebooks", name) for name in notebooks]]
    codes = [subprocess.call([sys.executable, "-m", "pytest"] + run + options) for run in runs]
    # 5: nothing was collected, which is what options such as -k may ask for.
    raise SystemExit(next((code for code in codes if code and not (code == 5 and options)), 0))


def replace_by(arguments):
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable] + arguments)


def main(arguments):
    inside, arguments = (arguments[1], arguments[2:]) if arguments[:1] == ["--inside"] else (None, arguments)
    command = arguments[0] if arguments else ""
    if command not in ("lab", "test", "run") or len(arguments) < {"run": 3}.get(command, 1):
        stop(__doc__)
    if os.environ.get("TORCH", "") not in GIGABYTES:
        stop("TORCH=%s is not known: leave it out, or use TORCH=cpu." % os.environ["TORCH"])
    os.chdir(ROOT)

    if inside is None:
        kind, folder = find_environment()
        if not os.path.exists(python_of(folder)):
            if kind != "own":
                stop("The active environment, %s, has no Python: deactivate it, or install Python into it." % folder)
            make_own()
        os.execv(python_of(folder), [python_of(folder), os.path.abspath(__file__), "--inside", kind] + arguments)

    if sys.version_info < OLDEST:
        cure = "delete .venv" if inside == "own" else "deactivate that environment"
        versions = (dotted(sys.version_info), sys.prefix, dotted(OLDEST), cure)
        stop("Python %s found in %s, but the course needs %s or newer: %s and run the command again." % versions)
    extras = {"lab": [], "test": ["test"]}.get(command)
    if command == "run":
        extras = [] if arguments[1] == "-" else arguments[1].split(",")
    if inside == "own":
        prepare_own(extras)
    else:
        prepare_active(inside, extras)

    # What is started from here, a terminal in JupyterLab too, finds this environment's commands.
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
    if inside == "own":
        os.environ["VIRTUAL_ENV"] = sys.prefix
    if command == "run":
        replace_by(arguments[2:])
    return {"lab": lab, "test": test}[command]()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        stop("\nInterrupted. Running the same command again continues.", 130)
