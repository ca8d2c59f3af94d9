"""The documentation says what the code does: its tables are current and its examples run."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_hessian.config import SECTION, HessianConfig, describe, schema
from tests.ranks import free_port, run_alone
from tests.tiers import cells

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "concepts").glob("*.md")),
    ROOT / "README.md",
]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
GALLERY = [
    page
    for page in sorted((ROOT / "docs" / "gallery").glob("*.md"))
    if page.stem not in {"index", *(notebook.stem for notebook in NOTEBOOKS)}
]

# What the examples take as given: models that return their loss, a configuration, micro-batches.
PREAMBLE = """
import torch
from tests.nets import TinyGPT, batch as _batch

torch.manual_seed(0)
torch.set_num_threads(1)
model, other_model, config = TinyGPT(), TinyGPT(), "ds_config.json"
batches = [_batch(number, rank=0) for number in range(2)]
"""

# An automatic spectrum that fails is logged and kept, so it must be looked for.
EPILOGUE = """
schedule = engine.hessian_schedule
assert not schedule.failures, schedule.failures
assert len(schedule.spectra) == engine.global_steps // engine.hessian.config.interval
"""


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """(line number, text) of the fenced blocks of a language."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, m.start(1)) + 1, m.group(1)) for m in found]


def with_blocks(language: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, language)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text_of(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_configuration_page_is_what_describe_prints() -> None:
    _, _, table = text_of("configuration.md").partition("\n\n")
    assert table == describe(), (
        "docs/configuration.md is out of date: below its heading and an empty line it must hold "
        "the output of ds_hessian.config.describe()"
    )


def test_the_schema_completes_and_checks_the_section() -> None:
    published = schema()["properties"][SECTION]
    assert set(published["properties"]) == set(HessianConfig.model_fields)
    assert published["additionalProperties"] is False
    for name in re.findall(r'"\$ref": "([^"]+)"', json.dumps(published)):
        place: Any = schema()
        for part in name.removeprefix("#/").split("/"):
            place = place[part]
        assert place["properties"]


def test_the_signature_of_initialize_is_deepspeeds() -> None:
    import deepspeed

    (given,) = re.findall(
        r"ds_hessian\.initialize\((.+)\)$", text_of("api/engine.md"), re.MULTILINE
    )
    there = inspect.signature(deepspeed.initialize).parameters.values()
    assert given == ", ".join(f"{p.name}={p.default!r}" for p in there)


@pytest.mark.parametrize("page", with_blocks("json"), ids=name_of)
def test_configurations_shown_are_accepted(page: Path) -> None:
    for line, text in blocks(page, "json"):
        config = HessianConfig.from_deepspeed(json.loads(text))
        assert config is not None, f'{page.name}:{line}: there is no "hessian" section'


def test_modules_named_in_the_architecture_exist() -> None:
    text = text_of("architecture.md")
    paths = set(re.findall(r"\b(?:ds_hessian|csrc|tests)/[\w/.]*[\w/]", text))
    modules = set(re.findall(r"\bds_hessian(?:\.[a-z_]\w*)+", text))
    assert paths and modules
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    assert [name for name in sorted(modules) if importlib.util.find_spec(name) is None] == []


def test_every_part_of_the_package_is_in_the_architecture() -> None:
    tree = text_of("architecture.md").split("```")[1]
    named = set(re.findall(r"(?<=\s)[a-z_]+(?:/|\.py)(?=\s)", tree))
    package = ROOT / "ds_hessian"
    parts = {f"{p.name}/" for p in package.iterdir() if (p / "__init__.py").exists()}
    parts |= {p.name for p in package.glob("*.py") if p.name != "__init__.py"}
    assert parts - named == set()


def test_everything_refused_is_in_the_support_page() -> None:
    tree = ast.parse((ROOT / "ds_hessian/backends/zero/support.py").read_text(encoding="utf-8"))
    function = next(
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "_findings"
    )
    returned = next(node.value for node in function.body if isinstance(node, ast.Return))
    assert isinstance(returned, ast.List)
    names = [
        part.value.strip()
        for entry in returned.elts
        if isinstance(entry, ast.Tuple)
        for part in ast.walk(entry.elts[0])
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    text = text_of("support.md")
    assert len(names) >= 10
    assert [name for name in names if name not in text] == []


def test_messages_to_troubleshoot_are_those_of_the_code() -> None:
    """Between its `...`, a quoted message is text of one string of the package."""
    strings = [text for path in (ROOT / "ds_hessian").rglob("*.py") for text in texts_of(path)]
    lines = re.findall(r"^\* (`.*`)$", text_of("troubleshooting.md"), re.MULTILINE)
    messages = [message for line in lines for message in re.findall(r"`([^`]+)`", line)]
    assert len(messages) >= 40
    found = {
        message: [
            part
            for part in (part.strip() for part in message.split("..."))
            if re.search(r"\w", part) and not any(part in text for text in strings)
        ]
        for message in messages
    }
    assert {message: missing for message, missing in found.items() if missing} == {}


def texts_of(path: Path) -> list[str]:
    """The strings of a module, each with a gap where a value is filled in."""
    texts = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
        if isinstance(node, ast.JoinedStr):
            texts.append("".join(_piece(value) for value in node.values))
    return texts


def _piece(value: ast.expr) -> str:
    if isinstance(value, ast.Constant):
        return str(value.value)
    named = isinstance(value, ast.FormattedValue) and ast.unparse(value.value) == "SECTION"
    return SECTION if named else "\0"


QUICK = [ROOT / "README.md"]


@pytest.mark.parametrize("page", cells(with_blocks("python"), QUICK), ids=name_of)
def test_examples_run(page: Path, tmp_path: Path, built: None) -> None:
    """All python blocks of a page, in order, in one process that is a job of one rank.

    Line numbers in a traceback are those of the page. `ds_config.json` is the page's first JSON
    block, or that of the usage page.
    """
    configs = blocks(page, "json") or blocks(ROOT / "docs" / "usage.md", "json")
    (tmp_path / "ds_config.json").write_text(configs[0][1], encoding="utf-8")
    chunks = [(0, PREAMBLE)] + blocks(page, "python")
    if any("engine" in code for _, code in chunks):
        chunks.append((0, EPILOGUE))
    environment = os.environ | {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    run_alone(run_blocks, page.name, chunks, folder=tmp_path, environment=environment)


def run_blocks(name: str, chunks: list[tuple[int, str]]) -> None:
    """Run (line number, text) of a page in one name space."""
    import torch

    torch.set_num_threads(1)
    space = {"__name__": "example"}
    for line, code in chunks:
        source = "\n" * (line - 1) + code
        where = name if line else "test_docs.py"
        exec(compile(source, where, "exec", dont_inherit=True), space)


@pytest.mark.full
@pytest.mark.parametrize("page", GALLERY + NOTEBOOKS, ids=name_of)
def test_pages_of_the_gallery_run_and_print_what_they_show(
    page: Path, tmp_path: Path, built: None
) -> None:
    """In words; the figures are those of the machine that made the page, and asserted in it."""
    here = os.environ | {"PYTHONPATH": str(ROOT)}
    run_alone(check_outputs, page, tmp_path / "page", folder=tmp_path, environment=here)


def check_outputs(page: Path, folder: Path) -> None:
    """What the blocks of a page print is what it shows."""
    sys.path.insert(0, str(ROOT / "docs"))
    from make_gallery import differences, run

    assert (wrong := differences(page, run(page, folder, None))) == "", wrong


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_a_notebook_is_its_page_of_the_gallery(notebook: Path) -> None:
    """In what it runs and in what it shows, so that one of them is run."""
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    texts = (out["text"] for cell in cells for out in cell.get("outputs", ()))
    page = ROOT / "docs" / "gallery" / f"{notebook.stem}.md"
    assert code == [text.rstrip("\n") for _, text in blocks(page, "python")]
    assert ["".join(text) for text in texts] == [text for _, text in blocks(page, "text")]
