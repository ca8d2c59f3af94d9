"""Files from anywhere: a clear refusal or a record, never a traceback, never more memory."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_hessian.cli import main
from ds_hessian.errors import ResultError
from ds_hessian.records import Record
from ds_hessian.records.safetensors import Reader, Writer
from tests.records.makers import semicircle, spectrum_of
from tests.records.test_records import OLD, kinds
from tests.tiers import cells

CASES = int(os.environ.get("DS_HESSIAN_FUZZ", "15"))
"""Examples of each property."""
SLOW = 1000
"""Examples of each kind of record in the slow tier: 16,500 over all."""
ROOM = 2**26
"""Bytes of memory beside twice a file's size: the interpreter's own."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return spectrum_of(semicircle(60), m=4, probes=2).save(tmp_path / "run")


def signed(folder: Path, data: bytes, kind: str = "spectrum") -> None:
    """Write an NPZ with the hash that fits, as a writer without our checks would leave it."""
    (folder / f"{kind}.npz").write_bytes(data)
    edit(folder, ["arrays", "sha256"], hashlib.sha256(data).hexdigest(), kind)


def edit(folder: Path, path: list[Any], value: Any, kind: str = "spectrum") -> None:
    content = json.loads((folder / f"{kind}.json").read_text())
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (folder / f"{kind}.json").write_text(json.dumps(content))


def arrays_of(folder: Path, kind: str = "spectrum") -> dict[str, Any]:
    with np.load(folder / f"{kind}.npz") as found:
        return dict(found)


def saved(arrays: dict[str, Any], compressed: bool = False) -> bytes:
    buffer = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(buffer, **arrays)
    return buffer.getvalue()


def deep(folder: Path) -> str:
    (folder / "spectrum.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    return "nested too deeply"


def many(folder: Path) -> str:
    (folder / "spectrum.json").write_text("[" + "[]," * 1_000_000 + "[]]")
    return "more values than any record"


def large(folder: Path) -> str:
    with (folder / "spectrum.json").open("wb") as file:
        file.truncate(2**40)
    return "no record has over"


def pipe(folder: Path) -> str:
    (folder / "spectrum.json").unlink()
    os.mkfifo(folder / "spectrum.json")
    return "is not a regular file"


def directory(folder: Path) -> str:
    (folder / "spectrum.json").unlink()
    (folder / "spectrum.json").mkdir()
    return "spectrum.json"


def not_text(folder: Path) -> str:
    (folder / "spectrum.json").write_bytes(b"\xff\xfe{\x00")
    return "it is not JSON"


def digits(folder: Path) -> str:
    (folder / "spectrum.json").write_text('{"n": ' + "9" * 5000 + "}")
    return "it is not JSON"


def overflow(folder: Path) -> str:
    text = (folder / "spectrum.json").read_text()
    (folder / "spectrum.json").write_text(text.replace('"loss": 2.7', '"loss": 1e999'))
    return "loss must be"


def declared(folder: Path) -> str:
    """An array of 29 TiB in a few bytes."""
    data = saved(arrays_of(folder))
    shape, huge = b"'shape': (2, 4), }", b"'shape': (2, 2000000000000), }"
    assert shape + b" " * 20 in data
    signed(folder, data.replace(shape + b" " * (len(huge) - len(shape)), huge, 1))
    return r"declares an array \(2, 2000000000000\)"


def bomb(folder: Path) -> str:
    """Small, and a thousand times as large where it is unpacked."""
    signed(folder, saved({"alphas": np.zeros(2**25)}, compressed=True))
    return "is compressed|larger than the file"


def overlapping(folder: Path) -> str:
    """A thousand names for the same bytes."""
    data = saved({"alphas": np.zeros(2**14)})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (member,) = archive.infolist()
    buffer = io.BytesIO(data[: len(data) - 22 - 46 - len(member.filename)])
    buffer.seek(0, io.SEEK_END)
    archive = zipfile.ZipFile(buffer, "a")
    for number in range(1000):
        again = copy.copy(member)
        again.filename = f"a{number}.npy"
        archive.filelist.append(again)
    archive._didModify = True
    archive.start_dir = buffer.tell()
    archive.close()
    signed(folder, buffer.getvalue())
    return "larger than the file"


def encrypted(folder: Path) -> str:
    data = bytearray(saved(arrays_of(folder)))
    for start in range(len(data)):
        if data[start : start + 4] == b"PK\x01\x02":
            data[start + 8] |= 1
    signed(folder, bytes(data))
    return "is encrypted"


def unknown_compression(folder: Path) -> str:
    data = bytearray(saved(arrays_of(folder)))
    for start in range(len(data)):
        if data[start : start + 4] == b"PK\x01\x02":
            data[start + 10] = 77
    signed(folder, bytes(data))
    return "is compressed|compression"


def objects(folder: Path) -> str:
    buffer = io.BytesIO()
    np.savez(buffer, alphas=np.array([print], dtype=object))
    signed(folder, buffer.getvalue())
    return "not an array of numbers"


def nothing(folder: Path) -> str:
    signed(folder, b"")
    return "its NPZ"


def no_members(folder: Path) -> str:
    signed(folder, saved({}))
    return "its arrays lack alphas"


def changed_array(name: str, message: str, change: Callable[[Any], Any]) -> Callable[[Path], str]:
    def act(folder: Path) -> str:
        arrays = arrays_of(folder)
        signed(folder, saved(arrays | {name: change(arrays[name])}))
        return message

    act.__name__ = f"{name}: {message}"
    return act


def changed_field(path: list[Any], value: Any, message: str) -> Callable[[Path], str]:
    def act(folder: Path) -> str:
        edit(folder, path, value)
        return message

    act.__name__ = f"{'.'.join(map(str, path))} = {value!r:.20}"
    return act


FOREIGN = (
    deep,
    many,
    large,
    pipe,
    directory,
    not_text,
    digits,
    overflow,
    declared,
    bomb,
    overlapping,
    encrypted,
    unknown_compression,
    objects,
    nothing,
    no_members,
    changed_array("alphas", "must hold float64, got complex128", lambda a: a + 0j),
    changed_array("alphas", "must hold float64, got bool", lambda a: a > 0),
    changed_array("alphas", "must be finite", lambda a: a * np.nan),
    changed_array("alphas", "must be at most 1e.100", lambda a: a + 1e200),
    changed_array("weights", "sum to 1", lambda a: 2 * a),
    changed_array("weights", "sum to 1", lambda a: a - 1),
    changed_array("ritz_values", "must ascend", lambda a: -a),
    changed_array("ritz_errors", "must be at least 0", lambda a: a - 1e9),
    changed_array("betas", "betas must be", lambda a: a[:1]),
    changed_array("betas", "betas must be", lambda a: a[..., None]),
    changed_field(["n"], 10**30, "n must be int"),
    changed_field(["n"], 0, "n must be a number of parameters"),
    changed_field(["n"], True, "n must be int"),
    changed_field(["provenance", "step"], "7", "provenance.step must be int, got '7'"),
    changed_field(["provenance", "step"], None, "provenance.step must be int, got None"),
    changed_field(["provenance"], [], "provenance must be Provenance"),
    changed_field(["provenance", "layout"], "\x1b[31mZeRO", "must be printable text"),
    changed_field(["provenance", "layout"], "\ud800", "must be printable text"),
    changed_field(["provenance", "operator"], "x", "operator must be 'hessian' or 'ggn' or"),
    changed_field(["provenance", "versions"], {"torch": 1}, "versions.torch must be str"),
    changed_field(["trace", "value"], "nan", "must be finite"),
    changed_field(["trace", "value"], "1.5", "trace.value must be float"),
    changed_field(["cost", "seconds_total"], None, "cost.seconds_total must be float"),
    changed_field(["loss"], [1], "loss must be"),
    changed_field(["schema_version"], "x" * 1000, "has schema version 'xx"),
    changed_field(["arrays"], None, "names no arrays"),
    changed_field(["arrays", "sha256"], "../../etc/passwd", "names no arrays"),
)


@pytest.mark.parametrize("damage", FOREIGN, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("command", cells(["report", "page"], ["report"]))
def test_foreign_files_are_refused_in_one_line_and_in_little_memory(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], str],
    command: str,
) -> None:
    message = damage(folder)
    size = max(path.stat().st_size for path in folder.iterdir())
    monkeypatch.setattr(sys, "argv", ["ds-hessian", command, str(folder)])
    tracemalloc.start()
    try:
        with pytest.raises(SystemExit) as ended:
            main()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "") and err.count("\n") == 1, err
    assert err.startswith("ds-hessian: ") and re.search(message, err), err
    assert peak <= 2 * size + ROOM


def test_a_large_record_is_read_in_twice_its_size(tmp_path: Path) -> None:
    record = next(kind for kind in kinds() if kind.kind == "influence").load(OLD / "influence")
    arrays = {name: getattr(record, name) for name in record.arrays}
    wide = {"scores": np.ones((2, 2**21)), "errors": np.ones((2, 2**21))}
    shutil.copytree(OLD / "influence", tmp_path / "run")
    signed(tmp_path / "run", saved(arrays | wide), "influence")
    size = (tmp_path / "run" / "influence.npz").stat().st_size
    tracemalloc.start()
    try:
        type(record).load(tmp_path / "run")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size > 2**26 and peak <= 2.2 * size


# ---- fuzz

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**25), 10**25)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["nan", "inf", "-inf", "auto", "", "\x00", "\ud800", "é"])
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)
NUMBERS = st.sampled_from(
    [0.0, 1.0, -1.0, 0.5, 1e-300, 1e99, -1e99, 1e300, np.nan, np.inf, -np.inf]
)
DTYPES = st.sampled_from(["<f8", "<f4", ">f8", "<f2", "<i8", "<u1", "|b1", "<c16"])


def paths_in(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places in a JSON value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, inner in entries:
        found.append((*above, key))
        if isinstance(inner, dict | list):
            found += paths_in(inner, found[-1])
    return found


@st.composite
def damaged_json(draw: Any, folder: Path, kind: str) -> bytes:
    data = (folder / f"{kind}.json").read_bytes()
    if draw(st.booleans()):
        return mutated(draw, data)
    content = json.loads(data)
    for path in draw(st.lists(st.sampled_from(paths_in(content)), min_size=1, max_size=2)):
        inner = content
        try:
            for key in path[:-1]:
                inner = inner[key]
            if draw(st.booleans()):
                inner[path[-1]] = draw(VALUES)
            else:
                del inner[path[-1]]
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took it away
    return json.dumps(content).encode()


@st.composite
def damaged_npz(draw: Any, folder: Path, kind: str) -> bytes:
    data = (folder / f"{kind}.npz").read_bytes()
    with np.load(io.BytesIO(data)) as found:
        arrays = dict(found)
    if not arrays or draw(st.booleans()):
        return mutated(draw, data)
    for name in draw(st.lists(st.sampled_from(sorted(arrays)), min_size=1, max_size=2)):
        old = arrays[name]
        shape = draw(st.just(old.shape) | st.lists(st.integers(0, 3), max_size=3).map(tuple))
        values = draw(st.lists(NUMBERS, min_size=1, max_size=4))
        with np.errstate(all="ignore"):
            arrays[name] = np.resize(np.array(values), shape).astype(draw(DTYPES))
    return saved(arrays, compressed=draw(st.booleans()))


def mutated(draw: Any, data: bytes) -> bytes:
    """Bytes changed, cut, or put in."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(found)))
        piece = draw(st.binary(max_size=4) | st.sampled_from([b"\xff" * 8, b"[" * 50, b"1e999"]))
        found[at : at + draw(st.integers(0, 8))] = piece
    return bytes(found[: draw(st.just(len(found)) | st.integers(0, len(found)))])


def looked_at(kind: type[Record], folder: Path) -> bool:
    """Load and print a record; whether there was one. Everything else than a refusal fails."""
    try:
        record = kind.load(folder)
    except ResultError as error:
        assert len(str(error)) < 2000
        return False
    record.table().encode()
    record.derived()
    return True


def fuzzed(kind: type[Record], folder: Path, data: st.DataObject) -> None:
    name = kind.kind
    before = {s: (folder / f"{name}.{s}").read_bytes() for s in ("json", "npz")}
    try:
        if data.draw(st.booleans()):
            (folder / f"{name}.json").write_bytes(data.draw(damaged_json(folder, name)))
        else:
            signed(folder, data.draw(damaged_npz(folder, name)), name)
        looked_at(kind, folder)
    finally:
        for suffix, content in before.items():
            (folder / f"{name}.{suffix}").write_bytes(content)


KINDS = [(k, f) for f in sorted(OLD.iterdir()) for k in kinds() if (f / f"{k.kind}.json").exists()]
QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


def fuzz(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A property of so many examples, without a deadline."""
    return settings(
        max_examples=examples, deadline=None, suppress_health_check=QUIET, database=None
    )


def check_kind(kind: type[Record], folder: Path, examples: int) -> None:
    @fuzz(examples)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        fuzzed(kind, folder, data)

    check()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "source"), KINDS, ids=[f.name for _, f in KINDS])
@pytest.mark.parametrize("examples", [CASES, pytest.param(SLOW, marks=pytest.mark.full)])
def test_any_damage_to_a_record_is_refused_or_harmless(
    kind: type[Record], source: Path, examples: int, tmp_path: Path
) -> None:
    shutil.copytree(source, tmp_path / "run")
    check_kind(kind, tmp_path / "run", examples)


@pytest.mark.filterwarnings("ignore")
@fuzz(max(CASES // 4, 5))
@given(data=st.data())
def test_the_command_line_draws_or_refuses_whatever_a_spectrum_holds(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    shutil.copytree(OLD / "spectrum", folder, dirs_exist_ok=True)
    if data.draw(st.booleans()):
        (folder / "spectrum.json").write_bytes(data.draw(damaged_json(folder, "spectrum")))
    else:
        signed(folder, data.draw(damaged_npz(folder, "spectrum")))
    command = data.draw(st.sampled_from(["report", "plot", "page"]))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["ds-hessian", command, str(folder)])
        main()
    assert ended.value.code in (0, 2)


@fuzz(CASES)
@given(data=st.data())
def test_any_damage_to_a_file_of_vectors_is_refused_or_harmless(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("vectors") / "v.safetensors"
    with Writer(path, {"a": (2, 3), "b": (2, 0)}, {"k": "1"}) as writer:
        writer.append(torch.ones(2, 3))
        writer.append(torch.zeros(2, 0))
    path.write_bytes(mutated(data.draw, path.read_bytes()))
    try:
        reader = Reader(path)
        for name, shape in reader.shapes.items():
            assert reader.read(name).shape == shape
    except ResultError as error:
        assert str(path) in str(error)
