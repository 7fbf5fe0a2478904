"""Run the notebooks in place, and bring them to one form; or turn them into web pages. `make notebooks` and `make
html`.

The form is the same whoever ran them: the kernel is named python3, the cells keep their ids, there is no metadata
that differs between machines or runs and no widget state (its ids are random, and a notebook opened anew cannot
use it), and one newline at the end.
"""

import base64
import re
import sys
from pathlib import Path

import nbformat

KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
CELL_METADATA = ("editable", "deletable", "jupyter", "slideshow", "tags")
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
README_PICTURE = ("00_start_here", Path(".github/step_bars.png"))  # the last picture of that chapter
ADDRESS_OF_CHAPTER = re.compile(r'href="([\w./-]+)\.ipynb(#[^"]*)?"')


def canonical(notebook, stem):
    """Leave only what a reader sees or a test compares."""
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        cell.setdefault("id", f"{stem}-{number:02d}")
        cell.metadata = nbformat.from_dict({key: cell.metadata[key] for key in CELL_METADATA if key in cell.metadata})
        for output in cell.get("outputs", []):
            # Without its state a widget shows as an error; the text beside it stays.
            if len(output.get("data", {})) > 1:
                output.data.pop(WIDGET_VIEW, None)
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
    return notebook


def write(notebook, path):
    path.write_text(nbformat.writes(notebook).rstrip("\n") + "\n", encoding="utf-8", newline="\n")


def execute(path):
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = nbformat.read(path, as_version=4)
    # The notebook's own folder is the working directory, as in JupyterLab. Time stamps would differ with every
    # run.
    options = {"timeout": 600, "kernel_name": "python3", "record_timing": False, "coalesce_streams": True}
    client = NotebookClient(notebook, resources={"metadata": {"path": str(path.parent)}}, **options)
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        sys.exit(f"{path}: not changed, because a cell failed.\n{error}")
    write(canonical(notebook, path.stem), path)
    if path.stem == README_PICTURE[0]:
        pictures = [
            output.data["image/png"]
            for cell in notebook.cells
            for output in cell.get("outputs", [])
            if "image/png" in output.get("data", {})
        ]
        README_PICTURE[1].write_bytes(base64.b64decode(pictures[-1]))


def html(path):
    from nbconvert import HTMLExporter

    page, _ = HTMLExporter().from_filename(str(path))
    target = Path("site") / f"{path.stem}.html"
    target.parent.mkdir(exist_ok=True)
    target.write_text(ADDRESS_OF_CHAPTER.sub(r'href="\1.html\2"', page), encoding="utf-8")


def main(command, *names):
    action = {
        "execute": execute,
        "html": html,
        "canonical": lambda path: write(canonical(nbformat.read(path, 4), path.stem), path),
    }
    for path in map(Path, names):
        print(f"{command} {path}", flush=True)
        action[command](path)


if __name__ == "__main__":
    main(*sys.argv[1:])
