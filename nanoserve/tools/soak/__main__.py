"""python -m nanoserve.tools.soak: see cli.py."""

import sys

from nanoserve.tools.soak.cli import main

if __name__ == "__main__":  # the worker processes import this module, too
    sys.exit(main(sys.argv[1:]))
