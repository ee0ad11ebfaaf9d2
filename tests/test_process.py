"""An LLM belongs to one process: forked children, pickling, copies."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from nanoserve import LLM, BeamSearchParams, EngineArgs, SamplingParams
from nanoserve.distributed.process import in_this_process, process_state

GREEDY = SamplingParams(temperature=0, max_tokens=4)
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")


def in_child(function: Callable[[], Any]) -> Any:
    """What function() returns in a forked child. A child that hangs is ended by a signal."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            os.write(write, json.dumps(function()).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        data = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return json.loads(data)


def errors_of(calls: dict[str, Callable[[], object]]) -> dict[str, str]:
    """The message of the RuntimeError that each call raises; "" if it raises none."""
    messages = dict.fromkeys(calls, "")
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            messages[name] = str(error)
    return messages


@needs_fork
def test_a_forked_child_is_refused_at_once(demo_llm: LLM) -> None:
    """In every call that would run the model or change the engine; close() alone does nothing. The
    parent goes on, in the middle of what it was doing."""
    stream = demo_llm.stream("Once upon a time", GREEDY)
    text = next(stream).outputs[0].text
    demo_llm.add_request("parents", "One day", GREEDY)
    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: demo_llm.generate("hi", GREEDY, use_tqdm=False),
        "chat": lambda: demo_llm.chat([{"role": "user", "content": "hi"}], GREEDY),
        "stream": lambda: list(demo_llm.stream("hi", GREEDY)),
        "a stream of the parent": lambda: list(stream),
        "beam_search": lambda: demo_llm.beam_search("hi", BeamSearchParams(2, 4)),
        "enqueue": lambda: demo_llm.enqueue("hi", GREEDY),
        "add_request": lambda: demo_llm.add_request("a", "hi", GREEDY),
        "step": demo_llm.step,
        "abort_request": lambda: demo_llm.abort_request("parents"),
        "abort_request of none": lambda: demo_llm.abort_request("nobody"),
        "reset_prefix_cache": demo_llm.reset_prefix_cache,
        "close": demo_llm.close,
    }
    messages = in_child(lambda: errors_of(calls))
    assert messages.pop("close") == ""
    for name, message in messages.items():
        assert f"belongs to process {os.getpid()}" in message, name
        assert "start method 'spawn'" in message, name
    text += "".join(output.outputs[0].text for output in stream)
    assert text == demo_llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].outputs[0].text
    assert {output.request_id for output in demo_llm.step()} == {"parents"}


in_pool: dict[str, LLM] = {}  # what forked workers find


def generate_in_worker(prompt: str) -> str:
    return errors_of({"": lambda: in_pool["llm"].generate(prompt, GREEDY)})[""]


@needs_fork
def test_a_pool_of_forked_workers_is_refused(demo_llm: LLM) -> None:
    in_pool["llm"] = demo_llm
    with multiprocessing.get_context("fork").Pool(1) as pool:
        [message] = pool.map_async(generate_in_worker, ["hi"]).get(60)
    assert "start method 'spawn'" in message
    assert in_pool.pop("llm").generate("hi", GREEDY, use_tqdm=False)


SCRIPT = """
import multiprocessing, os, sys
from nanoserve import LLM, SamplingParams

def build(number):
    import torch
    if number:
        torch.set_num_threads(number)
    try:
        with LLM(num_kv_blocks=32) as llm:
            [output] = llm.generate("Once upon a time", params, use_tqdm=False)
        return output.outputs[0].text
    except RuntimeError as error:
        return str(error)

params = SamplingParams(temperature=0, max_tokens=6)
fork = multiprocessing.get_context("fork")
with fork.Pool(2) as before:
    for text in before.map_async(build, [0, 0]).get(100):
        print(text)
os.environ["OMP_NUM_THREADS"] = "2"
import torch
torch.set_num_threads(2)
print(build(0))
with fork.Pool(1) as after:
    for number in (2, 1):
        print(*after.map_async(build, [number]).get(100))
print(build(0), flush=True)
"""


@needs_fork
@pytest.mark.slow
def test_an_llm_built_in_a_forked_child() -> None:
    """It works in a child that was forked before its parent built one. It works later, too, if
    torch uses one thread in the child; with more, it would wait for ever, and is refused."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second, own, refused, one_thread, again = done.stdout.splitlines()
    assert first == second == own == one_thread == again
    assert "has built an LLM and then forked this process" in refused
    assert "torch.set_num_threads(1)" in refused


@pytest.mark.parametrize("what", ["LLM", "LLMEngine"])
def test_no_pickles_and_no_copies(what: str, demo_llm: LLM) -> None:
    """The error says what to send instead."""
    target = demo_llm if what == "LLM" else demo_llm.engine
    for call in (pickle.dumps, copy.copy, copy.deepcopy, lambda each: pickle.dumps([each], 2)):
        with pytest.raises(TypeError, match=rf"{what} cannot be pickled or copied.*EngineArgs"):
            call(target)


def test_what_can_be_pickled(demo_llm: LLM) -> None:
    """What the error recommends."""
    params = SamplingParams(
        temperature=0, max_tokens=4, logprobs=2, stop=["x"], logit_bias={5: 1.0}, bad_words=["y"]
    )
    [output] = demo_llm.generate("Once upon a time", params, use_tqdm=False)
    for value in (params, EngineArgs(num_gpu_blocks_override=32), output, output.outputs[0]):
        again = pickle.loads(pickle.dumps(value))
        assert repr(again) == repr(value)
        assert repr(copy.deepcopy(value)) == repr(value)


@needs_fork
def test_what_ends_an_engine_does_nothing_in_a_child() -> None:
    """weakref.finalize and atexit run in a forked child, too."""
    calls: list[int] = []
    end = in_this_process(calls.append)

    def call() -> list[int]:
        end(1)
        return calls

    assert in_child(call) == []
    assert call() == [1]


@needs_proc
def test_the_state_of_a_process() -> None:
    """A name with brackets and blanks is no hindrance."""
    code = "open('/proc/self/comm', 'w').write(') T ('); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert process_state(process.pid) == "T"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_state(process.pid) == "Z"
    assert process_state(process.pid) is None
