"""Run the pages of the gallery, and write into them what they print: `python docs/make_gallery.py`.

The Python blocks of a page run in order in a process of their own, with the folder `examples` on
the path. What a block prints is the text block below it. Pictures that the page shows go to
`docs/_static/gallery`, and one page becomes the notebook `examples/gpt_training.ipynb`. With
`--check` nothing is written: the exit status says whether the blocks run, and print what they are
said to print, whatever the figures in it are.
"""

from __future__ import annotations

import argparse
import base64
import difflib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
EXAMPLES = DOCS.parent / "examples"
PICTURES = DOCS / "_static" / "gallery"
PAGES = [page for page in sorted((DOCS / "gallery").glob("*.md")) if page.stem != "index"]
NOTEBOOK = EXAMPLES / "gpt_training.ipynb"
CELL = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"!\[(.*?)\]\(\.\./_static/gallery/(\S+?)\)")
FIGURE = re.compile(r"[-+]?\d[\d,.]*(?:e[-+]?\d+)?")


def cells_of(path: Path) -> list[tuple[str, str]]:
    """Return source and output of each block of a page, or of each cell of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return [(source, output or "") for source, output in CELL.findall(text)]
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return [
        ("".join(cell["source"]), "".join("".join(out.get("text", "")) for out in cell["outputs"]))
        for cell in cells
    ]


def run(path: Path, folder: Path, pictures: Path | None) -> list[str]:
    """Run a page or a notebook; return what each of its blocks prints.

    Args:
        path: The page or the notebook.
        folder: A folder for what the blocks write; it is made.
        pictures: Where the pictures are kept that the page shows; None to keep none.
    """
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES))
    folder.mkdir()
    os.chdir(folder)
    space, outputs = {"__name__": "__main__"}, []
    for source, _ in cells_of(path):
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(source, path.name, "exec"), space)
        outputs.append(printed.getvalue())
    for _, name in PICTURE.findall(path.read_text(encoding="utf-8")):
        assert Path(name).is_file(), f"{path.name} shows {name}, which it does not draw"
        if pictures is not None:
            shutil.copy(name, pictures / name)
    return outputs


def written(page: Path, outputs: list[str]) -> str:
    """Return the text of a page with these outputs below its blocks."""
    found = iter(outputs)

    def with_output(match: re.Match[str]) -> str:
        output = "\n".join(line.rstrip() for line in next(found).strip("\n").splitlines())
        below = f"\n```text\n{output}\n```\n" if output else ""
        return f"```python\n{match[1]}```\n{below}"

    return CELL.sub(with_output, page.read_text(encoding="utf-8"))


def notebook(page: Path) -> str:
    """Return a page as a notebook, with its outputs, and its pictures attached to the text."""
    text, cells, end = page.read_text(encoding="utf-8"), list[dict[str, Any]](), 0
    for match in CELL.finditer(text):
        cells += [_prose(text[end : match.start()]), _code(match[1], match[2])]
        end = match.end()
    cells.append(_prose(text[end:]))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {
        "cells": [cell for cell in cells if cell["source"]],
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1) + "\n"


def _prose(text: str) -> dict[str, Any]:
    names = [name for _, name in PICTURE.findall(text)]
    images = {name: base64.b64encode((PICTURES / name).read_bytes()).decode() for name in names}
    source = re.sub(r"(?<!!)\[([^\]]*)\]\((?!http)[^)]*\)", r"\1", text)  # pages are elsewhere
    source = PICTURE.sub(r"![\1](attachment:\2)", source).strip("\n")
    cell: dict[str, Any] = {"cell_type": "markdown", "metadata": {}, "source": _lines(source)}
    attached = {name: {"image/png": image} for name, image in images.items()}
    return cell | ({"attachments": attached} if attached else {})


def _code(source: str, output: str | None) -> dict[str, Any]:
    stream = {"name": "stdout", "output_type": "stream", "text": _lines(output or "")}
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [stream] if output else [],
        "source": _lines(source.rstrip("\n")),
    }


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def differences(path: Path, outputs: list[str]) -> str:
    """Return where outputs differ from those that a page shows in more than figures."""
    shown = [output for _, output in cells_of(path)]
    lines = ["\n".join(map(_words, texts)).splitlines() for texts in (shown, outputs)]
    return "\n".join(difflib.unified_diff(*lines, "shown", "printed", lineterm=""))


def _words(text: str) -> str:
    lines = [" ".join(FIGURE.sub("#", line).split()) for line in text.splitlines()]
    return "\n".join(line for line in lines if line)


def main() -> None:
    """Run pages, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path, help="pages or notebooks; all pages if none")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    args = parser.parse_args()
    paths = [path.resolve() for path in args.pages] or PAGES
    PICTURES.mkdir(exist_ok=True)
    kept, wrong = None if args.check else PICTURES, ""
    with (
        tempfile.TemporaryDirectory() as place,
        ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool,
    ):
        folders = [Path(place) / path.stem for path in paths]
        for path, outputs in zip(
            paths, pool.map(run, paths, folders, [kept] * len(paths)), strict=True
        ):
            if args.check:
                wrong += differences(path, outputs)
            else:
                path.write_text(written(path, outputs), encoding="utf-8")
            if not args.check and path.stem == NOTEBOOK.stem:
                NOTEBOOK.write_text(notebook(path), encoding="utf-8")
    sys.exit(wrong or None)


if __name__ == "__main__":
    main()
