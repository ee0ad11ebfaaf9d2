"""python -m nanoserve: the same as the command nanoserve."""

from nanoserve.entrypoints.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
