"""A journal of products, with which any analysis survives the end of its job.

A Krylov method is a function of the products that it receives. So the state of any of them is the
list of products so far: each is saved when it is finished, and an analysis that is run again reads
them in the same order, without a gradient, until it reaches the first one that is missing. That
takes no code in the methods, and gives the same bits on the same layout.

On another layout the method's own rounding differs, and so, more and more, do its vectors. The
requested vector is therefore compared with the product's own, by their inner products with
`SKETCHES` random vectors: an estimate of the distance, exactly 0 on the same layout. While it is
within the product's own error, the kept product is used and the distance added to its error; from
the first one beyond it, products are made anew.

Cost of a product: 4 n_local bytes written by each rank and kept until the end, the random vectors,
and `SKETCHES` + 4 small all-reduces.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor

from ds_hessian import ops
from ds_hessian.errors import ConfigError
from ds_hessian.operators import Product, Watched
from ds_hessian.records.fields import Json
from ds_hessian.resume.run import SavedRun
from ds_hessian.vectors import Layout, VectorSpace, random_vector

logger = logging.getLogger(__name__)

SKETCHES = 4
"""The estimated distance is below a tenth of the true one in less than 1 of 5000 cases (the chance
of a chi-squared variable of four degrees of freedom below 0.04)."""

SEED = -1
"""Seed of the random vectors; no probe has it."""

NEAREST, FARTHEST = 1e-6, 1e-2
"""Bounds on the relative distance up to which two vectors are taken for the same, whatever the
product's error: rounding in fp32, and what no rounding makes."""

FIGURES = tuple(field.name for field in fields(Product) if field.name != "vector")


class Journal(SavedRun):
    """The Hessian of a measurement, as an operator that keeps its products in a folder.

    Attributes:
        replayed: Products that were taken from the folder.

    Collective: also `matvec`.
    """

    def __init__(self, folder: Path, layout: Layout, space: VectorSpace) -> None:
        super().__init__(folder, layout, space)
        self._entries: list[Json] = list((self._found or {"entries": []})["entries"])
        self._waiting = len(self._entries)  # entries to be replayed, from `replayed` on
        self._starts: dict[str, Tensor] = {}
        self.replayed = 0

    def starts(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Return the vectors that the measurement began with: those of the state, where there is
        one.

        What an analysis makes of vectors that only its process has could not be made again without
        them. They are kept with the products; to be called before the first `matvec`.

        Args:
            vectors: The vectors with which it would begin now, `(n_local,)` each.
        """
        if self._found is None:
            kept = list(vectors)
        else:
            count = int(self._found.get("starts", 0))
            kept = [self._store.vector(f"start{i}").to(self.space.device) for i in range(count)]
        self._starts = {f"start{i}": v for i, v in enumerate(kept)}
        return kept

    def matvec(self, v: Tensor) -> Product:
        """Return the product from the folder if it is kept there, else make and keep it.

        Raises:
            ConfigError: the state begins with a product of another vector.
            MeasurementError: some rank could not read or write.
        """
        sketch = self._sketch(v)
        if self.replayed < self._waiting:
            distance = self._distance(self._entries[self.replayed], sketch)
            if distance is not None:
                return self._replay(distance)
            self._drop_the_rest()
        product = self.operator.matvec(v)
        entry = {name: getattr(product, name) for name in FIGURES}
        # Numbered by all products ever made, so that none takes the name of a dropped one.
        name = f"product{self.operator.cost.products}"
        vectors: dict[str, Tensor | None] = {entry["vector"]: None for entry in self._entries}
        self._entries.append({**entry, "vector": name, "sketch": sketch})
        figures = {"entries": self._entries, "starts": len(self._starts)}
        self._keep(figures, {**self._starts, **vectors, name: product.vector})
        return product

    def contradicted(self) -> None:
        """Tell the operator, whose state knows it of all but the last of the replayed products."""
        if self.replayed >= self._waiting and isinstance(self.operator, Watched):
            self.operator.contradicted()

    def _sketch(self, v: Tensor) -> list[float]:
        """Return the inner products with the random vectors, and |v|."""
        owned = self.space.n_owned
        partials = [ops.dots([(v, v)], owned)]
        for i in range(SKETCHES):
            r = random_vector(self.layout, self.space, SEED, i)
            partials.append(ops.dots([(r, v)], owned))
        square, *dots = self.space.reduce(torch.cat(partials)).tolist()
        return [*dots, math.sqrt(square)]

    def _distance(self, entry: Json, sketch: list[float]) -> float | None:
        """Return the estimated relative distance to the vector of an entry; None if it is too
        large.
        """
        there = entry["sketch"]
        square = sum((a - b) ** 2 for a, b in zip(there[:-1], sketch[:-1], strict=True))
        distance = math.sqrt(self.space.n * square / SKETCHES) / there[-1]
        limit = min(max(entry["error"] or 0.0, NEAREST), FARTHEST)
        return distance if distance <= limit else None

    def _replay(self, distance: float) -> Product:
        entry = self._entries[self.replayed]
        vector = self._store.vector(entry["vector"]).to(self.space.device)
        self.replayed += 1
        product = Product(vector=vector, **{name: entry[name] for name in FIGURES})
        if distance == 0:
            return product
        return replace(product, error=math.hypot(product.error or 0.0, distance))

    def _drop_the_rest(self) -> None:
        if self.replayed == 0:
            raise ConfigError(
                "the state to resume from is of another measurement: its first product is of "
                "another vector; pass the same vectors (start, b, preconditioner), or remove the "
                "folder to begin anew"
            )
        if self.space.rank == 0:
            logger.warning(
                "of the %d products to resume from, the first %d are of this run's vectors, up to "
                "rounding; the others are made anew",
                self._waiting,
                self.replayed,
            )
        del self._entries[self.replayed :]
        self._waiting = self.replayed
