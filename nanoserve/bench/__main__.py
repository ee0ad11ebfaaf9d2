"""python -m nanoserve.bench: the same as python bench.py."""

import sys

from nanoserve.bench.cli import main

sys.exit(main())
