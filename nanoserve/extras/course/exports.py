"""How does a grading service run the kit?

    $ nanoserve course export gradescope autograder.zip --labs 1,2,3 --hidden private/

    autograder.zip
      setup.sh             once, when the image is built: pip install of the pinned versions
      run_autograder       for each submission: `nanoserve course grade`, then results.json
      requirements.txt
      nanoserve/           the engine with its solutions: it stays on the service
      hidden/              the lecturer's own checks

Gradescope unpacks it to /autograder/source, puts what a student has uploaded into
/autograder/submission, and reads /autograder/results/results.json. A student uploads the folder
nanoserve/ of their tree, or only the files with holes, in their folders.

Left out: nbgrader and Otter, which grade cells of notebooks. These labs are files.

Gradescope: https://gradescope-autograders.readthedocs.io
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from nanoserve.extras.course.grader import ROOT
from nanoserve.extras.course.make import PACKAGES, SUFFIXES, TORCH_PACKAGES, pinned
from nanoserve.extras.course.spec import Lab

SETUP = """#!/usr/bin/env bash
# Once, when the image is built.
set -euo pipefail
command -v python3 > /dev/null || { apt-get update && apt-get install -y python3 python3-pip; }
python3 -m pip install --no-cache-dir -r "$(dirname "$0")/requirements.txt"
"""
RUN = """#!/usr/bin/env bash
# For each submission. AUTOGRADER is another folder than /autograder in a trial run only.
set -uo pipefail
base="${{AUTOGRADER:-/autograder}}"
cd "$base/source"
mkdir -p "$base/results"
PYTHONPATH="$base/source" python3 -m nanoserve course grade "$base/submission" \\
    --labs {labs}{hidden} --json "$base/results/results.json"
if [ ! -s "$base/results/results.json" ]; then
    printf '{{"score": 0, "output": "%s"}}\\n' \\
        "Nothing was graded: upload the folder nanoserve/ of your tree." \\
        > "$base/results/results.json"
fi
"""


def export_gradescope(file: Path, labs: list[Lab], hidden: dict[str, str]) -> None:
    """Write the zip. hidden: file name -> source, of the lecturer's own checks. Raises ValueError
    if the file exists."""
    if file.exists():
        raise ValueError(f"{file} exists. Give a new file.")
    needs_torch = any(lab.needs_torch for lab in labs)
    packages = [*PACKAGES, *(TORCH_PACKAGES if needs_torch else ())]
    numbers = ",".join(str(lab.number) for lab in labs)
    texts = {
        "setup.sh": SETUP,
        "run_autograder": RUN.format(labs=numbers, hidden=" --hidden hidden" if hidden else ""),
        "requirements.txt": "\n".join(pinned(packages)) + "\n",
        **{f"hidden/{name}": source for name, source in hidden.items()},
    }
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            entry = zipfile.ZipInfo(name, date_time=(2020, 1, 1, 0, 0, 0))
            entry.external_attr = (0o755 if name in ("setup.sh", "run_autograder") else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, text)
        for path in sorted((ROOT / "nanoserve").rglob("*")):
            if path.is_file() and path.suffix in SUFFIXES and "__pycache__" not in path.parts:
                archive.write(path, path.relative_to(ROOT))
