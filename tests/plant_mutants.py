"""Which planted mistakes do the tests find? Each line of mutants.txt (file | old | new) is planted
in a copy of the package; then some test of the area must fail.

    python tests/plant_mutants.py                       all (an hour)
    python tests/plant_mutants.py 3 17 20-29            these numbers
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
LIMIT = 150  # seconds: a mistake may also make the engine hang
PLAYER = ("blocks", "control_plane", "llm")
AREAS = {  # the test files that have to find a mistake in this file
    "scheduler.py": PLAYER,
    "block_manager.py": PLAYER,
    "engine.py": PLAYER,
    "output_processor.py": ("output", "control_plane"),
    "input_processor.py": ("values", "control_plane"),
    "sampling_params.py": ("values",),
    "config.py": ("values",),
    "sampler.py": ("sampler",),
    "llm.py": ("llm",),
    "input_batch.py": ("sampler", "same_tokens"),
    "kernels/staging.py": ("simulated_cuda",),
    "kernels/cuda_graph.py": ("simulated_cuda",),
    "kernels/kv_cache.py": ("simulated_cuda",),
    **dict.fromkeys(
        (f"chapters/hybrid_kv/{name}.py" for name in ("groups", "managers", "parts")),
        ("hybrid_kv",),
    ),
}


def run(folder: Path, names: tuple[str, ...]) -> str:
    """What became of the tests, in a fork: torch is imported once for all."""
    begin, child = time.monotonic(), os.fork()
    if child == 0:
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        import pytest

        options = ["-x", "-q", "-n0", "-pno:cacheprovider", "-c/dev/null", "--rootdir=."]
        os._exit(pytest.main([*options, *(f"tests/test_{name}.py" for name in names)]))
    while time.monotonic() - begin < LIMIT:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return {0: "LIVES", 256: "killed"}.get(status, f"killed ({status})")
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return "killed (hangs)"


def main() -> None:
    lines = [*enumerate((HERE / "mutants.txt").read_text().splitlines())]
    pairs = [each.split("-") for each in sys.argv[1:] or [f"0-{len(lines)}"]]
    asked = {i for pair in pairs for i in range(int(pair[0]), int(pair[-1]) + 1)}
    import hypothesis  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401

    sys.path[:] = [each for each in sys.path if each not in ("", str(HERE.parent))]
    sys.dont_write_bytecode = True
    folder = Path(tempfile.mkdtemp())
    shutil.copytree(HERE.parent / "nanoserve", folder / "nanoserve")
    shutil.copytree(HERE, folder / "tests")
    outcomes: list[str] = []
    assert run(folder, (*PLAYER, "sampler")) == "LIVES", "a test fails without a mistake"
    for number, line in [each for each in lines if each[0] in asked]:
        fields = [each.replace("\\n", "\n").replace("\\|", "|") for each in f"{line} ".split(" | ")]
        name, old, new = (*fields[:2], fields[2].rstrip(" "))
        path, begin = folder / "nanoserve" / name, time.monotonic()
        source = path.read_text()
        assert source.count(old) == 1, f"{name}: {old!r} is there {source.count(old)} times"
        path.write_text(source.replace(old, new))
        outcomes.append(run(folder, AREAS.get(name, ("same_tokens", "simulated_cuda"))))
        path.write_text(source)
        took = time.monotonic() - begin
        print(f"{number:3} {outcomes[-1]:8} {took:5.1f} s  {line[:90]}", flush=True)
    print(f"{sum(each.startswith('killed') for each in outcomes)} of {len(outcomes)} killed")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
