"""What every record offers: a table, files, a picture or the reason for none; old files load."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.text import Text

import ds_hessian
from ds_hessian.errors import ResultError, UnsupportedError
from ds_hessian.records import (
    Check,
    Comparison,
    HessianCurvatures,
    HessianDecomposition,
    HessianEigenpairs,
    HessianKronecker,
    HessianOffBlockShare,
    HessianSharpness,
    HessianSpectrum,
    Measured,
    Record,
    SelfTest,
)
from ds_hessian.show.pictures import PICTURES, WITHOUT
from ds_hessian.show.tables import TABLES
from tests.records.makers import PROVENANCE, language_model_like, semicircle, spectrum_of, sweep
from tests.records.test_analyses import alike
from tests.records.test_analyses import records as analyses

PACKAGE = Path(ds_hessian.__file__).parent
OLD = Path(__file__).parent / "files"


def kinds() -> list[type[Record]]:
    """All record classes, found by inheritance."""
    found, open_ = list[type[Record]](), [Record]
    while open_:
        subclasses = open_.pop().__subclasses__()
        open_ += subclasses
        found += [kind for kind in subclasses if "kind" in vars(kind)]
    return found


def verdict(**changes: Any) -> SelfTest:
    checks = (
        Check("symmetry", 1e-5, 1e-3, "unused"),
        Check("restore", 0.0, 0.0, "unused"),
        Check("nonlinearity", math.nan, 0.3, "the step is too long"),
    )
    fields = {"checks": checks, "error": 0.3, "displacement": 1e-3, "suggestions": ("use auto",)}
    return SelfTest(**(fields | {"provenance": PROVENANCE} | changes))


def examples() -> list[Record]:
    spectra = {name: spectrum_of(semicircle(80), m=4, seed=i) for i, name in enumerate("ab$")}
    parts = {
        name: spectrum_of(semicircle(80), m=4, probes=2) for name in ("hessian", "ggn", "residual")
    }
    return [
        spectrum_of(language_model_like(200), m=6, probes=2, noise=1e-3),
        sweep(),
        Comparison(spectra),
        HessianDecomposition(parts),
        verdict(),
        *analyses(),
    ]


EXAMPLES = examples()
NAMES = [record.kind for record in EXAMPLES]


def test_every_kind_of_record_has_an_example_here() -> None:
    assert {type(record) for record in EXAMPLES} == set(kinds())
    assert len({kind.kind for kind in kinds()}) == len(kinds())


@pytest.mark.parametrize("record", EXAMPLES, ids=NAMES)
def test_every_record_prints_as_a_table_of_short_lines(record: Record) -> None:
    lines = record.table().splitlines()
    assert all(0 < len(line) <= 120 for line in lines)
    assert any(character.isdigit() for character in record.table())


@pytest.mark.parametrize("record", EXAMPLES, ids=NAMES)
def test_every_record_is_loaded_as_it_was_saved(record: Record, tmp_path: Path) -> None:
    found = type(record).load(record.save(tmp_path))
    for field in dataclasses.fields(record):
        assert alike(getattr(record, field.name), getattr(found, field.name)), field.name
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f"{record.kind}.{s}" for s in ("json", "npz")
    ]


@pytest.mark.parametrize("record", EXAMPLES, ids=NAMES)
def test_every_record_has_a_picture_or_a_reason_for_none(record: Record, tmp_path: Path) -> None:
    path = tmp_path / "new" / "picture.png"
    if isinstance(record, HessianSharpness | HessianOffBlockShare | HessianCurvatures):
        with pytest.raises(UnsupportedError, match="has no picture: at one step it is a few"):
            record.plot(path)
        return
    assert record.plot(path) == path and path.read_bytes().startswith(b"\x89PNG")


def test_tables_and_pictures_are_known_for_every_kind() -> None:
    assert set(TABLES) == set(kinds())
    assert set(PICTURES) | set(WITHOUT) == set(kinds()) and not set(PICTURES) & set(WITHOUT)


def test_a_new_kind_of_record_is_told_where_its_table_belongs() -> None:
    @dataclasses.dataclass(frozen=True, eq=False)
    class Unknown(Record):
        kind = "unknown"

    with pytest.raises(TypeError, match="no table is known for Unknown: add one to TABLES"):
        Unknown().table()


MATRICES_OF_THEIR_OWN = [record for record in EXAMPLES if isinstance(record, Measured)]


@pytest.mark.parametrize("record", MATRICES_OF_THEIR_OWN, ids=lambda record: record.kind)
def test_tables_and_pictures_name_no_other_matrix(
    record: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    texts = list[str]()

    def seen(figure: Any, *given: Any, **options: Any) -> None:
        texts.extend(text.get_text() for text in figure.findobj(Text))

    monkeypatch.setattr(Figure, "savefig", seen)
    source = dataclasses.replace(record.provenance, operator="ggn", outputs="head, cross entropy")
    other = dataclasses.replace(record, provenance=source)
    texts.append(other.table())
    if type(other) not in WITHOUT:
        other.plot(tmp_path / "picture.png")
    assert "Gauss-Newton" in texts[0]
    assert not [text for text in texts if "Hessian" in text]


def test_spectra_of_other_matrices_are_compared_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    titles = list[str]()
    monkeypatch.setattr(
        Figure, "savefig", lambda self, path, **kw: titles.append(self.get_suptitle())
    )
    one = spectrum_of(semicircle(80), m=4)
    for changes, n, note, title in (
        ({}, 80, None, "2 Hessian spectra"),
        ({"operator": "ggn", "outputs": "head"}, 80, "operator, outputs", "2 spectra"),
        ({"parameters": ("head.weight",)}, 70, "parameters", "2 Hessian spectra"),
    ):
        source = dataclasses.replace(one.provenance, **changes)
        other = dataclasses.replace(one, provenance=source, n=n)
        found = Comparison({"a": one, "b": other})
        expected = f"the matrices are not the same, they differ in {note}"
        assert found.notes() == (() if note is None else (expected,))
        found.plot(tmp_path / "picture.png")
        assert titles.pop() == title


def test_a_decomposition_is_drawn_with_its_axis_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn = list[Any]()
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **kw: drawn.append(self))
    parts = next(r for r in EXAMPLES if isinstance(r, HessianDecomposition))
    parts.plot(tmp_path / "picture.png")
    (figure,) = drawn
    assert "eigenvalues in each cell" in figure.axes[0].get_title(loc="left")
    assert f"tr R {parts.residual.trace}" in figure.get_supxlabel()
    assert "negative eigenvalues" in figure.get_supxlabel()


def test_all_that_kronecker_factors_leave_out_is_named_or_counted() -> None:
    factors = next(r for r in EXAMPLES if isinstance(r, HessianKronecker))
    names = {f"decoder.layers.{i}.embedding.weight": "it is an embedding" for i in range(30)}
    lines = dataclasses.replace(factors, left_out=names).table().splitlines()
    assert sum("it is an embedding" in line for line in lines) == 12
    assert lines[-1] == "left out: 18 others" and max(map(len, lines)) <= 120


def test_every_figure_of_kronecker_factors_has_its_error_in_the_table() -> None:
    """A largest eigenvalue of 28.9 +- 102 was 28.9."""
    factors = next(r for r in EXAMPLES if isinstance(r, HessianKronecker))
    values = np.full_like(factors.scales, 28.9)
    given = {"extremes": values, "extreme_errors": 4 * values, "scale_errors": values}
    table = dataclasses.replace(factors, scales=values / 10, **given).table()
    assert table.count("29 ± 116") == table.count("3 ± 29") == 4


def test_a_solve_without_a_figure_has_a_reason_in_the_table() -> None:
    factors = next(r for r in EXAMPLES if isinstance(r, HessianKronecker))
    nothing = np.full_like(factors.solves, math.nan)
    turned = dataclasses.replace(factors, solves=nothing, scales=-factors.scales)
    assert "best scale of K is not positive (kfac, shampoo)" in turned.table()
    short = dataclasses.replace(factors, solves=nothing, residuals=np.array([0.3, 1e-6]))
    first, second = short.unsolved.values()
    assert "a larger basis or damping helps" in first and "whose tokens cancel" in second
    assert not factors.unsolved


@pytest.mark.full
def test_names_beside_the_rows_of_a_picture_are_plain_text(tmp_path: Path) -> None:
    pairs = next(r for r in EXAMPLES if isinstance(r, HessianEigenpairs))
    shares = {f"${i} {'long' * 20}": np.full(len(pairs.values), 0.1) for i in range(70)}
    dataclasses.replace(pairs, concentrations=shares).plot(tmp_path / "picture.png")
    dataclasses.replace(pairs, concentrations={}).plot(tmp_path / "without.png")
    assert (tmp_path / "without.png").exists()


def test_records_are_equal_by_their_bits() -> None:
    for record, again in zip(EXAMPLES, examples(), strict=True):
        if not isinstance(record, HessianSharpness | SelfTest):  # scalars that are NaN
            assert record == again
    assert verdict(error=0.1) != verdict()


LATER = {
    "operator": "hessian",
    "outputs": None,
    "parameters": [],
    "optimizer": None,
    "batch_statistics": False,
    "held_choices": 0,
    "flipped_choices": 0.0,
    "kinks": "",
    "kinks_reason": "",
    "held_sides": 0,
    "crossed_sides": 0.0,
    "tolerance": None,
    "precision_reason": "",
}
"""Facts of the provenance that version 0.1 did not write, with their defaults."""
LATER_COST = {"one_sided": 0, "extrapolated": 0, "beyond_tolerance": 0}
"""The same of the cost."""


@pytest.mark.parametrize("folder", sorted(OLD.iterdir()), ids=lambda folder: folder.name)
def test_files_of_version_0_1_load_and_are_written_as_they_were(
    folder: Path, tmp_path: Path
) -> None:
    (path,) = folder.glob("*.json")
    (kind,) = (kind for kind in kinds() if kind.kind == path.stem)
    record = kind.load(folder)
    record.save(tmp_path)
    old, new = (json.loads((place / path.name).read_text()) for place in (folder, tmp_path))
    later = {"limited": [], "gradient_curvature_error": None, "update_curvature_error": None}
    old |= {name: default for name, default in later.items() if name in new}
    if "provenance" in new:
        old["provenance"] = LATER | old["provenance"]
    if "cost" in new:
        old["cost"] = LATER_COST | old["cost"]
    for content in (old, new):
        del content["arrays"]
        content.pop("density", None)  # follows from the arrays, to rounding
    assert new == old
    with (
        np.load(folder / f"{kind.kind}.npz") as before,
        np.load(tmp_path / f"{kind.kind}.npz") as now,
    ):
        assert all(now[name].size == 0 for name in set(now) - set(before))  # later, with a default
        for name in before:
            assert alike(before[name], now[name]), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": np.zeros(3)}, r"errors must be \(3,\), its \(k\), got \(2,\)"),
        ({"values": np.zeros(2, dtype=complex)}, "values must hold float64, got complex128"),
        ({"converged": np.zeros(2)}, "converged must hold bool, got float64"),
    ],
)
def test_arrays_that_contradict_what_the_record_states_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    pairs = next(r for r in EXAMPLES if isinstance(r, HessianEigenpairs))
    with pytest.raises(ResultError, match=message):
        dataclasses.replace(pairs, **changes)


def test_a_comparison_without_spectra_is_refused(tmp_path: Path) -> None:
    spectra = {name: spectrum_of(semicircle(80), m=4) for name in "ab"}
    Comparison(spectra).save(tmp_path)
    path = tmp_path / "comparison.json"
    for wrong, message in (
        ({"spectra": [1]}, "no spectra"),
        ({"spectra": {"a": 1}}, "'a' must be"),
    ):
        path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
        with pytest.raises(ResultError, match=message):
            Comparison.load(tmp_path)


# ---- files and what they import


def imported(path: Path) -> set[str]:
    """Names of modules that a file imports, also inside of functions."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("part", ["records", "show"])
def test_no_files_import_each_other_in_a_circle(part: str) -> None:
    paths = {}
    for path in (PACKAGE / part).rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        paths[name.removesuffix(".__init__")] = path
    open_ = {name: imported(path) & set(paths) - {name} for name, path in paths.items()}
    while free := {name for name, needs in open_.items() if not needs & set(open_)}:
        open_ = {name: needs for name, needs in open_.items() if name not in free}
    assert not open_


def test_records_import_nothing_that_draws() -> None:
    for path in (PACKAGE / "records").glob("*.py"):
        drawing = ("ds_hessian.show", "matplotlib", "plotly")
        assert not {name for name in imported(path) if name.startswith(drawing)}, path


def test_a_spectrum_states_its_arrays() -> None:
    hints = {f.name for f in dataclasses.fields(HessianSpectrum) if "Array" in str(f.type)}
    assert set(HessianSpectrum.arrays) == hints
