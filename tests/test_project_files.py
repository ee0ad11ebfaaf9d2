"""Files that GitHub and package indexes read: they parse, and agree with setup.cfg and .ci/run."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
from datetime import date
from pathlib import Path
from typing import Any

import yaml

import nanoserve

ROOT = Path(__file__).parent.parent
CHANGES = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}  # keepachangelog.com


def read_setup() -> configparser.ConfigParser:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    return setup


def read_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text("utf-8"))


def requirement(name: str) -> str:
    """The line of setup.cfg's install_requires that begins with this name."""
    lines = read_setup()["options"]["install_requires"].split("\n")
    return next(line.strip() for line in lines if line.strip().startswith(name))


def test_one_version_everywhere() -> None:
    """In setup.cfg, the package, CITATION.cff, and the newest release of the changelog."""
    version = read_setup()["metadata"]["version"]
    citation = read_yaml("CITATION.cff")
    assert nanoserve.__version__ == version == citation["version"]
    releases = re.findall(r"^## \[(\d[^]]*)\] - (\S+)$", changelog(), re.MULTILINE)
    assert releases[0] == (version, citation["date-released"].isoformat())


def changelog() -> str:
    return (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_the_changelog_keeps_its_form() -> None:
    """An unreleased part, then releases, newest first; in each, lists under the agreed headings."""
    headings = [line for line in changelog().splitlines() if line.startswith("#")]
    assert headings[:2] == ["# Changelog", "## [Unreleased]"]
    dates = []
    for heading in headings[2:]:
        if heading.startswith("### "):
            assert heading[4:] in CHANGES
        else:
            released = re.fullmatch(r"## \[\d+\.\d+\.\d+\] - (\d{4}-\d{2}-\d{2})", heading)
            assert released, heading
            dates.append(date.fromisoformat(released[1]))
    assert dates == sorted(dates, reverse=True)
    for part in re.split(r"^### .*$", changelog(), flags=re.MULTILINE)[1:]:
        assert part.lstrip().startswith("- ")


def test_the_citation_has_what_github_asks_for() -> None:
    """The required keys of schema 1.2.0, and a licence that setup.cfg agrees with."""
    citation = read_yaml("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert citation["authors"] == [{"name": read_setup()["metadata"]["author"]}]
    assert citation["license"] == read_setup()["metadata"]["license"]
    assert citation["title"].startswith(read_setup()["metadata"]["name"])


def test_the_workflow_runs_what_a_fresh_machine_must_pass() -> None:
    """It calls .ci/run with the CPU build of PyTorch, on Pythons that the package accepts."""
    [job] = read_yaml(".github/workflows/ci.yml")["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "python3 -m venv" in (ROOT / ".ci" / "run").read_text("utf-8")
    assert job["env"]["PIP_EXTRA_INDEX_URL"] == "https://download.pytorch.org/whl/cpu"
    assert job["timeout-minutes"] <= 90
    versions = [tuple(map(int, v.split("."))) for v in job["strategy"]["matrix"]["python-version"]]
    lowest = re.fullmatch(r">=(\d+)\.(\d+)", read_setup()["options"]["python_requires"])
    assert lowest and min(versions) == tuple(map(int, lowest.groups()))


def test_the_devcontainer_installs_the_package() -> None:
    """The CPU build in the package's own range first, then the package with extras that exist."""
    text = (ROOT / ".devcontainer" / "devcontainer.json").read_text("utf-8")
    container = json.loads(text)
    torch, package = (shlex.split(c) for c in container["postCreateCommand"].split(" && "))
    assert torch[:3] == ["pip", "install", requirement("torch")]
    assert torch[3:] == ["--index-url", "https://download.pytorch.org/whl/cpu"]
    assert package[:3] == ["pip", "install", "-e"]
    extras = re.fullmatch(r"\.\[([\w,]+)\]", package[3])
    assert extras and set(extras[1].split(",")) <= set(read_setup()["options.extras_require"])
    for file in container["customizations"]["codespaces"]["openFiles"]:
        assert (ROOT / file).is_file()
