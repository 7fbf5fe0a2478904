"""What every chapter uses: the device banner, source on show, predictions, and a workload that suits the
device."""

from __future__ import annotations

import argparse
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
from helpers.lab.record import chapter_keys, export, keep, kept, measurement, number, record
from helpers.lab.record import predictions_file as predictions_file


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
    for place, thing in enumerate(objects):
        print(("\n" if place else "") + inspect.cleandoc("\n" + inspect.getsource(thing)))


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


TOO_MUCH, TOO_LITTLE, RIGHT = "too much", "too little", "right"
_questions: dict[str, str] = {}  # asked in this kernel, by key


def predict(key: str, question: str, unit: str) -> None:
    """Show a box for the reader's prediction and keep what is typed under ``key``. An empty box is fine, and stays
    empty."""
    import ipywidgets
    from IPython.display import display

    _questions[key] = question
    box = ipywidgets.Text(placeholder="your number", layout=ipywidgets.Layout(width="9em"))
    answer = ipywidgets.HTML()

    def take(text: str) -> None:
        known = kept()
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
        keep(known)

    if (before := number(kept().get(key))) is not None:
        box.value = f"{before:g}"
    box.observe(lambda change: take(change["new"]), names="value")
    row = ipywidgets.HBox([box, ipywidgets.HTML(html.escape(unit)), answer])
    widget = ipywidgets.VBox([ipywidgets.HTML(f"<b>{html.escape(question)}</b>"), row])
    bundle = widget._repr_mimebundle_()
    bundle["text/plain"] = f"{question}  [      ] {unit}"  # for whoever reads the page without running it
    display(bundle, raw=True)


def short(value: float) -> str:
    """Three figures, or a whole number with commas."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def reveal(key: str, measured: Spread, unit: str, *, more: str, less: str) -> None:
    """Print prediction and measurement side by side, and keep the measurement for ``summary`` and the export.

    ``more`` and ``less`` say what it means to have predicted too much or too little; inside the measured middle
    half neither is said.
    """
    values = {name: float(f"{value:.6g}") for name, value in vars(measured).items()}
    record("measured", key, {**values, "unit": unit, "question": _questions.get(key, key)})
    predicted = number(kept().get(key))
    if key in _questions:
        print(_questions[key])
    print(f"predicted  {'(none)' if predicted is None else f'{short(predicted)} {unit}'}")
    print(
        f"measured   {short(measured.median)} {unit}   (middle half of the values: {short(measured.low)} to "
        f"{short(measured.high)})"
    )
    verdict = _verdict(predicted, measured)
    if verdict == RIGHT:
        print("That is what your machine does.")
    elif verdict:
        print(f"You predicted {verdict}. {more if verdict == TOO_MUCH else less}")


def _verdict(predicted: float | None, measured: Spread) -> str:
    """A prediction is right within the measured middle half, or a tenth of the median beyond it; '' if there is
    none."""
    if predicted is None:
        return ""
    slack = 0.1 * abs(measured.median)
    if predicted > measured.high + slack:
        return TOO_MUCH
    return TOO_LITTLE if predicted < measured.low - slack else RIGHT


def summary(chapter: str) -> None:
    """Print a chapter's predictions ('01': those of chapter 01) beside what was measured here last."""
    rows, verdicts = [("", "predicted", "measured", "")], []
    for key in chapter_keys(chapter):
        if found := measurement(key):
            measured = Spread(found["median"], found["low"], found["high"])
            predicted = number(kept().get(key))
            verdicts.append(_verdict(predicted, measured))
            said = "–" if predicted is None else short(predicted)
            rows.append((found["question"], said, f"{short(measured.median)} {found['unit']}", verdicts[-1]))
    if not verdicts:
        print(f"Nothing of chapter {chapter} has been measured yet.")
        return
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for question, said, measured, verdict in rows:
        line = f"{question:<{widths[0]}}  {said:>{widths[1]}}  {measured:>{widths[2]}}  {verdict}"
        print(line.rstrip())
    if judged := [verdict for verdict in verdicts if verdict]:
        print(f"{judged.count(RIGHT)} of {len(judged)} predictions were right.")


def main(arguments: list[str] | None = None) -> None:
    """``python -m helpers.lab.lesson export [--to FILE]``: what to hand in, as JSON."""
    parser = argparse.ArgumentParser(prog="python -m helpers.lab.lesson")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("export", help="your predictions, measurements and exercises as one JSON file")
    command.add_argument("--to", type=Path, metavar="FILE", help="write it there instead of printing it")
    options = parser.parse_args(arguments)
    text = json.dumps(export(), indent=1, ensure_ascii=False)
    if options.to is None:
        print(text)
        return
    try:
        replace_text(options.to, text + "\n")
    except OSError as error:
        parser.exit(2, f"--to {options.to}: {error.strerror}\n")


if __name__ == "__main__":
    main()
