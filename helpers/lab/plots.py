"""The course's pictures, in one visual language: a phase of the step has one colour everywhere."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from helpers.data.images import read_image
from helpers.data.sources import Files
from helpers.lab.measure import PHASES, Steps

# Okabe and Ito's palette: told apart by colour-blind readers, and readable on white and on dark pages.
COLOURS = {
    "load": "#E69F00",
    "copy": "#F0E442",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "optimizer": "#009E73",
    "other": "#999999",
}
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
