"""python -m nanoserve.bench: the same as python bench.py."""

from nanoserve.bench.cli import main

main()
