"""The command `mmod` under the name `python -m mmod`, as torchrun starts it."""

from mmod.cli import main

if __name__ == "__main__":
    main()
