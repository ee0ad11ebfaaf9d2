"""Bad and weird inputs, in groups: what a caller, a file or a template may bring.

A case is a name, how it must end, and an action on a Bench. "clear": an error that says what is
wrong. "served": unusual and right. "either": both are fine, for example a value that nobody uses.
test_bad_inputs.py runs them in a process with limits of time and memory.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from nanoserve import LLM, BeamSearchParams, SamplingParams
from nanoserve.config import DEMO_MODEL
from nanoserve.exceptions import brief
from nanoserve.tools.soak.engine import BadText, broken_processors
from nanoserve.tools.soak.inputs import FILES, SMALL
from nanoserve.tools.soak.judge import Probe

NAN, INF = math.nan, math.inf
HUGE = (2**31, 2**62, 2**70)
TEXT = "Once upon a time"
SURROGATE = "\ud800"
USER = {"role": "user", "content": "Hi"}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}


class Case(NamedTuple):
    """One input."""

    name: str
    expected: str  # "clear", "served" or "either"
    action: Callable[[Bench], Any]


Cases = Iterator[Case]


class Bench:
    """What cases work on: an engine of the demo model, and copies of its folder."""

    def __init__(self) -> None:
        self.llm = LLM(**SMALL)
        self.probe = Probe(self.llm)
        self._root = TemporaryDirectory(prefix="bad-inputs-")

    def generate(self, prompt: Any = TEXT, **fields: Any) -> Any:
        params = SamplingParams(**{**GREEDY, **fields})
        return self.llm.generate(prompt, params, use_tqdm=False)

    def chat(self, messages: Any, **arguments: Any) -> Any:
        return self.llm.chat(messages, SamplingParams(**GREEDY), use_tqdm=False, **arguments)

    def beams(self, prompt: Any = TEXT, **fields: Any) -> Any:
        params = BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **fields})
        return self.llm.beam_search(prompt, params)

    def build(
        self, model: Any = None, prompt: Any = TEXT, fields: Any = None, **options: Any
    ) -> Any:
        """An engine of its own, and its answer, with logprobs: NaN is no answer."""
        params = SamplingParams(**{**GREEDY, "logprobs": 0, **(fields or {})})
        with LLM(model, **{**SMALL, **options}) as llm:
            return llm.generate(prompt, params, use_tqdm=False)

    def folder(self, *names: str) -> Path:
        """A fresh copy of the demo model."""
        folder = Path(self._root.name, "model")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name in names or FILES:
            shutil.copy(DEMO_MODEL / name, folder / name)
        return folder


def cross(expected: str, action: Callable[..., Any], table: dict[str, Any]) -> Cases:
    """A case for each value of each name: action(bench, name=value)."""
    for name, values in table.items():
        for value in values:
            call = partial(call_with, action, name, value)
            yield Case(f"{name}={show(value)}", expected, call)


def call_with(action: Callable[..., Any], name: str, value: Any, bench: Bench) -> Any:
    return action(bench, **{name: value})


def each(expected: str, action: Callable[..., Any], values: Any) -> Cases:
    """A case for each value: action(bench, value)."""
    for value in values:
        yield Case(show(value), expected, partial(call_second, action, value))


def call_second(action: Callable[..., Any], value: Any, bench: Bench) -> Any:
    return action(bench, value)


def show(value: Any) -> str:
    try:
        return brief(value)
    except Exception:
        return f"a {type(value).__name__} without a repr"


# -- the parameters of a request --

FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)
PENALTY = (-2.1, 2.1, NAN, INF, "x", None, [1])
BAD_PARAMS: dict[str, Any] = {
    "n": (0, -1, 1.5, "x", None, [1], NAN, 16385, 2**70, True, BadText()),
    "temperature": (-1, NAN, INF, "x", None, [1], 1e39, True),
    "top_p": (0, -0.1, 1.1, NAN, "x", None),
    "top_k": (-2, 1.5, "x", NAN, None),
    "min_p": (-0.1, 1.1, NAN, "x", None),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": (0, -1, NAN, INF, 1e39, "x", None, [1]),
    "seed": (-2, 2**63, 1.5, "x", NAN),
    "max_tokens": (0, -1, 1.5, "x", NAN),
    "min_tokens": (-1, 1.5, "x", None, 7),
    "logprobs": (-2, 1.5, "x", 21, 2049, [1]),
    "prompt_logprobs": (-2, 1.5, "x", 21, 2049),
    "stop": (["stop"] * 5000, 5, [5], "", [""], {"a": 1}, b"x", [None]),
    "stop_token_ids": (5, [-1], [2048], ["x"], [1.5], "x", [None], [2**70]),
    "logit_bias": (5, {"x": 1}, {5: "x"}, {-1: 1}, {2048: 1}, {5: NAN}, {5: 1e39}, [5], {5: None}),
    "allowed_token_ids": ([], [-1], [2048], ["x"], 5, [1.5], "x"),
    "bad_words": ([""], [5], 5, [" "], [SURROGATE], [None]),
    "logits_processors": (5, [5], ["x"], max),
    "output_kind": (None, 5, "DELTA"),
    "extra_args": (5, "x", [5]),
    "watermarking": (True,),
    "structured_outputs": ({"json": {}}, "x"),
    "thinking_token_budget": (5,),
    "flat_logprobs": (True,),
    "logprob_token_ids": ([5],),
    "trace_decode_token_ids": ([5],),
    "best_of": (2,),
    "use_beam_search": (True,),
    "length_penalty": (1.0,),
    "truncate_prompt_tokens": (5,),
    "guided_decoding": ("x",),
    "temprature": (0.5,),
    **dict.fromkeys(FLAGS, (None, 1, "x")),
}


def sampling_params() -> Cases:
    yield from cross("clear", Bench.generate, BAD_PARAMS)
    both = [
        {"n": 2},
        {"min_tokens": 9},
        {"detokenize": False, "stop": ["x"]},
        {"allowed_token_ids": [2], "min_tokens": 3},
    ]
    yield from each("clear", lambda bench, fields: bench.generate(**fields), both)
    kept = {"stop": (("a", "b"),), "top_k": (2**70, np.int64(5)), "seed": (-1, 2**63 - 1)}
    yield from cross("served", Bench.generate, kept)


def runtime() -> Cases:
    for name in broken_processors(0):
        yield Case(f"processor: {name}", "clear", partial(use_processor, name))
    yield Case("in place", "served", lambda b: b.generate(logits_processors=[fill_in_place]))
    yield Case("double", "served", lambda b: b.generate(logits_processors=[to_double]))
    yield Case("bias changed after adding", "either", change_after_adding)
    yield Case("another thread generates", "either", generate_within)
    yield Case("listener raises", "served", with_bad_listener)


def use_processor(name: str, bench: Bench) -> Any:
    return bench.generate(logits_processors=[broken_processors(0)[name]])


def fill_in_place(output: Any, logits: Any) -> Any:
    logits[7:] = -9.0
    return logits


def to_double(output: Any, logits: Any) -> Any:
    return logits.double()


def change_after_adding(bench: Bench) -> Any:
    params = SamplingParams(**GREEDY, logit_bias={5: 1.0})
    bench.llm.add_request("changed", TEXT, params)
    params.logit_bias[10**6] = 5.0  # type: ignore[index]
    return finish_steps(bench)


def finish_steps(bench: Bench) -> list[Any]:
    outputs = []
    while bench.llm.has_unfinished_requests():
        outputs += [output for output in bench.llm.step() if output.finished]
    return outputs


def generate_within(bench: Bench) -> Any:
    """From another thread, which begins in the middle of a step."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            bench.generate()
        except BaseException as error:
            errors.append(error)

    threads: list[threading.Thread] = []

    def listen(report: Any) -> None:
        if not threads:
            threads.append(threading.Thread(target=work))
            threads[0].start()

    bench.llm.engine.step_listeners.append(listen)
    try:
        return bench.generate(max_tokens=30)
    finally:
        bench.llm.engine.step_listeners.remove(listen)
        threads[0].join()
        for error in errors:
            raise error


def with_bad_listener(bench: Bench) -> Any:
    def listen(report: Any) -> None:
        raise ZeroDivisionError

    bench.llm.engine.step_listeners.append(listen)
    try:
        return bench.generate()
    finally:
        bench.llm.engine.step_listeners.remove(listen)


# -- prompts and calls --

BAD_IDS = ("x", None, -1, 2048, 2**70, 1.5, NAN, True, [5], b"x")
BAD_PROMPTS = (
    *(None, 5, 1.5, True, b"x", "", object(), int, [[]], [None], ["", "a"], {}, {"a": 1}),
    *({"prompt": value} for value in (None, 5, b"x", "", ["a"])),
    *({"prompt_token_ids": value} for value in (None, 5, "x", [], [[5]], {5: 5})),
    *({"prompt_token_ids": [5, value]} for value in BAD_IDS),
    *([5, value] for value in ("x", -1, 2048, 2**70, 1.5)),
    {"prompt": "a", "multi_modal_data": {"image": 1}},
    {"prompt_embeds": 5},
    {"prompt": "a", "cache_salt": 5},
    {"prompt": "a", "cache_salt": ""},
    {"encoder_prompt": "a", "decoder_prompt": "b"},
    SURROGATE,
    f"a{SURROGATE}b",
    "x " * 5000,
    [5] * 2048,
    np.array([[1.5]]),
    np.array([2048]),
    torch.tensor([-1]),
    torch.tensor(1.5),
)
ODD_PROMPTS = (
    [],
    (),
    "\x00",
    "\ufeff\u202e\u0301",
    "\U0001f600" * 50,
    " " * 300,
    "<|im_end|>",
    [0],
    [2047] * 60,
    np.array([5, 6]),
    torch.tensor([5, 6]),
    ("a", "b"),
    range(5, 9),
    {"prompt": "a", "prompt_token_ids": [5]},
)


def prompt() -> Cases:
    yield from each("clear", Bench.generate, BAD_PROMPTS)
    yield from each("either", Bench.generate, ODD_PROMPTS)
    for name, size in (("1M characters", 10**6), ("10M characters", 10**7)):
        yield Case(name, "clear", partial(long_prompt, size))


def long_prompt(size: int, bench: Bench) -> Any:
    return bench.generate("x" * size)


def request() -> Cases:
    def generate_with(bench: Bench, **arguments: Any) -> Any:
        params = SamplingParams(**GREEDY)
        return bench.llm.generate(TEXT, params, use_tqdm=False, **arguments)

    def add_with(bench: Bench, **arguments: Any) -> Any:
        fields = {"request_id": "r", "prompt": TEXT, "params": SamplingParams(**GREEDY)}
        bench.llm.add_request(**{**fields, **arguments})
        return finish_steps(bench)

    yield from cross(
        "clear",
        generate_with,
        {
            "priority": ("x", 1.5, NAN, True, [1, 2], [None]),
            "cache_salt": (5, "", b"x", ["a", "b"], [5]),
            "lora_request": ("x", 5),
            "mm_processor_kwargs": ({"a": 1},),
            "prompt_token_ids": ([5],),
            "nothing": (1,),
        },
    )
    yield from cross(
        "clear",
        add_with,
        {
            "request_id": (None, 5, "", b"x", ["r"]),
            "params": (5, "x", [], {"n": 1}, SamplingParams),
            "priority": ("x", 1.5, True, NAN),
            "cache_salt": (5, "", b"x"),
        },
    )
    yield from cross("served", add_with, {"priority": (-(2**62), 2**62), "cache_salt": ("a",)})
    bad_lists = ([], [5], ["x"], [SamplingParams()] * 2, "x", 5, {"temperature": 0})
    yield from each(
        "clear", lambda b, value: b.llm.generate(TEXT, value, use_tqdm=False), bad_lists
    )


def parts_of(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


BAD_CHATS = (
    *(None, 5, "x", [[]], [None], [5], ["x"], {}, [{}], b"x"),
    [{"content": "Hi"}],
    *([{**USER, "role": value}] for value in (None, 5, ["user"], b"x", {})),
    *([{**USER, "content": value}] for value in (5, b"x", {}, 1.5, object(), SURROGATE)),
    *(parts_of(value) for value in (None, 5, [], {}, b"x")),
    *(parts_of({"type": "text", "text": value}) for value in (5, [], b"x")),
    parts_of({"type": "image_url", "image_url": {"url": "x"}}),
    parts_of({"type": 5, "text": "x"}),
    [USER, 5],
    [[USER], 5],
)
ODD_CHATS = (
    [],
    [{"role": "user"}],
    [{**USER, "content": ""}],
    [{**USER, "content": None}],
    [{**USER, "x": 1}],
    [USER] * 40,
    [{**USER, "role": "zz"}],
    [{**USER, "role": ""}],
    parts_of(),
    parts_of({"type": "text"}),
    parts_of({"type": "text", "text": None}),
)
BAD_CHAT_ARGUMENTS: dict[str, Any] = {
    "chat_template": (5, b"x", ["x"], "{% if %}", "{{ raise_exception('no') }}"),
    "tools": (5, "x", [5], {"a": 1}),
    "chat_template_kwargs": (5, "x", [5]),
    "chat_template_content_format": (5, "x"),
    "add_generation_prompt": ("x",),
    "continue_final_message": ("x",),
}


def chat() -> Cases:
    yield from each("clear", Bench.chat, BAD_CHATS)
    yield from cross("clear", lambda b, **more: b.chat([USER], **more), BAD_CHAT_ARGUMENTS)
    yield from each("either", Bench.chat, ODD_CHATS)


def beam() -> Cases:
    numbers = (0, -1, 1.5, "x", None, NAN, True, [1])
    table: dict[str, Any] = {
        "beam_width": (*numbers, *HUGE, 10**30, 5000),
        "max_tokens": numbers,
        "temperature": (-1, NAN, "x", None),
        "length_penalty": (-11, 11, NAN, INF, "x", None),
        "ignore_eos": (None, 1, "x"),
        "structured_outputs": ("x",),
        "watermarking": (True,),
        "n": (2,),
    }
    yield from cross("clear", Bench.beams, table)
    yield from each("clear", lambda b, value: b.beams(value), (None, 5, "", [5, -1], [2048]))
    yield from each(
        "clear", lambda b, value: b.llm.beam_search(TEXT, value), (None, SamplingParams(), 5, {})
    )
    limits = {"concurrency_limit": (0, -1, 1.5, "x", True), "lora_request": ("x",)}
    params = BeamSearchParams(2, 3)
    yield from cross("clear", lambda b, **more: b.llm.beam_search(TEXT, params, **more), limits)
    kept = {"beam_width": (1, 8), "max_tokens": (1, 2**70), "length_penalty": (-10, 0.0)}
    yield from cross("either", Bench.beams, kept)


# -- options --

COUNTS = (0, -1, 1.5, "x", NAN, [1], True, *HUGE)
NAMES = (5, "", "x", True, [], b"x")
SWITCHES = (1, 0, "x", "False", [])
BAD_OPTIONS: dict[str, Any] = {
    "num_kv_blocks": (*COUNTS, 10**8),
    "block_size": COUNTS,
    "max_num_seqs": (*COUNTS, 2**40),
    "max_num_batched_tokens": (0, -1, 1.5, "x", NAN, 7),
    "max_model_len": (0, -1, 1.5, "x", NAN, 2049, 2**70),
    "tensor_parallel_size": (0, -1, 1.5, "x", None, 3, 2**31),
    "kv_cache_memory": (0, -1, 1.5, "x"),
    "gpu_memory_utilization": (0, -1, 1.1, NAN, "x", None, True),
    "long_prefill_token_threshold": (-1, 1.5, "x", None),
    "max_logprobs": (-2, 1.5, "x", None),
    "seed": (-1, 2**63, 1.5, "x", None),
    "swap_space": (-1, NAN, "x"),
    "dtype": (*NAMES, "int8", "float64", torch.int8),
    "device": (*NAMES, "cuda:x", "tpu", "cuda:99"),
    "scheduling_policy": (*NAMES, None),
    "preemption_mode": NAMES,
    "load_format": (*NAMES, None, "pt"),
    "model_impl": (*NAMES, None),
    "attention_backend": (5, "", "x", [], int),
    "enable_prefix_caching": SWITCHES,
    "enable_chunked_prefill": SWITCHES,
    "enforce_eager": SWITCHES,
    "async_scheduling": SWITCHES,
    "tokenizer": (5, "", "/nowhere", b"x"),
    "quantization": ("gptq", "bitsandbytes", 5),
    "trust_remote_code": ("x",),
    "pipeline_parallel_size": (99,),
    "max_num_sequences": (8,),
    "scheduler_cls": (5, "x"),
    "executor_cls": (5,),
    "runner_cls": (5,),
}
BAD_MODELS = (5, 1.5, "", "/nowhere", "nowhere/nothing", b"x", [], "x" * 5000, "\x00", True, {})


def option() -> Cases:
    yield from cross("clear", Bench.build, BAD_OPTIONS)
    yield from each("clear", Bench.build, BAD_MODELS)
    both = [
        {"preemption_mode": "swap", "num_cpu_blocks": 2**40},
        {"preemption_mode": "swap", "num_cpu_blocks": 0},
        {"num_cpu_blocks": 4, "swap_space": 1.0},
        {"max_num_batched_tokens": 4, "max_num_seqs": 8},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 8, "max_model_len": 64},
        {"preemption_mode": "swap", "swap_space": INF},
        {"preemption_mode": "swap", "swap_space": 2**40},
        {"num_kv_blocks": None, "kv_cache_memory": 10},
        {"device": "cuda:0", "tensor_parallel_size": 2},
    ]
    yield from each("clear", lambda bench, options: bench.build(**options), both)
    yield from cross(
        "either",
        Bench.build,
        {
            "num_cpu_blocks": (-1, 5),
            "kv_cache_memory": (10, 2**50, 2**70),
            "swap_space": (0, INF, 2**40),
            "trust_remote_code": (True,),
            "preemption_mode": (None,),
            "enable_prefix_caching": (None,),
            "enable_chunked_prefill": (None,),
            "enforce_eager": (None,),
            "async_scheduling": (None,),
        },
    )


# -- checkpoints --

SIZES = (0, -1, 1.5, "x", [], 10**12, 10**30)
BAD_CONFIG: dict[str, Any] = {
    "vocab_size": (*SIZES, None),
    "hidden_size": (*SIZES, None),
    "intermediate_size": (*SIZES, None),
    "num_hidden_layers": (0, -1, 1.5, "x", [], 4, 6, 10**9, None),
    "num_attention_heads": (*SIZES, 3, 10**9, None),
    "num_key_value_heads": (-1, 1.5, "x", 3, 10**9),
    "head_dim": (-1, 1.5, "x", 3, 33, 10**9),
    "max_position_embeddings": (0, -1, 1.5, "x", 10**12, 10**30),
    "rms_norm_eps": (-1.0, NAN, INF, "x", []),
    "rope_theta": ("x", -1, [], 0, NAN),
    "eos_token_id": ("x", 1.5, ["x"], {}),
    "architectures": (None, [], "Qwen3ForCausalLM", ["Nothing"], {"a": 1}, 5, [5], [None]),
    "hidden_act": ("x", 5, None, []),
    "tie_word_embeddings": ("x", None, 5),
    "attention_bias": (True, "x"),
    "sliding_window": (0, -5, 1.5, "x"),
    "quantization_config": ({"quant_method": "fp8"}, {"quant_method": "gptq", "bits": 4}, 5, "x"),
    "rope_parameters": (
        *(5, "x", []),
        {"rope_type": "x"},
        {"rope_type": 5},
        *({"rope_type": "linear", "factor": factor} for factor in (0, -1, NAN, "x", 10**9)),
        *({"rope_type": "default", "rope_theta": theta} for theta in (0, -1, NAN, "x")),
        {"rope_type": "llama3", "rope_theta": 10000.0},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": -1},
    ),
}
ODD_CONFIG: dict[str, Any] = {
    "eos_token_id": (2048, 10**9, -1, [2048], [10**9]),  # dropped: it can never be sampled
    "model_type": ("x", None, 5, "../../x"),
    "dtype": (5, "int8", "float64", None),
    "use_sliding_window": (True, "x"),
    "head_dim": (0, None),
    "bos_token_id": (-1, 10**9, "x"),
    "pad_token_id": (-1, 10**9),
    "use_cache": ("x",),
    "initializer_range": (NAN,),
    "an_unknown_key": (5, [1] * 1000),
}


# What makes a key count: rope_theta is read without rope_parameters, a window is used or not.
NEEDED_BESIDE = {
    "rope_theta": {"rope_parameters": None},
    "sliding_window": {"use_sliding_window": True, "max_window_layers": 0},
}


def with_config(bench: Bench, **values: Any) -> Any:
    folder = bench.folder()
    beside = [NEEDED_BESIDE.get(key, {}) for key in values]
    change_json(folder / "config.json", **{**values, **beside[0]})
    return bench.build(str(folder))


def without_key(bench: Bench, key: str) -> Any:
    folder = bench.folder()
    content = json.loads((folder / "config.json").read_text())
    del content[key]
    (folder / "config.json").write_text(json.dumps(content))
    return bench.build(str(folder))


def change_json(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **values}))


def with_text(name: str, bench: Bench, text: str | bytes) -> Any:
    """A file with this content."""
    folder = bench.folder()
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    (folder / name).write_bytes(data)
    return bench.build(str(folder))


NOT_JSON = ("", "null", "5", "[]", '"x"', "{", "{}", "\x00" * 9, b"\xff\xfe", "[" * 100_000)


def config_json() -> Cases:
    yield from cross("clear", with_config, BAD_CONFIG)
    yield from cross("either", with_config, ODD_CONFIG)
    needed = ("architectures", "vocab_size", "hidden_size", "num_hidden_layers")
    yield from each("clear", without_key, (*needed, "num_attention_heads", "intermediate_size"))
    yield from each("clear", partial(with_text, "config.json"), (*NOT_JSON, '{"a":' * 100_000))
    for name, make in (("fifo", make_fifo), ("folder", Path.mkdir), ("/dev/zero", link_to_zero)):
        yield Case(f"config.json is a {name}", "clear", partial(with_special, "config.json", make))
    generation = {"temperature": (-1, NAN, "x"), "top_p": (5, "x"), "eos_token_id": ("x",)}
    yield from cross("clear", with_generation_config, generation)
    sizes = {"vocab_size": 10**12, "num_hidden_layers": 10**7, "num_attention_heads": 10**9}
    for key, value in sizes.items():
        yield Case(f"dummy {key}={value}", "clear", partial(as_dummy, key, value))


def as_dummy(key: str, value: Any, bench: Bench) -> Any:
    folder = bench.folder()
    change_json(folder / "config.json", **{key: value})
    return bench.build(str(folder), load_format="dummy")


def with_generation_config(bench: Bench, **values: Any) -> Any:
    folder = bench.folder()
    change_json(folder / "generation_config.json", **values)
    with LLM(str(folder), **SMALL) as llm:
        llm.add_request("a", TEXT)
        llm.add_request("b", TEXT, SamplingParams(**GREEDY, min_tokens=2))
        return [llm.step() for _ in range(3)][-1]


def make_fifo(file: Path) -> None:
    import os

    os.mkfifo(file)


def link_to_zero(file: Path) -> None:
    file.symlink_to("/dev/zero")


def with_special(name: str, make: Callable[[Path], Any], bench: Bench) -> Any:
    folder = bench.folder()
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    return bench.build(str(folder))


def change_weights(change: Callable[[dict[str, Any]], Any], impl: str, bench: Bench) -> Any:
    folder = bench.folder()
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return bench.build(str(folder), model_impl=impl)


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


def set_tensor(name: str, make: Callable[[Any], Any], weights: dict[str, Any]) -> None:
    weights[name] = make(weights[name]).contiguous()


def set_all(make: Callable[[Any], Any], weights: dict[str, Any]) -> None:
    weights.update({name: make(tensor) for name, tensor in weights.items()})


def with_one(value: float) -> Callable[[Any], Any]:
    def change(tensor: Any) -> Any:
        tensor = tensor.clone()
        tensor.view(-1)[1] = value
        return tensor

    return change


DTYPES = ("int8", "uint8", "int16", "int32", "int64", "bool", "complex64", "float8_e4m3fn")
ONE_TENSOR: dict[str, Callable[[Any], Any]] = {
    "NaN": lambda t: torch.full_like(t, NAN),
    "inf": lambda t: torch.full_like(t, INF),
    "one NaN": with_one(NAN),
    "one inf": with_one(INF),
    "shorter": lambda t: t[:-1],
    "longer": lambda t: torch.cat([t, t]),
    "one more dimension": lambda t: t[None],
    "empty": lambda t: t[:0],
    "scalar": lambda t: torch.tensor(1.0),
}
INDEX_NAMES = (
    *("", ".", "..", "../model.safetensors", "/etc/passwd", "/dev/zero", "/proc/self/mem"),
    *("missing.safetensors", "a" * 5000, "config.json", "model.safetensors/x", "x/../y", "\x00"),
    *(None, 5, [], {}, True),
)


def weights() -> Cases:
    for name in DTYPES:
        for which, setter in (("all", set_all), ("one", partial(set_tensor, Q_PROJ))):
            convert = partial(torch.Tensor.to, dtype=getattr(torch, name))
            change = partial(setter, convert)
            expected = "either" if name.startswith("float") else "clear"
            yield Case(f"{name}, {which}", expected, partial(change_weights, change, "auto"))
    for tensor in (Q_PROJ, EMBEDDING, NORM):
        for name, make in ONE_TENSOR.items():
            # What one number of the embedding is seen by a tied head only: of one row
            change = partial(set_tensor, tensor, make)
            yield Case(f"{tensor}: {name}", "clear", partial(change_weights, change, "auto"))
    for impl in ("nanoserve", "transformers"):
        for name, value, expected in (("NaN", NAN, "clear"), ("3e38", 3e38, "either")):
            change = partial(set_all, partial(torch.full_like, fill_value=value))
            yield Case(f"all {name}, {impl}", expected, partial(change_weights, change, impl))
    yield Case("missing tensor", "clear", partial(change_weights, lambda w: w.pop(NORM), "auto"))
    extra = partial(change_weights, lambda w: w.update(x=torch.ones(3)), "auto")
    yield Case("extra tensor", "clear", extra)
    yield Case("transposed", "either", partial(change_weights, transpose, "auto"))
    yield Case("float64", "either", partial(change_weights, partial(set_all, to_float64), "auto"))
    yield from each("clear", with_index, INDEX_NAMES)
    index = "model.safetensors.index.json"
    yield from each("clear", partial(with_text_index, index), (*NOT_JSON, '{"weight_map": []}'))
    for size in (0, 1, 7, 8, 9, 100, 5000, 10**6):
        yield Case(f"cut at byte {size}", "clear", partial(cut_weights, size, "auto"))
    yield Case("cut, transformers", "clear", partial(cut_weights, 5000, "transformers"))
    for name, make in (("fifo", make_fifo), ("folder", Path.mkdir), ("/dev/zero", link_to_zero)):
        special = partial(with_special, "model.safetensors", make)
        yield Case(f"model.safetensors is a {name}", "clear", special)
    dangling = partial(with_special, "model.safetensors", lambda f: f.symlink_to("nowhere"))
    yield Case("a dangling link", "clear", dangling)
    for size in (2**62, 10**9, 2**64 - 1):
        header = struct.pack("<Q", size) + b"{}"
        yield Case(f"header of {size}", "clear", partial(replace_weights, header))
    yield Case("a pickle", "clear", partial(replace_weights, b"\x80\x04\x95cos\nsystem\n"))
    yield Case("no weights", "clear", lambda b: b.build(str(b.folder("config.json"))))
    for impl in ("nanoserve", "transformers"):
        yield Case(f"quantization_config, {impl}", "clear", partial(as_quantized, impl))


def transpose(weights: dict[str, Any]) -> None:
    weights[Q_PROJ] = weights[Q_PROJ].T.contiguous()


def to_float64(tensor: Any) -> Any:
    return tensor.double()


def as_quantized(impl: str, bench: Bench) -> Any:
    folder = bench.folder()
    change_json(folder / "config.json", quantization_config={"quant_method": "fp8"})
    return bench.build(str(folder), model_impl=impl)


def with_index(bench: Bench, name: Any) -> Any:
    """An index that says that every tensor is in this file."""
    folder = bench.folder()
    names = load_file(folder / "model.safetensors")
    shutil.copy(folder / "model.safetensors", folder.parent / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return bench.build(str(folder))


def with_text_index(name: str, bench: Bench, text: str | bytes) -> Any:
    folder = bench.folder()
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return bench.build(str(folder))


def cut_weights(size: int, impl: str, bench: Bench) -> Any:
    folder = bench.folder()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    return bench.build(str(folder), model_impl=impl)


def replace_weights(content: bytes, bench: Bench) -> Any:
    return with_text("model.safetensors", bench, content)


# -- tokenizers and templates --


def change_tokenizer(change: Callable[[dict[str, Any]], Any], prompt: Any, bench: Bench) -> Any:
    folder = bench.folder()
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return bench.build(str(folder), prompt)


def added_token(token_id: Any, content: dict[str, Any]) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    content["added_tokens"].append({"id": token_id, "content": "<extra>", **flags})


def replacing(pattern: str, content: dict[str, Any]) -> None:
    """A normalizer that doubles the text again and again."""
    step = {"type": "Replace", "pattern": {"String": pattern}, "content": pattern * 10}
    content["normalizer"] = {"type": "Sequence", "normalizers": [step] * 9}


def splitting(regex: str, content: dict[str, Any]) -> None:
    step = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = step


def tokenizer() -> Cases:
    yield from each("clear", partial(with_text, "tokenizer.json"), NOT_JSON)
    yield from each("either", partial(with_text, "tokenizer_config.json"), NOT_JSON)
    for key in ("model", "pre_tokenizer", "decoder", "added_tokens", "version"):
        for value in (5, "x"):
            change = partial(dict.update, **{key: value})  # type: ignore[misc]
            name = f"tokenizer.json {key}={value!r}"
            yield Case(name, "either", partial(change_tokenizer, lambda c, f=change: f(c), TEXT))
    for token_id in (2048, 10**9):
        extra = partial(added_token, token_id)
        name = f"added token {token_id}"
        yield Case(name, "clear", partial(change_tokenizer, extra, "<extra>"))
        yield Case(f"{name}, unused", "either", partial(change_tokenizer, extra, TEXT))
    bomb = partial(change_tokenizer, partial(replacing, "e"), TEXT * 5)
    yield Case("Replace bomb", "clear", bomb)
    for regex in ("(a+)+$", "(", "(x*)*y"):
        text = "a" * 40 + "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx!"
        change = partial(change_tokenizer, partial(splitting, regex), text)
        yield Case(f"regex {regex}", "either", change)
    yield Case("no tokenizer, a text", "clear", without_tokenizer)
    for value in ("Nothing", "../x", 5):
        change_class = {"tokenizer_class": value}
        yield Case(f"tokenizer_class={value!r}", "either", partial(tokenizer_config, change_class))


def without_tokenizer(bench: Bench) -> Any:
    return bench.build(str(bench.folder("config.json", "model.safetensors")))


def tokenizer_config(values: dict[str, Any], bench: Bench) -> Any:
    folder = bench.folder()
    change_json(folder / "tokenizer_config.json", **values)
    return bench.build(str(folder))


LOOP = "{% for i in range(99999) %}"
END = "{% endfor %}"
DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(50) %}{% set ns.x = ns.x + ns.x %}"
BAD_TEMPLATES = (
    "{% if %}",
    "{{",
    "{% endfor %}",
    "{{ 1 / 0 }}",
    "{{ raise_exception('no') }}",
    "{{ undefined_function() }}",
    "{{ messages[9].content }}",
    "{{ missing.thing.other }}",
    "{% include 'x' %}",
    "{% import 'x' as x %}",
    "{% extends 'x' %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ (1).__class__.__base__ }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ messages.__class__ }}",
    "{{ messages.append(1) }}",
    "{{ range(10**9) | list }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ '" + SURROGATE + "' }}",
    "{# nothing #}",
    LOOP * 3 + "x" + END * 3,
    LOOP * 3 + END * 3,
    "{{ 'a' * 10**8 }}",
    "{{ 'a' * 10**10 }}",
    "{{ 'x'.center(10**10) }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ '%10000000000d' % 3 }}",
    "{{ '{:>10000000000}'.format(3) }}",
    DOUBLING + END + "{{ ns.x }}",
    "{{ lipsum(n=10**7) }}",
    "{{ [0] * 10**10 }}",
    "{{ '" + "x" * 10**7 + "' }}",
)
ODD_TEMPLATES = (
    "{{ messages[0].content }}",
    "{{ messages | tojson }}",
    "{{ strftime_now('%Y') }}",
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}",
    "{{ 9**9**9 }}",
    "{{ 10 ** 10 ** 9 }}",
    "",
)


def template() -> Cases:
    yield from each("clear", lambda b, text: b.chat([USER], chat_template=text), BAD_TEMPLATES)
    yield from each("either", lambda b, text: b.chat([USER], chat_template=text), ODD_TEMPLATES)


# -- weird, and valid --

WEIRD_OPTIONS: dict[str, Any] = {
    "block_size": (1, 2, 3, 5, 7, 31, 64, 257, 1024, 4096),
    "num_kv_blocks": (1, 2, 3),
    "max_num_seqs": (1, 2, 255),
    "max_model_len": (12, 16, 2048),
    "max_num_batched_tokens": (8, 9, 11),
    "long_prefill_token_threshold": (1, 2, 3, 5),
    "enable_prefix_caching": (False,),
    "async_scheduling": (True,),
    "attention_backend": ("reference", "torch"),
    "max_logprobs": (0, -1),
    "preemption_mode": ("swap",),
    "scheduling_policy": ("priority",),
    "dtype": ("bfloat16", "float16", torch.float32),
    "model_impl": ("transformers",),
    "seed": (0, 2**63 - 1),
    "tokenizer": (DEMO_MODEL,),
    "device": ("cpu",),
    "gpu_memory_utilization": (1e-9, 1.0),
}
WEIRD_PARAMS: dict[str, Any] = {
    "temperature": (1e-38, 0.01, 100.0, 3e38, 0),
    "top_p": (5e-324, 1e-9, 1.0),
    "top_k": (1, 2048, 10**9),
    "min_p": (0.0, 1.0),
    "seed": (0, 2**32, 2**53, 2**63 - 1, None),
    "repetition_penalty": (1e-3, 3e38, 100.0),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "max_tokens": (1, 500, None, 2**70),
    "min_tokens": (1, 6),
    "n": (1, 2, 8, 40),
    "stop": (
        [],
        ["a", "ab", "abc"],
        [f"stop {i}" for i in range(1000)],
        ["x" * 10**6],
        "\U0001f600",
    ),
    "stop_token_ids": ([], [0, 2047], list(range(2048))),
    "logit_bias": ({}, {5: 100.0}, {5: -100.0}, dict.fromkeys(range(2048), 1.0)),
    "allowed_token_ids": ([5], list(range(2048)), [5, 5, 5]),
    "bad_words": ([], ["the"], [f"word{i}" for i in range(300)]),
    "logprobs": (0, 1, 20),
    "prompt_logprobs": (0, 20),
    "detokenize": (False,),
    "skip_special_tokens": (False,),
    "ignore_eos": (True,),
    "skip_reading_prefix_cache": (True, False),
    "extra_args": ({"a": [1]},),
    "logits_processors": ([], ()),
}


def weird() -> Cases:
    short = {"prompt": "Once", "fields": {"logprobs": None}}
    yield from cross("served", lambda b, **options: b.build(**short, **options), WEIRD_OPTIONS)

    def sampled(bench: Bench, **fields: Any) -> Any:
        return bench.generate(**{"temperature": 1.0, "seed": 1, **fields})

    yield from cross("served", sampled, WEIRD_PARAMS)
    yield Case("2,000 requests", "served", lambda b: b.generate([TEXT] * 2000, max_tokens=2))
    for prompt in (
        "\u05d0\u05d1",
        "e\u0301" * 20,
        "\U0001f468\u200d\U0001f469",
        "\r\n\t",
        "a\x00b",
    ):
        yield Case(repr(prompt), "served", partial(ask_for, prompt))
    for value in (10**7, 10**6):
        yield Case(f"max_num_seqs={value}", "either", partial(with_seqs, value))
    yield Case("long positions", "either", lambda b: with_config(b, max_position_embeddings=10**6))


def with_seqs(number: int, bench: Bench) -> Any:
    return bench.build(max_num_seqs=number)


def ask_for(prompt: str, bench: Bench) -> Any:
    return bench.generate(prompt)


GROUPS: dict[str, Callable[[], Cases]] = {
    "SamplingParams": sampling_params,
    "runtime": runtime,
    "prompt": prompt,
    "request": request,
    "chat": chat,
    "beam": beam,
    "option": option,
    "checkpoint: config.json": config_json,
    "checkpoint: weights, index": weights,
    "checkpoint: tokenizer": tokenizer,
    "template": template,
    "weird": weird,
}
