"""Reports: what studies and audits found, as one page that opens in a browser without a network."""

from mmod.report.page import write_report

__all__ = ["write_report"]
