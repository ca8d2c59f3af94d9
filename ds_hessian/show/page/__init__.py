"""A run's results as one HTML file, which needs no network."""

from ds_hessian.show.page.keep import PageKeeper
from ds_hessian.show.page.run import SHOWN, Run, page_of, run_in
from ds_hessian.show.page.write import write_page

__all__ = ["SHOWN", "PageKeeper", "Run", "page_of", "run_in", "write_page"]
