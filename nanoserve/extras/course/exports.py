"""How does a grading service run the kit?

    $ nanoserve course export gradescope autograder.zip --labs 1,2,3 --hidden private/ --seed 7

    autograder.zip
      setup.sh             once, when the image is built: a venv with the pinned versions
      run_autograder       for each submission: `nanoserve course grade`, then results.json
      requirements.txt
      nanoserve/           the engine with its solutions: it stays on the service
      hidden/              the lecturer's own checks

Gradescope unpacks it to /autograder/source, puts what a student has uploaded into
/autograder/submission, and reads /autograder/results/results.json. A student uploads the folder
nanoserve/ of their tree, or only the files with holes, in their folders.

Left out: nbgrader and Otter. They grade the cells of one notebook that all students get; these labs
are files, and the quiz has other numbers for each student.

Gradescope: https://gradescope-autograders.readthedocs.io
"""

from __future__ import annotations

import shlex
import zipfile
from collections.abc import Sequence
from pathlib import Path

from nanoserve.extras.course.grader import ROOT
from nanoserve.extras.course.make import PACKAGES, SUFFIXES, TORCH_PACKAGES, own_files, pinned
from nanoserve.extras.course.spec import Lab

CPU_TORCH = " --extra-index-url https://download.pytorch.org/whl/cpu"
SETUP = """#!/usr/bin/env bash
# Once, when the image is built. AUTOGRADER is another folder than /autograder in a trial run only.
set -euo pipefail
base="${{AUTOGRADER:-/autograder}}"
python3 -c "import ensurepip" || {{ apt-get update && apt-get install -y python3 python3-venv; }}
python3 -m venv "$base/venv"
"$base/venv/bin/pip" install --no-cache-dir -r "$base/source/requirements.txt"{index}
"""
RUN = """#!/usr/bin/env bash
# For each submission.
set -uo pipefail
base="${{AUTOGRADER:-/autograder}}"
cd "$base/source"
mkdir -p "$base/results"
PYTHONPATH="$base/source" "$base/venv/bin/python" -m nanoserve course grade "$base/submission" \\
    {options} --json "$base/results/results.json"
if [ ! -s "$base/results/results.json" ]; then
    printf '{{"score": 0, "output": "%s"}}\\n' \\
        "Nothing was graded. Upload {wanted} of your tree, as a zip." \\
        > "$base/results/results.json"
fi
"""


def export_gradescope(
    file: Path, labs: list[Lab], hidden: dict[str, str], term: str = "", options: Sequence[str] = ()
) -> None:
    """Write the zip. hidden: file name -> source, of the lecturer's own checks. term: of the
    variant, or "". options: more arguments of `grade`, such as ["--seed", "7"]. Raises ValueError
    if the file exists."""
    if file.exists():
        raise ValueError(f"{file} exists. Give a new file.")
    needs_torch = any(lab.needs_torch for lab in labs)
    packages = [*PACKAGES, *(TORCH_PACKAGES if needs_torch else ())]
    packages += dict.fromkeys(package for lab in labs for package in lab.packages)
    arguments = ["--labs", ",".join(str(lab.number) for lab in labs), *options]
    arguments += ["--variant", term] * bool(term) + ["--hidden", "hidden"] * bool(hidden)
    wanted = ["the folder nanoserve/"] * any(lab.tasks for lab in labs) + [*own_files(labs, term)]
    texts = {
        "setup.sh": SETUP.format(index=CPU_TORCH * needs_torch),
        "run_autograder": RUN.format(options=shlex.join(arguments), wanted=" and ".join(wanted)),
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
