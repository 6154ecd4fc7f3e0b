"""Run a script of timm's with routed models in the registry: `python -m mmod.registry.timm SCRIPT ARGS...`."""

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run the script named first on the command line as if it had been started itself."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit("usage: python -m mmod.registry.timm SCRIPT ARGS...\n\nSCRIPT is validate.py or the like of timm.")
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
