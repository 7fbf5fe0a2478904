"""Every chapter through nbval in the settings that differ between readers' machines: `python -m tests.matrix [NAME …]`.

Default start methods, one core and two, and a CPU without bf16. Stops at nothing; exit code 1 if a setting failed. Not part of
every test run: it takes about a minute and a half for each setting.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
METHODS = [name for name in ("fork", "forkserver") if name in multiprocessing.get_all_start_methods()]
SETTINGS = {
    **{f"{method}, {cores} cores": (method, cores, {}) for method in METHODS for cores in (2, 1)},
    # oneDNN then takes no bf16 instruction, as on a processor that has none.
    "fork, 2 cores, no bf16": ("fork", 2, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}),
    "forkserver, 1 cores, no bf16": ("forkserver", 1, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}),
}


def run(method: str, cores: int, environment: dict[str, str]) -> tuple[bool, str, float]:
    """Whether nbval passed, its last line, and the seconds it took."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(
            f"import multiprocessing\nmultiprocessing.set_start_method({method!r})\n"
        )
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        settings = {**os.environ, **environment, "PYTHONPATH": path, "COURSE_PREDICTIONS": str(Path(folder, "p.json"))}
        command = [sys.executable, "-m", "pytest", "-q", "--nbval", "--nbval-current-env", "-p", "no:cacheprovider"]
        usable = sorted(os.sched_getaffinity(0))[:cores]
        start = time.monotonic()
        done = subprocess.run(
            [
                "taskset",
                "-c",
                ",".join(map(str, usable)),
                *command,
                *sorted(map(str, REPO.glob("notebooks/[0-9]*.ipynb"))),
            ],
            cwd=REPO,
            env=settings,
            capture_output=True,
            text=True,
        )
    if done.returncode:
        print(done.stdout[-6000:])
    return done.returncode == 0, done.stdout.strip().splitlines()[-1], time.monotonic() - start


def main(names: list[str]) -> int:
    """Run the settings whose name holds one of ``names`` (all by default)."""
    chosen = {name: setting for name, setting in SETTINGS.items() if not names or any(part in name for part in names)}
    passed = {}
    for name, setting in chosen.items():
        passed[name], line, seconds = run(*setting)
        print(f"{name:<32} {line}  ({seconds:.0f} s)", flush=True)
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
