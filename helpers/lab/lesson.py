"""What every chapter uses: the device banner, source on show, predictions, and a workload that suits the
device."""

from __future__ import annotations

import contextlib
import html
import inspect
import json
import os
import platform
from pathlib import Path

import torch

from helpers.config import TrainConfig, preset
from helpers.data.images import torchcodec_reason
from helpers.devices import cuda_problem, pick_device, usable_cpus
from helpers.files import replace_text
from helpers.lab.measure import Spread


def banner() -> None:
    """Print what this machine is, as far as training is concerned. The GPU has run a kernel before it is called
    usable."""
    cores, quota = usable_cpus(), os.cpu_count()
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"{cores} usable of {quota} CPU cores, {_memory_gb():.0f} GB of memory"
    )
    print(f"CPU instructions for tensors: {torch.backends.cpu.get_cpu_capability()}")
    problem = cuda_problem()
    if problem:
        print(f"GPU: none to train on ({problem}). Everything here runs on the CPU.")
    else:
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            capability = f"capability {facts.major}.{facts.minor}, {facts.total_memory / 1e9:.0f} GB"
            state = cuda_problem(index) or "it has run a kernel"
            print(f"GPU {index}: {facts.name}, {capability}, CUDA {torch.version.cuda}; {state}")
    reason = torchcodec_reason()
    state = f"not available, Pillow takes its place: {reason}" if reason else "available"
    print(f"Fast image decoding (torchcodec): {state}")


def _memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


def workload(name: str, **changes) -> TrainConfig:
    """A preset at a size that suits the device: 64 px and a small CNN on a CPU; 224 px and ResNet-50 on a GPU,
    which the small one would only keep busy with launching kernels."""
    if pick_device(changes.get("device", "auto")).type == "cuda":
        changes = {"model": "resnet50", "image_size": 224, "shift": 14, **changes}
    return preset(name, **{"model": "small_cnn", **changes})


def show_source(*objects) -> None:
    """Print the source of helper code as it runs, so that no chapter keeps a copy."""
    for number, thing in enumerate(objects):
        print(("\n" if number else "") + inspect.cleandoc("\n" + inspect.getsource(thing)))


def show_changes(*names: str) -> None:
    """Print, as a table, the settings in which presets differ."""
    configs = [preset(name, device="cpu") for name in names]
    rows = [
        (field, *(str(getattr(c, field)) for c in configs))
        for field in vars(configs[0])
        if field not in ("preset", "device")
    ]
    rows = [("setting", *names)] + [row for row in rows if len(set(row[1:])) > 1]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def predictions_file() -> Path:
    """Where predictions are kept: the variable COURSE_PREDICTIONS, else notebooks/.predictions.json, which git
    ignores."""
    default = Path(__file__).resolve().parents[2] / "notebooks" / ".predictions.json"
    return Path(os.environ.get("COURSE_PREDICTIONS") or default)


def _predictions() -> dict[str, float]:
    try:
        return json.loads(predictions_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or a file somebody edited: predictions are not worth an error
        return {}


def predict(key: str, question: str, unit: str) -> None:
    """Show a box for the reader's prediction and keep what is typed under ``key``. An empty box is fine, and stays
    empty."""
    import ipywidgets
    from IPython.display import display

    box = ipywidgets.Text(placeholder="your number", layout=ipywidgets.Layout(width="9em"))
    answer = ipywidgets.HTML()

    def keep(text: str) -> None:
        known = _predictions()
        if not text.strip():
            known.pop(key, None)
            answer.value = ""
        else:
            try:
                known[key] = float(text.replace(",", ".").replace("%", "").strip())
            except ValueError:
                answer.value = f"“{html.escape(text)}” is not a number"
                return
            answer.value = "kept"
        with contextlib.suppress(OSError):  # a read-only checkout: the prediction lasts as long as the page
            replace_text(predictions_file(), json.dumps(known, indent=1) + "\n")

    if key in _predictions():
        box.value = f"{_predictions()[key]:g}"
    box.observe(lambda change: keep(change["new"]), names="value")
    row = ipywidgets.HBox([box, ipywidgets.HTML(html.escape(unit)), answer])
    widget = ipywidgets.VBox([ipywidgets.HTML(f"<b>{html.escape(question)}</b>"), row])
    bundle = widget._repr_mimebundle_()
    bundle["text/plain"] = f"{question}  [      ] {unit}"  # for whoever reads the page without running it
    display(bundle, raw=True)


def reveal(key: str, measured: Spread, unit: str, *, more: str, less: str) -> None:
    """Print prediction and measurement side by side. ``more`` and ``less`` say what it means to have predicted too
    much or too little; inside the measured middle half neither is said."""
    predicted = _predictions().get(key)
    print(f"predicted  {'(none)' if predicted is None else f'{predicted:.3g} {unit}'}")
    print(
        f"measured   {measured.median:.3g} {unit}   (middle half of the steps: {measured.low:.3g} to "
        f"{measured.high:.3g})"
    )
    if predicted is None:
        return
    slack = 0.1 * abs(measured.median)
    if predicted > measured.high + slack:
        print(f"You predicted too much. {more}")
    elif predicted < measured.low - slack:
        print(f"You predicted too little. {less}")
    else:
        print("That is what your machine does.")
