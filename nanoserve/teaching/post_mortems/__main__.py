"""Tell the stories: each with the right engine, with the bug, and with its second act."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from nanoserve.teaching.post_mortems import NAMES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m nanoserve.teaching.post_mortems")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--pictures", type=Path, help="write the pictures to this folder")
    args = parser.parse_args()
    if unknown := set(args.names) - set(NAMES):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    for name in args.names or NAMES:
        module = import_module(f"{__package__}.{name}")
        if args.pictures:
            module.picture().save(args.pictures / f"{name}.svg")
            continue
        print(f"\n{name}")
        acts = {"right": {}, "broken": module.BROKEN, "second act": getattr(module, "SECOND", None)}
        for act, parts in acts.items():
            for key, value in (module.story(**parts) if parts is not None else {}).items():
                print(f"{act:<12}{key}: {value}")
        if second := acts["second act"]:
            try:
                module.test(**second)
            except AssertionError as error:
                print(f"second act, the test: {error}")
        print(f"\n{module.__doc__}")


if __name__ == "__main__":
    main()
