"""Products of a net that stops gradients, on the ranks of an engine."""

from __future__ import annotations

from typing import Any

from tests.backends.jobs import make_engine


def product(way: str, stage: int) -> Any:
    """v, its product and the estimated error, by name of the parameters."""
    from tests.backends.test_constants import WAYS, Net, data

    settings = {"progress": False, "plot": False}
    engine = make_engine(Net(WAYS[way]), zero={"stage": stage}, hessian=settings)
    hessian = engine.hessian.use(data())
    v = hessian.random_vector(seed=2)
    found = hessian.matvec(v)
    vectors = hessian.gather(v), hessian.gather(found.vector)
    engine.destroy()
    return (*vectors, found.error)
