"""What runs on the ranks: blocks of TinyGPT on real engines."""

from __future__ import annotations

from typing import Any

from tests.backends import jobs


def block(choice: str | list[str], zero: dict[str, Any], **config: Any) -> Any:
    """(weights, pairs, vector of the top pair, v, product with v, coefficients) of a block."""
    engine = jobs.make_engine(zero=zero, hessian={**jobs.QUIET, "parameters": choice}, **config)
    hessian = engine.hessian.use(jobs.my_batches())
    spectrum = hessian.spectrum(num_matvecs=6)
    pairs = hessian.eigenpairs(k=1, which="LA", max_matvecs=20)
    v = hessian.random_vector(seed=5)
    product = hessian.matvec(v)
    gathered = [hessian.gather(x) for x in (pairs.vectors[0], v, product.vector)]
    weights = jobs.full_weights(engine)
    engine.destroy()
    return weights, (pairs.values[0], pairs.errors[0]), gathered, product.error, spectrum
