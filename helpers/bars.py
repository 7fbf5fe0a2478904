"""One progress bar for terminals and notebooks, and none where nobody looks."""

from __future__ import annotations

import sys
from collections.abc import Iterable


def progress_bar(iterable: Iterable | None = None, *, show: bool = True, **options):
    """tqdm over ``iterable`` with tqdm's ``options``; it shows itself on a terminal and in a notebook, and leaves
    nothing behind.

    With ``show=False``, or where output goes to a file, it draws nothing.
    """
    from tqdm.auto import tqdm

    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    visible = show and (sys.stderr.isatty() or hasattr(shell, "kernel"))
    return tqdm(iterable, leave=False, disable=not visible, dynamic_ncols=True, **options)
