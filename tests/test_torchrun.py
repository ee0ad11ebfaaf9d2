"""The same script on ranks that torchrun started: on one machine, and on two.

The two machines are network namespaces. Each has a loopback and a network interface of its own; a
virtual cable joins the two interfaces.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from oracle import assert_same_greedy

from nanoserve import LLM
from nanoserve.executor import UniprocExecutor

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    "OMP_NUM_THREADS": "1",
}
PROMPT, NUM_TOKENS = [7, 8, 9, 10, 11], 10

SCRIPT = """
import gc, os, sys
from nanoserve import LLM, SamplingParams
folder, what = sys.argv[1:]
# One write a line: the processes share a pipe, and print may write each word by itself.
sys.stdout.write(f"process {os.environ['RANK']} {os.getpid()}\\n")
sys.stdout.flush()
options = dict(tensor_parallel_size=2, num_kv_blocks=32, block_size=4, device="cpu")
if what == "stages":
    options["pipeline_parallel_size"] = options.pop("tensor_parallel_size")
greedy = SamplingParams(temperature=0, max_tokens=10)

def generate(llm):
    [output] = llm.generate([[7, 8, 9, 10, 11]], greedy, use_tqdm=False)
    print("tokens", *output.outputs[0].token_ids, flush=True)

llm = LLM(folder, **options)
assert os.environ["RANK"] == "0", "the constructor does not return on other ranks"
generate(llm)
if what == "three engines":  # one is closed, one is garbage, one is open at the end
    try:
        LLM(folder, **options)
    except ValueError as error:
        print("refused:", error)
    llm.close()
    llm = LLM(folder, **options)
    generate(llm)
    del llm
    gc.collect()
    llm = LLM(folder, **options)
    generate(llm)
    raise KeyError("the user's own mistake")
if what == "freeze":
    import signal
    os.kill(llm.engine.executor.ranks.pids[1], signal.SIGSTOP)
    generate(llm)
    llm.close()
while what == "for ever":
    llm.generate([[5, 6]], SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
"""


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("qwen3", head_dim=32)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("script") / "script.py"
    file.write_text(SCRIPT)
    return file


def torchrun(
    *arguments: str, world_size: int = 2, prefix: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, *TORCHRUN, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        cwd=ROOT,
    )


def tokens_in(output: str) -> list[list[int]]:
    return [[int(x) for x in line.split()] for line in re.findall(r"(?m)^tokens (.*)", output)]


@pytest.mark.slow
def test_the_example_on_two_ranks() -> None:
    """The answers are those of one rank, and both processes exit with 0."""
    arguments = ["example.py", "--max-tokens", "12", "--tensor-parallel-size", "2"]
    process = torchrun("--nproc-per-node=2", *arguments)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert re.findall("A: (.*)", output)[0].startswith("17 + 25 = 42")
    assert len(re.findall("Q: ", output)) == 4
    assert "tensor parallel on 2 ranks over gloo" in errors


@pytest.mark.slow
def test_one_engine_after_the_other_and_an_exception(checkpoint: Path, script: Path) -> None:
    """Two engines at a time are refused. An exception of the user's script ends all ranks."""
    process = torchrun("--nproc-per-node=2", str(script), str(checkpoint), "three engines")
    output, errors = process.communicate(timeout=120)
    assert "refused: under torchrun, one engine at a time" in output
    first, *others = tokens_in(output)
    assert others == [first, first]
    assert_same_greedy(checkpoint, PROMPT, first, NUM_TOKENS)
    assert process.returncode != 0
    assert 'KeyError: "the user\'s own mistake"' in errors


@pytest.mark.slow
def test_pipeline_stages(checkpoint: Path, script: Path) -> None:
    process = torchrun("--nproc-per-node=2", str(script), str(checkpoint), "stages")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    [tokens] = tokens_in(output)
    assert_same_greedy(checkpoint, PROMPT, tokens, NUM_TOKENS)
    assert "2 pipeline stages" in errors


def test_another_number_of_ranks_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun tells a process its rank by these environment variables."""
    told = {"TORCHELASTIC_RUN_ID": "x", "RANK": 0, "WORLD_SIZE": 3, "LOCAL_RANK": 0}
    for name, value in {
        **told,
        "LOCAL_WORLD_SIZE": 3,
        "MASTER_ADDR": "x",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ValueError, match="tensor_parallel_size is 2, but torchrun started 3"):
        LLM(checkpoint, tensor_parallel_size=2, device="cpu")
    with LLM(checkpoint, num_kv_blocks=32, device="cpu") as llm:  # each process has its own engine
        assert isinstance(llm.engine.executor, UniprocExecutor)


def test_what_torchrun_left_over_is_named(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"TORCHELASTIC_RUN_ID is set, .* but RANK, LOCAL_RANK"):
        LLM(checkpoint, tensor_parallel_size=2, device="cpu")


def test_a_killed_rank_ends_the_others(checkpoint: Path, script: Path) -> None:
    """Within seconds, with a failing exit status, and torchrun names the killed process."""
    process = torchrun("--nproc-per-node=2", str(script), str(checkpoint), "for ever")
    assert process.stdout is not None
    pids: dict[str, int] = {}
    for line in process.stdout:
        if match := re.match(r"process (\d) (\d+)", line):
            pids[match[1]] = int(match[2])
        if line.startswith("tokens"):
            break
    os.kill(pids["1"], signal.SIGKILL)
    start = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - start < 30
    assert process.returncode != 0
    assert re.search(rf"exitcode: -9\) local_rank: 1 \(pid: {pids['1']}\)", errors), errors
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_frozen_rank_is_logged(checkpoint: Path, script: Path) -> None:
    """The log names the process, and the step goes on when the process does."""
    process = torchrun("--nproc-per-node=2", str(script), str(checkpoint), "freeze")
    assert process.stdout is not None
    assert process.stderr is not None
    pids = dict(re.match(r"process (\d) (\d+)", process.stdout.readline()).groups() for _ in "01")
    report = rf"rank 0 has waited 5 s for .*: rank 1 \(process {pids['1']}\) is stopped"
    errors = ""
    for line in process.stderr:
        errors += line
        if re.search(report, line):
            os.kill(int(pids["1"]), signal.SIGCONT)
            break
    output, more_errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors + more_errors
    first, second = tokens_in(output)
    assert first == second


# -- two machines --


def run_ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them, 10.83.0.1 and 10.83.0.2."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command `ip` (iproute2)")
    names = [f"ns{os.getpid()}-{number}" for number in range(2)]
    interfaces = [f"ve{os.getpid()}-{number}" for number in range(2)]
    try:
        try:
            for name in names:
                run_ip(f"netns add {name}")
            run_ip(f"link add {interfaces[0]} type veth peer name {interfaces[1]}")
            for number, (name, interface) in enumerate(zip(names, interfaces, strict=True), 1):
                run_ip(f"link set {interface} netns {name}")
                run_ip(f"-n {name} addr add 10.83.0.{number}/24 dev {interface}")
                run_ip(f"-n {name} link set {interface} up")
                run_ip(f"-n {name} link set lo up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine does not allow network namespaces: {error.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def bytes_sent(host: str) -> int:
    """The bytes that the network interface has sent; the loopback is not counted."""
    command = ["ip", "netns", "exec", host, "cat", "/proc/net/dev"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return sum(int(line.split()[9]) for line in text.splitlines() if line.strip().startswith("ve"))


def test_two_machines(hosts: list[str], checkpoint: Path, script: Path) -> None:
    """One rank on each machine. The ranks choose the network interface by themselves, both send
    data over it, and both exit with 0."""
    processes = [
        torchrun(
            "--nnodes=2",
            f"--node-rank={rank}",
            "--nproc-per-node=1",
            "--master-addr=10.83.0.1",
            "--master-port=29500",  # the namespace has no other process
            str(script),
            str(checkpoint),
            "once",
            prefix=("ip", "netns", "exec", host),
        )
        for rank, host in enumerate(hosts)
    ]
    outputs = [process.communicate(timeout=180) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    [tokens] = tokens_in(outputs[0][0])
    assert_same_greedy(checkpoint, PROMPT, tokens, NUM_TOKENS)
    assert tokens_in(outputs[1][0]) == []
    num_sums = NUM_TOKENS * 5  # ten steps; a sum of at least 64 numbers
    assert all(bytes_sent(host) > num_sums * 64 * 4 for host in hosts)
