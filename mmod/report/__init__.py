"""Reports: the results of studies, audits and runs as one page that opens in a browser without a network."""

from typing import TYPE_CHECKING

from mmod.lazy import lazy_names

# The one list of this package's names, see lazy_names.
# ruff: noqa: F401
if TYPE_CHECKING:
    from mmod.report.page import write_report

__getattr__, __dir__, __all__ = lazy_names(__name__)
