"""The course's pictures, in one visual language: a phase of the step has one colour everywhere."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from helpers.data.images import read_image
from helpers.data.sources import Files
from helpers.devices import usable_cpus
from helpers.lab.batch_lab import BatchSize, Learned
from helpers.lab.measure import PHASES, Spread, Steps

# Okabe and Ito's palette: told apart by colour-blind readers, and readable on white and on dark pages.
COLOURS = {
    "load": "#E69F00",
    "copy": "#F0E442",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "optimizer": "#009E73",
    "other": "#999999",
}
# Kinds of data, from what is left of the same palette: they wait, they decode, they lie in memory.
KINDS = {"waiting": "#CC79A7", "decoding": "#D55E00", "in memory": "#333333"}
STYLE = {
    "figure.dpi": 110,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "legend.frameon": False,
}


def contact_sheet(source: Files, classes: tuple[str, ...], columns: int = 10, rows: int = 3) -> Figure:
    """Photos as they lie on disk, one class a column, their pixels across written above."""
    by_class = [np.flatnonzero(source.labels.numpy() == label)[:rows] for label in range(min(columns, len(classes)))]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            rows, len(by_class), figsize=(1.05 * len(by_class), 1.3 * rows), squeeze=False, layout="constrained"
        )
        for column, indices in enumerate(by_class):
            for row, axis in enumerate(axes[:, column]):
                axis.axis("off")
                if row < len(indices):
                    pixels = read_image(source.paths[int(indices[row])])
                    axis.imshow(pixels)
                    axis.set_title(f"{pixels.shape[1]}×{pixels.shape[0]}", fontsize=7, loc="center", pad=2)
        figure.suptitle(
            f"What the loader reads: one class a column ({', '.join(classes)}), pixels as on disk", fontsize=10
        )
    return figure


def step_bars(*measured: Steps) -> Figure:
    """Where the time of a step goes: a stacked bar for each measurement, in milliseconds per image, medians over
    the steps.

    The line at a bar's end spans the middle half of the steps' total times.
    """
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(8, 1.5 + 0.75 * len(measured)), layout="constrained")
        for row, steps in enumerate(measured):
            left, scale = 0.0, 1e3 / steps.images
            for phase in PHASES:
                width = steps.phase(phase).median * scale
                label = phase if row == 0 else None
                axis.barh(
                    row,
                    width,
                    left=left,
                    height=0.6,
                    color=COLOURS[phase],
                    edgecolor="white",
                    linewidth=0.5,
                    label=label,
                )
                left += width
            total = steps.total()
            axis.plot(
                [total.low * scale, total.high * scale],
                [row, row],
                color="black",
                linewidth=1.5,
                marker="|",
                markersize=9,
            )
            axis.annotate(
                f" {total.median * scale:.2f} ms an image = {total.median * 1e3:.0f} ms a step of {steps.images}",
                (max(left, total.high * scale), row),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
        axis.set_yticks(range(len(measured)), [steps.name for steps in measured])
        axis.invert_yaxis()
        axis.set_xlim(0, 1.6 * max(steps.total().high * 1e3 / steps.images for steps in measured))
        axis.set_xlabel("milliseconds per image (median; black line: middle half of the steps)")
        axis.legend(
            ncols=len(PHASES),
            loc="lower left",
            bbox_to_anchor=(0, 1.0),
            borderaxespad=0.2,
            fontsize=9,
            handlelength=1.2,
        )
    return figure


def bars(rows: Mapping[str, Spread], label: str, *, log: bool = False, colour: str = COLOURS["load"]) -> Figure:
    """A horizontal bar for each measurement; the black line spans its middle half. ``label`` names the quantity and
    its unit. On a logarithmic axis (``log``) equal steps to the right are equal factors."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(8, 1.0 + 0.42 * len(rows)), layout="constrained")
        for row, spread in enumerate(rows.values()):
            axis.barh(row, spread.median, height=0.6, color=colour)
            axis.plot([spread.low, spread.high], [row, row], color="black", linewidth=1.5, marker="|", markersize=8)
            axis.annotate(
                _figures(spread.median),
                (spread.high, row),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
        axis.set_yticks(range(len(rows)), list(rows))
        axis.invert_yaxis()
        most = max(spread.high for spread in rows.values())
        if log:
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter("{x:g}")
            axis.set_xlim(0.5 * min(spread.low for spread in rows.values()), 2.5 * most)
        else:
            axis.set_xlim(0, 1.2 * most)
            axis.xaxis.set_major_formatter("{x:,g}")
        axis.set_xlabel(f"{label} (median; black line: middle half)")
    return figure


def _figures(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def workers_picture(curves: Mapping[str, Mapping[int, Spread]]) -> Figure:
    """How many times as fast as without workers each kind of data comes, by number of workers: points with the middle
    half, equal factors equally far apart, and the cores of this machine."""
    counts = list(next(iter(curves.values())))
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
        for kind, curve in curves.items():
            base = curve[0].median
            middle, low, high = ([getattr(curve[n], end) / base for n in counts] for end in ("median", "low", "high"))
            axis.plot(range(len(counts)), middle, "o-", color=KINDS[kind], markersize=5)
            axis.fill_between(range(len(counts)), low, high, color=KINDS[kind], alpha=0.25, linewidth=0)
            axis.annotate(
                f"{kind}: {_figures(middle[-1])}×", (len(counts) - 1, middle[-1]), xytext=(8, 0),
                textcoords="offset points", va="center", color=KINDS[kind],
            )  # fmt: skip
        cores = usable_cpus()
        if cores <= counts[-1]:
            place = float(np.interp(cores, counts, range(len(counts))))
            axis.axvline(place, color=COLOURS["other"], linestyle=":")
            axis.annotate(f"{cores} usable core{'s' * (cores > 1)}", (place, 1), xycoords=("data", "axes fraction"),
                          xytext=(4, -2), textcoords="offset points", va="top", fontsize=9, color="#666666")  # fmt: skip
        axis.axhline(1, color=COLOURS["other"], linewidth=0.8)
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        axis.set_xticks(range(len(counts)), counts)
        axis.set_xlim(-0.2, len(counts) + 0.1)
        axis.set_xlabel("worker processes")
        axis.set_ylabel("images per second,\nagainst no workers")
    return figure


def starving_picture(curves: Mapping[str, Mapping[int, Spread]], kind: str, batch: int, step_ms: float) -> Figure:
    """What a step costs behind a loader as fast as measured: waiting for the batch, and a device that computes for
    ``step_ms`` on its own. Without workers the two follow each other; with workers they overlap."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
        for row, (workers, spread) in enumerate(curves[kind].items()):
            load_ms = 1e3 * batch / spread.median
            wait = load_ms if workers == 0 else max(0.0, load_ms - step_ms)
            axis.barh(row, wait, color=COLOURS["load"], height=0.6, label="waiting" if row == 0 else None)
            axis.barh(
                row, step_ms, left=wait, color=COLOURS["forward"], height=0.6, label="computing" if row == 0 else None
            )
            axis.annotate(f"{wait / (wait + step_ms):.0%} waiting", (wait + step_ms, row), xytext=(6, 0),
                          textcoords="offset points", va="center", fontsize=9)  # fmt: skip
        axis.set_yticks(range(len(curves[kind])), [f"{n} worker{'s' * (n != 1)}" for n in curves[kind]])
        axis.invert_yaxis()
        slowest = 1e3 * batch / min(spread.median for spread in curves[kind].values())
        axis.set_xlim(0, 1.25 * (slowest + step_ms))
        axis.set_xlabel(f"milliseconds a step of {batch} images, from the rates measured above ({kind})")
        axis.legend(ncols=2, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, fontsize=9, handlelength=1.2)
    return figure


def sizes_picture(sizes: Sequence[BatchSize]) -> Figure:
    """Speed with its spread, and memory, by batch size; the dashed lines are proportional to the size."""
    x = [one.size for one in sizes]
    speed, memory = [one.images_per_s for one in sizes], [one.memory_mb for one in sizes]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
        axes[0].plot(x, [one.median for one in speed], "o-", color=COLOURS["backward"], markersize=5)
        axes[0].fill_between(x, [s.low for s in speed], [s.high for s in speed], color=COLOURS["backward"], alpha=0.25)
        axes[0].plot(x, [speed[0].median * n / x[0] for n in x], "--", color=COLOURS["other"], linewidth=1)
        axes[0].set_ylim(0, 1.25 * max(one.high for one in speed))
        axes[0].set_title("images per second")
        axes[1].plot(x, memory, "o-", color=COLOURS["backward"], markersize=5)
        axes[1].plot(x, [memory[-1] * n / x[-1] for n in x], "--", color=COLOURS["other"], linewidth=1)
        axes[1].set_ylim(0, 1.25 * max(memory))
        axes[1].set_title("peak memory beyond idle, MB")
        for axis in axes:
            axis.set_xscale("log", base=2)
            axis.set_xticks(x, x)
            axis.set_xlabel("batch size")
    return figure


def learning_picture(runs: Sequence[Learned]) -> Figure:
    """Validation accuracy of each run, against the images it has seen and against its seconds of training."""
    shades = plt.colormaps["viridis"](np.linspace(0, 0.85, len(runs)))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
        for run, shade in zip(runs, shades, strict=True):
            accuracy = [100 * value for value in run.accuracy]
            name = f"{run.size}, rate {run.lr:.2g}: {run.steps} steps"
            axes[0].plot(run.images, accuracy, "o-", color=shade, markersize=4, label=name)
            axes[1].plot(run.seconds, accuracy, "o-", color=shade, markersize=4)
        axes[0].set(xlabel="images seen", ylabel="validation accuracy, %", ylim=(0, 100))
        axes[1].set(xlabel="seconds of training")
        axes[0].locator_params(axis="x", nbins=5)
        axes[0].xaxis.set_major_formatter("{x:,.0f}")
        axes[0].legend(fontsize=8, title="batch size", title_fontsize=8, loc="lower right")
    return figure


def live(draw: Callable[..., Figure], **controls) -> None:
    """Show ``draw(**values)`` with a control for each value, and redraw it when one is moved. A control is (lowest,
    highest, step, start) for a slider, or a list of texts to choose from.

    Whoever reads the page without a kernel sees the picture at the start values. The picture is the value of an Image
    widget: redrawing replaces it, and writes no output.
    """
    import ipywidgets
    from IPython.display import display

    widgets = {name: _control(name.replace("_", " "), control) for name, control in controls.items()}
    image = ipywidgets.Image(format="png")

    def redraw(_=None) -> None:
        image.value = png(draw(**{name: widget.value for name, widget in widgets.items()}))

    for widget in widgets.values():
        widget.observe(redraw, names="value")
    redraw()
    bundle = ipywidgets.VBox([*widgets.values(), image])._repr_mimebundle_()
    bundle["image/png"] = base64.b64encode(image.value).decode()
    bundle["text/plain"] = f"a picture that is moved by: {', '.join(widgets)}"
    display(bundle, raw=True)


def _control(name: str, control):
    import ipywidgets

    style = {"description_width": "8em"}
    if isinstance(control, list):
        return ipywidgets.Dropdown(options=control, description=name, style=style)
    low, high, step, start = control
    look = {"style": style, "layout": ipywidgets.Layout(width="30em"), "readout_format": ".0f" if step >= 1 else ".2f"}
    return ipywidgets.FloatSlider(start, min=low, max=high, step=step, description=name, **look)


def png(figure: Figure) -> bytes:
    """The figure as a PNG file; the figure is closed."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    plt.close(figure)
    return buffer.getvalue()
