"""Any configuration, whatever is in it, is a `HessianConfig` or a `ConfigError`."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ds_hessian.config import HessianConfig, leaves
from ds_hessian.errors import ConfigError
from tests.tiers import cells

NAMES = [*HessianConfig.model_fields, *leaves(), *(n.split(".")[-1] for n in leaves()), "hess", ""]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 2.5, 1e-3, float("nan"), float("inf"), -0.0, 10**30),
    *(
        10**5000,
        "",
        "auto",
        "3",
        "x",
        "full",
        "none",
        "window",
        "disk",
        "host",
        "bf16",
        "\0",
        "\ud800",
    ),
    *(
        "\ud800",
        [],
        [1],
        {},
        {"dtype": "bf16"},
        {1: 2},
        {"mode": "none", "window": 4},
        {"a": {"b": {}}},
    ),
    *(
        {"a": {"b": {}}},
        Path("x"),
        b"bytes",
        {1, 2},
        object(),
        len,
        HessianConfig,
        HessianConfig(),
        1j,
    ),
]
BASE = {
    "train_batch_size": 2,
    "hessian": {"num_matvecs": 7, "basis": {"device": "disk", "folder": "x"}, "resume": "y"},
}
TOKENS = ["{", "}", "[", "]", ":", ",", '"', "\\", "null", "-", "e9", "9" * 5000, "#", "\n", "hess"]


def value(draw: random.Random, levels: int = 2) -> Any:
    """A value, sometimes an object of settings, sometimes nested very deeply."""
    kind = draw.random()
    if kind < 0.2 and levels:
        return {draw.choice(NAMES): value(draw, levels - 1) for _ in range(draw.randrange(3))}
    found = draw.choice(VALUES)
    if kind > 0.99:
        for _ in range(5000):
            found = {"basis": found}
    return found


def text(draw: random.Random) -> bytes:
    """A configuration file that is damaged in a few places, or of another encoding."""
    found = json.dumps(BASE)
    for _ in range(draw.choice([0, 0, 1, 3])):
        at = draw.randrange(len(found) + 1)
        cut = at + draw.choice([0, 0, 1, 5, 40])
        found = found[:at] + draw.choice(TOKENS) * draw.choice([1, 1, 2, 200]) + found[cut:]
    data = found.encode(draw.choice(["utf-8"] * 7 + ["utf-16", "utf-32", "utf-8-sig"]))
    for _ in range(draw.choice([0, 0, 0, 1])):
        at = draw.randrange(len(data) or 1)
        data = data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    return data[: draw.choice([None, None, None, draw.randrange(len(data) + 1)])]


def refused(call: Any, /, *args: Any, **named: Any) -> bool:
    """Whether a call raises a `ConfigError` of a few short lines; anything else fails the test."""
    try:
        call(*args, **named)
    except ConfigError as error:
        assert str(error) and all(len(line) < 600 for line in str(error).splitlines())
        return True
    return False


@pytest.mark.parametrize("cases", cells([300, 4000], [300]))
def test_any_section_and_any_override(cases: int) -> None:
    draw, outcomes = random.Random(cases), [0, 0]
    for _ in range(cases):
        section = {draw.choice(NAMES): value(draw) for _ in range(draw.randrange(4))}
        outcomes[refused(HessianConfig.parse, section)] += 1
        base = draw.choice([HessianConfig(), HessianConfig.parse(BASE["hessian"])])  # type: ignore[arg-type]
        outcomes[refused(base.with_overrides, **section)] += 1
    assert min(outcomes) > cases // 20


@pytest.mark.parametrize("cases", cells([100, 3000], [100]))
def test_any_file(tmp_path: Path, cases: int) -> None:
    draw, path, outcomes = random.Random(cases), tmp_path / "ds.json", [0, 0]
    for _ in range(cases):
        path.write_bytes(text(draw))
        outcomes[refused(HessianConfig.from_deepspeed, path)] += 1
    assert min(outcomes) > cases // 20
