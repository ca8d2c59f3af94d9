"""Records for people: tables, pictures, the page, monitor events, progress.

All of them are functions of records.
"""

from ds_hessian.show.pictures import picture
from ds_hessian.show.tables import table

__all__ = ["picture", "table"]
