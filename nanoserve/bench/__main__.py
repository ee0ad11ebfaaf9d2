"""python -m nanoserve.bench: the same as python bench.py."""

import sys

from nanoserve.__main__ import main

sys.exit(main(["bench", *sys.argv[1:]]))
