"""The picture of each class of records, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_hessian.errors import ConfigError, UnsupportedError
from ds_hessian.records.alignment import HessianAlignment
from ds_hessian.records.analyses import (
    HessianBlockCoupling,
    HessianEigenpairs,
    HessianInfluence,
    HessianOffBlockShare,
    HessianSharpness,
    HessianSolution,
    HessianTrace,
)
from ds_hessian.records.base import Record
from ds_hessian.records.block_spectra import HessianBlockSpectra
from ds_hessian.records.comparison import Comparison
from ds_hessian.records.curvatures import HessianCurvatures
from ds_hessian.records.decomposition import HessianDecomposition
from ds_hessian.records.kronecker import HessianKronecker
from ds_hessian.records.spectrum import HessianSpectrum
from ds_hessian.records.sweep import DisplacementSweep
from ds_hessian.records.verdict import SelfTest
from ds_hessian.show.alignment_picture import alignment_picture
from ds_hessian.show.block_pictures import (
    block_coupling_picture,
    eigenpairs_picture,
    trace_picture,
)
from ds_hessian.show.block_spectra_picture import block_spectra_picture
from ds_hessian.show.comparison_picture import comparison_picture
from ds_hessian.show.decomposition_picture import decomposition_picture
from ds_hessian.show.kronecker_picture import kronecker_picture
from ds_hessian.show.spectrum_picture import spectrum_picture
from ds_hessian.show.sweep_picture import sweep_picture
from ds_hessian.show.system_pictures import (
    influence_picture,
    self_test_picture,
    solution_picture,
)


def picture(record: Record, path: Path) -> Path:
    """Draw a record; the format follows from the name. Returns the path.

    Raises:
        ConfigError: the path is that of a folder.
        ImportError: matplotlib is not installed.
        UnsupportedError: there is no picture of this class of records; the message says why.
    """
    draw = PICTURES.get(type(record))
    if draw is None:
        reason = WITHOUT.get(type(record), "none is known, add one to PICTURES")
        raise UnsupportedError(f"{type(record).__name__} has no picture: {reason}")
    if path.is_dir():
        name = f"{record.kind}.png"
        raise ConfigError(f"{path} is a folder: give a name in it, such as {path / name}")
    return draw(record, path)


PICTURES: dict[type[Record], Callable[[Any, Path], Path]] = {
    HessianSpectrum: spectrum_picture,
    HessianEigenpairs: eigenpairs_picture,
    HessianTrace: trace_picture,
    HessianBlockCoupling: block_coupling_picture,
    HessianBlockSpectra: block_spectra_picture,
    HessianKronecker: kronecker_picture,
    HessianSolution: solution_picture,
    HessianInfluence: influence_picture,
    HessianAlignment: alignment_picture,
    DisplacementSweep: sweep_picture,
    Comparison: comparison_picture,
    HessianDecomposition: decomposition_picture,
    SelfTest: self_test_picture,
}
"""The function that draws each class of records."""
FEW = "at one step it is a few numbers, which table() prints; `ds-hessian page` draws them over "
WITHOUT: dict[type[Record], str] = {
    HessianSharpness: FEW + "training",
    HessianOffBlockShare: FEW + "training",
    HessianCurvatures: FEW + "training",
}
"""Why a class of records has no picture."""
