"""Write ``examples/python_api.ipynb``, the page ``python_api.md`` as a notebook with its outputs.

    python docs/generate_notebook.py

Each program is a cell, and what the page says that it prints is the cell's output. A test compares
the notebook with what this would write.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("python_api.md")
PAGE = Path(__file__).parents[1] / "examples" / "python_api.ipynb"
PROGRAM = re.compile(
    r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE
)
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def notebook_of_the_page() -> str:
    """The notebook as JSON, in format 4.5."""
    page = SOURCE.read_text(encoding="utf-8")
    cells: list[dict[str, Any]] = []
    end = 0
    for program in PROGRAM.finditer(page):
        cells += [_text_cell(page[end : program.start()]), _code_cell(*program.groups())]
        end = program.end()
    cells.append(_text_cell(page[end:]))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    notebook = {
        "cells": cells,
        "metadata": {"kernelspec": KERNEL, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def _text_cell(text: str) -> dict[str, Any]:
    # The notebook lies in another folder than the pages that the text links to.
    linked = re.sub(r"\]\((?!https?:|#)", "](../docs/", text.strip())
    return {"cell_type": "markdown", "metadata": {}, "source": linked.splitlines(keepends=True)}


def _code_cell(program: str, output: str | None) -> dict[str, Any]:
    printed = {"name": "stdout", "output_type": "stream", "text": (output or "").splitlines(True)}
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [printed] if output else [],
        "source": program.rstrip("\n").splitlines(keepends=True),
    }


if __name__ == "__main__":
    PAGE.write_text(notebook_of_the_page(), encoding="utf-8")
    print(f"wrote {PAGE}")
