"""The same coordinates in two layouts: how a run is continued on other ranks."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from ds_hessian.records.fields import Json
from ds_hessian.vectors import Box, Fragment, Layout

Index = slice | Tensor


def overlaps(mine: Layout, theirs: Layout) -> list[tuple[Index, Index]]:
    """Return pairs of indices, into a vector of either layout, of the same coordinates."""
    by_name = defaultdict(list)
    for fragment, span in theirs:
        by_name[fragment.name].append((fragment, span.start))
    pairs: list[tuple[Index, Index]] = []
    for fragment, part in mine:
        for other, offset in by_name[fragment.name]:
            if fragment.box is None and other.box is None:
                start = max(fragment.start, other.start)
                stop = min(fragment.start + fragment.numel, other.start + other.numel)
                if start < stop:
                    a, b = part.start - fragment.start, offset - other.start
                    pairs.append((slice(a + start, a + stop), slice(b + start, b + stop)))
                continue
            _, i, j = np.intersect1d(
                fragment.index().numpy(), other.index().numpy(), True, return_indices=True
            )
            if len(i):
                pairs.append((torch.from_numpy(i + part.start), torch.from_numpy(j + offset)))
    return pairs


def to_json(layout: Layout) -> list[Json]:
    """Return the fragments of a layout as JSON values."""
    return [dict(json.loads(json.dumps(dataclasses.asdict(f)))) for f in layout.fragments]


def from_json(entries: list[Json]) -> Layout:
    """Return the layout of these fragments."""
    return Layout([_fragment(entry) for entry in entries])


def _fragment(entry: Json) -> Fragment:
    box = entry["box"] and Box(tuple(entry["box"]["offset"]), tuple(entry["box"]["shape"]))
    return Fragment(**{**entry, "shape": torch.Size(entry["shape"]), "box": box})
