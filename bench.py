"""python bench.py: how fast is nanoserve, beside its peers and beside the limits of this machine?

The same as `nanoserve bench`. The command line is nanoserve/bench/cli.py; `python bench.py --help`
lists its options.
"""

import sys

from nanoserve.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
