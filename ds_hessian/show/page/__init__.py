"""A run's results as one HTML file, which needs no network."""

from ds_hessian.show.page.run import Run
from ds_hessian.show.page.write import write_page

__all__ = ["Run", "write_page"]
