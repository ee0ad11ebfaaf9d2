"""python bench.py: how fast is nanoserve? The same as `nanoserve bench`; --help lists its options.

Without arguments, every suite runs at a small size. The code is in nanoserve/bench/.
"""

import sys

from nanoserve.bench.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
