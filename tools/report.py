"""Show what studies and audits found on one page: `python tools/report.py FOLDER... [--output FOLDER]`.

The page is one HTML file that opens in a browser without a network, with every figure as SVG and CSV beside it. It
needs the extra `train`.
"""

import sys

from mmod.cli import run

if __name__ == "__main__":
    run("report FOLDER...", sys.argv[1:])
