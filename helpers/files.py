"""Small text files that are old or new, never half."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old or the new content, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, values: dict) -> None:
    """Write ``values`` as readable JSON, atomically."""
    replace_text(path, json.dumps(jsonable(values), indent=2) + "\n")


def jsonable(values: dict) -> dict:
    """JSON has no nan and no inf: they become null, so that every reader can parse the file."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }
