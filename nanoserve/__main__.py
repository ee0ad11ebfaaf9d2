"""python -m nanoserve doctor: what would a run here use, and does it work?"""

from __future__ import annotations

import sys


def main() -> int:
    match sys.argv[1:]:
        case ["doctor", *arguments]:
            from nanoserve.tools.doctor import main as examine  # imports torch

            return examine(arguments)
    print("usage: python -m nanoserve doctor [--model MODEL]", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
