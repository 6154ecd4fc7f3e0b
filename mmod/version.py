"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("mmod")
except PackageNotFoundError:
    # A clone that was never installed has no metadata.
    __version__ = "0+not.installed"
