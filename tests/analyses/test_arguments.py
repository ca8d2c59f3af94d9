"""Arguments of analyses that cannot be are refused by name, before anything is measured."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ds_hessian
from ds_hessian.backends.objective import ModelObjective
from ds_hessian.errors import ConfigError, NumericsError, UnsupportedError
from tests.operators.nets import batches, loss_of, mlp

QUIET = {"progress": False, "plot": False}
NAN = float("nan")
NUMBER = ("a", None, True, NAN, float("inf"))
COUNTS = (0, -3, "a", None, 2.5, True)
WRONG: dict[str, dict[str, tuple[Any, ...]]] = {
    "eigenpairs": {
        "k": (1.5, "2", None, True),
        "which": ("XX", None, 3),
        "tolerance": (-1, *NUMBER),
        "max_matvecs": COUNTS,
        "basis_size": (2.5, "a"),
    },
    "trace": {"method": ("xx", None), "num_matvecs": (2.5, "a"), "blocks": ("nope", 3)},
    "solve": {
        "dampings": ([NAN], ["a"], 1.0, None, [float("inf")]),
        "method": ("xx", None),
        "tolerance": (-1, *NUMBER),
        "num_matvecs": ("a", 2.5),
        "preconditioner": ("xx", 3),
    },
    "sharpness": {
        "preconditioned": ("a", 3),
        "tolerance": (-1, *NUMBER),
        "max_matvecs": COUNTS,
    },
    "off_block_share": {"blocks": ("x", None), "num_probes": ("a", 1.5)},
    "alignment": {"k": ("a",), "tolerance": (-1, NAN), "update": ("a",), "earlier": (3,)},
    "displacement_sweep": {
        "directions": ("gradient", None, [], {}, 3),
        "displacements": ([], [-1.0], [NAN], ["a"], [0.0], 1.0, [1.0, 0.5]),
    },
    "kronecker": {
        "kinds": ("kfac", None, ["x"]),
        "layers": (3,),
        "basis": ("a", 1.5),
        "extremes": ("a", -1),
        "damping": (-1, *NUMBER),
        "draws": ("a", -1, 1.5),
        "layers_at_once": (0, -1, "a"),
    },
    "curvatures": {"directions": ("gradient", 3), "vectors": (3, [1])},
    "random_vector": {"seed": ("a", -1, 1.5), "probe": (-1,), "kind": ("x", None)},
}
GIVEN: dict[str, dict[str, Any]] = {"solve": {"dampings": [1.0]}}


@pytest.fixture(scope="module")
def hessian() -> Any:
    return ds_hessian.attach(mlp(), config=QUIET).use(batches(2), loss_of)


@pytest.mark.parametrize("method", WRONG)
def test_impossible_arguments_are_refused_by_name(hessian: Any, method: str) -> None:
    given = dict(GIVEN.get(method, {}))
    if method == "solve":
        given["b"] = hessian.random_vector()
    for name, values in WRONG[method].items():
        for value in values:
            evaluated = mock.patch.object(ModelObjective, "loss", side_effect=AssertionError)
            with evaluated, pytest.raises(ConfigError, match=name) as caught:
                getattr(hessian, method)(**{**given, name: value})
            assert "\n" not in str(caught.value)


def test_numbers_of_other_libraries_are_numbers(hessian: Any) -> None:
    pairs = hessian.eigenpairs(k=np.int64(1), tolerance=np.float32(0.1), max_matvecs=4)
    assert len(pairs.values) == 1
    b = hessian.random_vector()
    for dampings in (np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), (1, 2.0)):
        assert hessian.solve(b, dampings, num_matvecs=2).x.shape == (2, len(b))
    h = np.logspace(-3, -2, 2)
    assert hessian.displacement_sweep(("random",), h).curvatures.shape == (1, 2)


def test_a_sweep_of_steps_that_are_none_is_refused(hessian: Any) -> None:
    """The loss was said not to be finite there, and a smaller step to help."""
    with pytest.raises(ConfigError, match=r"ascending displacements, 2\^-126 at least"):
        hessian.displacement_sweep(["random"], [1e-40])


def test_a_preconditioner_of_another_length_is_refused(hessian: Any) -> None:
    with pytest.raises(NumericsError, match=r"preconditioner's diagonal must be \(607,\)"):
        hessian.solve(hessian.random_vector(), [1.0], preconditioner=torch.ones(3))


CALLS: dict[str, Any] = {
    "matvec": lambda hessian, v: hessian.matvec(v).vector,
    "solve": lambda hessian, v: hessian.solve(v, [1.0], num_matvecs=2).x,
    "eigenpairs": lambda hessian, v: hessian.eigenpairs(k=1, max_matvecs=4, start=v).values,
    "dot": lambda hessian, v: torch.tensor(hessian.dot(v, hessian.random_vector())),
    "gather": lambda hessian, v: next(iter(hessian.gather(v).values())),
}


@pytest.mark.parametrize("call", CALLS)
def test_vectors_of_another_shape_are_refused_and_other_dtypes_are_converted(
    hessian: Any, call: str
) -> None:
    v = hessian.random_vector(seed=3)
    for wrong in (v[:3], v.view(-1, 1), v.long(), v.tolist()):
        with pytest.raises(ConfigError, match=r"a vector of this rank, .* \(607,\)"):
            CALLS[call](hessian, wrong)
    found = [CALLS[call](hessian, x) for x in (v, v.double(), torch.stack([v, v], 1)[:, 0])]
    assert all(np.array_equal(np.asarray(each), np.asarray(found[0])) for each in found)


class Complex(nn.Module):
    """A parameter of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        """Scalar loss."""
        return (self.w.abs() ** 4).sum() * x.mean()


@pytest.mark.parametrize(
    ("module", "dtype"), [(nn.Linear(2, 1).double(), "float64"), (Complex(), "complex64")]
)
def test_weights_that_cannot_be_displaced_are_refused_by_their_dtype(
    module: nn.Module, dtype: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"trainable parameters in torch.{dtype}; measure"):
        ds_hessian.attach(module, config=QUIET)
