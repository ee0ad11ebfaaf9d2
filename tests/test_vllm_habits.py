"""What a user of vLLM writes runs here, when the import lines change and nothing else.

PROGRAMS has one short program for each form of call that vLLM's examples and documentation use. The
import lines are vLLM's; coming_from_vllm.md says what they become. The tables of that document are
checked against the code, in both languages. `python tests/test_vllm_habits.py` writes the parts of
the English document that are made from the code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from test_arg_utils import VLLM_0_6_6, VLLM_0_32

import nanoserve
from nanoserve import LLM, LLMEngine, SamplingParams
from nanoserve.arg_utils import EMPTY, GROUPS, KNOWN, read_options
from nanoserve.config import ALIASES, OPTIONS, VALUE_ALIASES, EngineConfig
from nanoserve.exceptions import VLLMValidationError
from nanoserve.extras.beam_search import BeamSearchParams
from nanoserve.output_processor import CompletionOutput, Logprob, RequestOutput
from nanoserve.sampling_params import MISSING, RequestOutputKind

FOLDER = Path(__file__).parent.parent / "nanoserve"
ENGLISH, CHINESE = LANGUAGES = ["coming_from_vllm.md", "coming_from_vllm.zh-CN.md"]
BEGIN, END = "<!-- options: made from", "<!-- end of options -->"


# -- programs --

GENERATE = "from vllm import LLM, SamplingParams\nllm = LLM('gpt2')\n"
ENGINE = "from vllm import EngineArgs, LLMEngine, SamplingParams\n"
GREEDY = "SamplingParams(temperature=0, max_tokens=4)"
CHAT = GENERATE + "chat = [{'role': 'user', 'content': 'Hello'}]\n"

PROGRAMS = {
    # The prompt.
    "a list of strings": f"""{GENERATE}
outputs = llm.generate(["Once upon a time", "One day"], {GREEDY})
assert [output.prompt for output in outputs] == ["Once upon a time", "One day"]
""",
    "one string": f"{GENERATE}[output] = llm.generate('Once', {GREEDY})\nassert output.finished",
    "keyword arguments": f"""{GENERATE}
[output] = llm.generate(prompts=["Once"], sampling_params={GREEDY}, use_tqdm=False)
assert output.outputs[0].index == 0
""",
    "a dict with text": f"""{GENERATE}
[output] = llm.generate({{"prompt": "Once"}}, {GREEDY})
assert output.prompt == "Once"
""",
    "a dict with token ids": f"""{GENERATE}
[output] = llm.generate({{"prompt_token_ids": [1, 2, 3]}}, {GREEDY})
assert output.prompt_token_ids == [1, 2, 3]
""",
    "TokensPrompt": f"""{GENERATE}
from vllm import TokensPrompt
outputs = llm.generate([TokensPrompt(prompt_token_ids=[i, 5]) for i in range(3)], {GREEDY})
assert [output.prompt_token_ids for output in outputs] == [[0, 5], [1, 5], [2, 5]]
""",
    "TokensPrompt of vllm.inputs": f"""{GENERATE}
from vllm.inputs import TextPrompt, TokensPrompt
prompts = [TokensPrompt(prompt_token_ids=[5]), TextPrompt(prompt="Once")]
assert len(llm.generate(prompts=prompts, sampling_params={GREEDY})) == 2
""",
    "a list of dicts": f"""{GENERATE}
prompts = [{{"prompt": text}} for text in ("Once", "One day")]
assert [output.prompt for output in llm.generate(prompts, {GREEDY})] == ["Once", "One day"]
""",
    "a list of mixed forms": f"""{GENERATE}
outputs = llm.generate(["Once", {{"prompt": "One"}}, {{"prompt_token_ids": [4]}}], {GREEDY})
assert len(outputs) == 3
""",
    "PromptType": f"""{GENERATE}
from vllm import PromptType
from vllm.inputs import PromptType as Same
prompts: list[PromptType] = ["Once"]
assert PromptType is Same and llm.generate(prompts, {GREEDY})
""",
    "random token ids": f"""{GENERATE}
import numpy as np
ids = np.random.default_rng(0).integers(100, size=(4, 8))
prompts = [{{"prompt_token_ids": row}} for row in ids.tolist()]
outputs = llm.generate(prompts, SamplingParams(ignore_eos=True, max_tokens=3), use_tqdm=False)
assert [len(output.outputs[0].token_ids) for output in outputs] == [3] * 4
""",
    "a dict with a cache salt": f"""{GENERATE}
[output] = llm.generate({{"prompt": "Once", "cache_salt": "Ada"}}, {GREEDY})
assert output.finished
""",
    "one prompt many times": f"""{GENERATE}
assert len(llm.generate(["Once"] * 3, {GREEDY})) == 3
""",
    "no prompts": f"{GENERATE}assert llm.generate([]) == []",
    # Sampling parameters.
    "no sampling parameters": GENERATE + "assert llm.generate('Once')[0].outputs[0].text",
    "the recommended sampling parameters": f"""{GENERATE}
params = llm.get_default_sampling_params()
params.max_tokens = 3
[output] = llm.generate(["Once"], params)
assert len(output.outputs[0].token_ids) == 3
""",
    "sampling parameters one each": f"""{GENERATE}
params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 3)]
outputs = llm.generate(["Once", "One"], params)
assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 3]
""",
    "temperature and top_p": f"""{GENERATE}
params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4)
assert llm.generate("Once", params)[0].outputs[0].token_ids
""",
    "positional sampling parameters": f"""{GENERATE}
params = SamplingParams(2, 0.1, 0.2, 1.1, 0.8)
assert (params.n, params.presence_penalty, params.frequency_penalty) == (2, 0.1, 0.2)
assert (params.repetition_penalty, params.temperature) == (1.1, 0.8)
""",
    "top_k and min_p": f"""{GENERATE}
params = SamplingParams(top_k=20, min_p=0.05, seed=1, max_tokens=4)
assert llm.generate("Once", params)[0].finished
""",
    "a seed": f"""{GENERATE}
params = SamplingParams(temperature=1.0, seed=42, max_tokens=8)
first, second = llm.generate(["Once", "Once"], params)
assert first.outputs[0].text == second.outputs[0].text
""",
    "penalties": f"""{GENERATE}
params = SamplingParams(presence_penalty=0.2, frequency_penalty=0.1, repetition_penalty=1.05,
                        max_tokens=4)
assert llm.generate("Once", params)[0].finished
""",
    "several completions": f"""{GENERATE}
[output] = llm.generate("Once", SamplingParams(n=3, temperature=0.8, max_tokens=4))
assert [completion.index for completion in output.outputs] == [0, 1, 2]
""",
    "stop strings": f"""{GENERATE}
params = SamplingParams(temperature=0, max_tokens=60, stop=[".", "!"])
[output] = llm.generate("Once upon a time", params)
completion = output.outputs[0]
assert completion.finish_reason == "stop" and completion.stop_reason in (".", "!")
assert completion.stop_reason not in completion.text
""",
    "one stop string, kept": f"""{GENERATE}
params = SamplingParams(temperature=0, max_tokens=60, stop=".", include_stop_str_in_output=True)
assert llm.generate("Once upon a time", params)[0].outputs[0].text.endswith(".")
""",
    "stop token ids": f"""{GENERATE}
first = llm.generate("Once", {GREEDY})[0].outputs[0].token_ids
params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[first[1]])
completion = llm.generate("Once", params)[0].outputs[0]
assert completion.stop_reason == first[1] and completion.token_ids == first[:2]
""",
    "the EOS of the tokenizer as stop token": f"""{GENERATE}
tokenizer = llm.get_tokenizer()
params = SamplingParams(max_tokens=3, stop_token_ids=[tokenizer.eos_token_id])
assert llm.generate("Once", params)[0].finished
""",
    "max_tokens None": f"""{GENERATE}
params = SamplingParams(temperature=0, max_tokens=None, stop=["."])
assert llm.generate("Once upon a time", params)[0].outputs[0].finish_reason == "stop"
""",
    "min_tokens and ignore_eos": f"""{GENERATE}
params = SamplingParams(min_tokens=5, max_tokens=9, ignore_eos=True)
assert len(llm.generate("Once", params)[0].outputs[0].token_ids) == 9
""",
    "logprobs": f"""{GENERATE}
[output] = llm.generate("Once", SamplingParams(temperature=0, max_tokens=2, logprobs=3))
completion = output.outputs[0]
for token_id, logprobs in zip(completion.token_ids, completion.logprobs):
    assert logprobs[token_id].rank == 1 and logprobs[token_id].logprob <= 0
    assert isinstance(logprobs[token_id].decoded_token, str)
assert completion.cumulative_logprob <= 0
""",
    "prompt logprobs": f"""{GENERATE}
[output] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1, prompt_logprobs=0))
assert output.prompt_logprobs[0] is None
assert [set(entry) for entry in output.prompt_logprobs[1:]] == [{{6}}, {{7}}]
""",
    "the class Logprob": f"""{GENERATE}
from vllm.logprobs import Logprob
[output] = llm.generate("Once", SamplingParams(max_tokens=1, logprobs=0))
assert isinstance(next(iter(output.outputs[0].logprobs[0].values())), Logprob)
""",
    "without text": f"""{GENERATE}
completion = llm.generate("Once", SamplingParams(max_tokens=2, detokenize=False))[0].outputs[0]
assert completion.text == "" and completion.token_ids
""",
    "special tokens in the text": f"""{GENERATE}
params = SamplingParams(temperature=0, max_tokens=4, skip_special_tokens=False,
                        spaces_between_special_tokens=True)
assert llm.generate("Once", params)[0].finished
""",
    "a bias on tokens": f"""{GENERATE}
params = SamplingParams(temperature=0, max_tokens=2, logit_bias={{7: 100.0}})
assert llm.generate("Once", params)[0].outputs[0].token_ids == [7, 7]
""",
    "allowed tokens": f"""{GENERATE}
params = SamplingParams(max_tokens=3, allowed_token_ids=[8], ignore_eos=True)
assert llm.generate("Once", params)[0].outputs[0].token_ids == [8, 8, 8]
""",
    "bad words": f"""{GENERATE}
first = llm.generate("Once upon a time", SamplingParams(temperature=0))[0].outputs[0].text
params = SamplingParams(temperature=0, bad_words=first.replace(",", " ").split())
assert llm.generate("Once upon a time", params)[0].outputs[0].text != first
""",
    "a logits processor of V0": f"""{GENERATE}
def only_nine(token_ids, logits):
    logits[:] = float("-inf")
    logits[9] = 0
    return logits
params = SamplingParams(max_tokens=2, logits_processors=[only_nine], ignore_eos=True)
assert llm.generate("Once", params)[0].outputs[0].token_ids == [9, 9]
""",
    "extra_args": f"""{GENERATE}
params = SamplingParams(max_tokens=1, extra_args={{"name": 5}})
assert llm.generate("Once", params)[0].finished and params.extra_args["name"] == 5
""",
    "assigning and cloning": f"""{GENERATE}
params = SamplingParams(temperature=0)
other = params.clone()
other.max_tokens, other.stop = 2, ["."]
assert params.max_tokens == 16 and len(llm.generate("Once", other)[0].outputs[0].token_ids) <= 2
""",
    "from_optional": f"""{GENERATE}
params = SamplingParams.from_optional(temperature=None, max_tokens=2, logit_bias={{"7": 100}})
assert params.temperature == 1.0 and params.logit_bias == {{7: 100}}
""",
    "RequestOutputKind": """
from vllm.sampling_params import RequestOutputKind, SamplingParams
params = SamplingParams(output_kind=RequestOutputKind.DELTA)
assert [kind.name for kind in RequestOutputKind] == ["CUMULATIVE", "DELTA", "FINAL_ONLY"]
assert params.output_kind.value == 1
""",
    # The outputs.
    "printing the outputs": f"""{GENERATE}
def print_outputs(outputs):
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {{prompt!r}}, Generated text: {{generated_text!r}}")
        print("-" * 60)
print_outputs(llm.generate(["Once"], {GREEDY}))
assert "Once" in repr(llm.generate(["Once"], {GREEDY})[0])
""",
    "the class of the outputs": f"""{GENERATE}
from vllm import CompletionOutput, RequestOutput
from vllm.outputs import RequestOutput as Same
[output] = llm.generate("Once", {GREEDY})
assert isinstance(output, RequestOutput) and RequestOutput is Same
assert isinstance(output.outputs[0], CompletionOutput) and output.outputs[0].finished()
""",
    "the text of prompt and output together": f"""{GENERATE}
texts = [o.prompt + o.outputs[0].text for o in llm.generate(["Once", "One"], {GREEDY})]
assert texts[0].startswith("Once")
""",
    "counting tokens": f"""{GENERATE}
outputs = llm.generate(["Once", "One"], {GREEDY})
num_tokens = sum(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs)
assert num_tokens == sum(len(o.prompt_token_ids) for o in outputs) + 8
""",
    "cached tokens": f"""{GENERATE}
prompt = "The quick brown fox jumps over the lazy dog. " * 5
llm.generate(prompt, {GREEDY})
[output] = llm.generate(prompt, {GREEDY})
assert output.num_cached_tokens > 0
assert llm.reset_prefix_cache()
[output] = llm.generate(prompt, {GREEDY})
assert output.num_cached_tokens == 0
""",
    # How a call is made.
    "no progress bar": f"{GENERATE}assert llm.generate(['Once'], {GREEDY}, use_tqdm=False)",
    "a progress bar of one's own": f"""{GENERATE}
from functools import partial
from tqdm import tqdm
assert llm.generate(["Once"], {GREEDY}, use_tqdm=partial(tqdm, disable=True))
""",
    "lora_request None": f"{GENERATE}assert llm.generate('A', {GREEDY}, lora_request=None)",
    "queue first, compute later": f"""{GENERATE}
request_ids = llm.enqueue(["Once", "One"], {GREEDY}, use_tqdm=False)
outputs = llm.wait_for_completion(use_tqdm=False)
assert [output.request_id for output in outputs] == request_ids
""",
    "apply_model": GENERATE + "assert llm.apply_model(lambda model: model.training) == [False]",
    "catching an error": f"""{GENERATE}
from vllm.exceptions import VLLMValidationError
try:
    llm.generate("Once", SamplingParams(top_p=2))
except VLLMValidationError as error:
    assert "top_p" in str(error)
else:
    raise AssertionError
try:
    llm.generate({{"prompt_token_ids": [10**9]}}, {GREEDY})
except ValueError as error:
    assert "1000000000" in str(error)
else:
    raise AssertionError
""",
    "a main function": f"""
from vllm import LLM, SamplingParams
def main():
    llm = LLM(model="gpt2")
    return llm.generate(["Once"], {GREEDY})
if __name__ == "__main__":
    outputs = main()
assert outputs
""",
    "the module itself": f"""
import vllm
llm = vllm.LLM("gpt2")
assert llm.generate("Once", vllm.{GREEDY})[0].finished and vllm.__version__
""",
    "deleting the LLM": f"""{GENERATE}
from vllm.distributed import cleanup_dist_env_and_memory
del llm
cleanup_dist_env_and_memory()
assert LLM("gpt2").generate("Once", {GREEDY})
""",
    "beam search": f"""{GENERATE}
from vllm.sampling_params import BeamSearchParams
outputs = llm.beam_search([{{"prompt": "Once"}}], BeamSearchParams(beam_width=2, max_tokens=3))
assert len(outputs[0].sequences) == 2
assert outputs[0].sequences[0].cum_logprob >= outputs[0].sequences[1].cum_logprob
assert isinstance(outputs[0].sequences[0].text, str)
""",
    # Chat.
    "one conversation": f"{CHAT}assert llm.chat(chat, {GREEDY}, use_tqdm=False)[0].outputs[0].text",
    "several conversations": f"""{CHAT}
assert len(llm.chat([chat, chat, chat], sampling_params={GREEDY}, use_tqdm=True)) == 3
""",
    "a conversation of several turns": f"""{CHAT}
chat += [{{"role": "assistant", "content": "Hi!"}}, {{"role": "user", "content": "Who?"}}]
chat = [{{"role": "system", "content": "You are a helpful assistant."}}] + chat
assert "helpful" in llm.chat(messages=chat, sampling_params={GREEDY})[0].prompt
""",
    "a chat template": f"""{CHAT}
template = "{{% for message in messages %}}{{{{ message['content'] }}}}{{% endfor %}}"
assert llm.chat(chat, {GREEDY}, chat_template=template)[0].prompt == "Hello"
""",
    "a chat template from a file": f"""{CHAT}
from pathlib import Path
from tempfile import TemporaryDirectory
from vllm.renderers.chat_utils import load_chat_template
with TemporaryDirectory() as folder:
    Path(folder, "a.jinja").write_text("{{{{ messages[0].content }}}}")
    template = load_chat_template(Path(folder, "a.jinja"))
assert llm.chat(chat, {GREEDY}, chat_template=template)[0].prompt == "Hello"
""",
    "no generation prompt": f"""{CHAT}
chat += [{{"role": "assistant", "content": "Once upon"}}]
options = dict(add_generation_prompt=False, continue_final_message=True)
assert llm.chat(chat, {GREEDY}, **options)[0].prompt.rstrip().endswith("Once upon")
""",
    "arguments of the chat template": f"""{CHAT}
options = dict(chat_template_kwargs={{"enable_thinking": False}}, tools=None,
               chat_template_content_format="auto")
assert llm.chat(chat, {GREEDY}, **options)[0].finished
""",
    "content of text parts": f"""{CHAT}
chat[0]["content"] = [{{"type": "text", "text": "Hello"}}]
assert "Hello" in llm.chat(chat, {GREEDY})[0].prompt
""",
    "a chat template by hand": f"""{CHAT}
tokenizer = llm.get_tokenizer()
text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
ids = tokenizer(text, add_special_tokens=False).input_ids
[output] = llm.generate({{"prompt_token_ids": ids}}, {GREEDY})
assert output.outputs[0].token_ids == llm.chat(chat, {GREEDY})[0].outputs[0].token_ids
""",
    "a chat that goes on": f"""{CHAT}
for question in ("What is 1 + 1?", "And 2 + 2?"):
    chat.append({{"role": "user", "content": question}})
    [output] = llm.chat(chat, {GREEDY}, use_tqdm=False)
    chat.append({{"role": "assistant", "content": output.outputs[0].text}})
assert len(chat) == 5
""",
    # Options.
    "options of vLLM's first example": f"""
from vllm import LLM, SamplingParams
llm = LLM(model="Qwen/Qwen3-8B", tensor_parallel_size=1, dtype="float16", trust_remote_code=True,
          enforce_eager=True, block_size=16, enable_prefix_caching=False)
assert llm.generate("Once", {GREEDY})
""",
    "memory": """
from vllm import LLM
LLM(model="gpt2", gpu_memory_utilization=0.8, max_model_len=512, max_num_seqs=2, swap_space=4)
LLM(model="gpt2", kv_cache_memory_bytes=2**30, max_num_batched_tokens=1024, cpu_offload_gb=0)
LLM(model="gpt2", num_gpu_blocks_override=64, enable_chunked_prefill=True, seed=1)
assert LLM(model="gpt2").get_tokenizer()
""",
    "options that change nothing": """
from vllm import LLM
llm = LLM("gpt2", tokenizer="gpt2", tokenizer_mode="auto", skip_tokenizer_init=False,
    revision=None, tokenizer_revision=None, quantization=None, disable_log_stats=False,
    enable_lora=False, runner="generate", convert="none", hf_overrides=None,
    pipeline_parallel_size=1, distributed_executor_backend="mp", limit_mm_per_prompt={},
    compilation_config=None, kv_cache_dtype="auto", speculative_config=None, dtype="half")
assert llm.llm_engine
""",
    "options as a dict": """
from vllm import LLM
options = {"model": "gpt2", "max_model_len": 128, "load_format": "dummy", "dtype": "bfloat16"}
assert LLM(**options).get_tokenizer()
""",
    "EngineArgs": """
from dataclasses import asdict
from vllm import LLM, EngineArgs
from vllm.engine.arg_utils import EngineArgs as Same
engine_args = EngineArgs(model="gpt2", max_model_len=256, max_num_seqs=2, enforce_eager=True)
engine_args.seed = 7
assert EngineArgs is Same and asdict(engine_args)["seed"] == 7
assert LLM(**asdict(engine_args)) and LLM(**vars(engine_args))
""",
    "a command line": """
from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser(description="A program")
EngineArgs.add_cli_args(parser)
parser.set_defaults(model="gpt2")
group = parser.add_argument_group("Sampling parameters")
group.add_argument("--max-tokens", type=int)
args = vars(parser.parse_args(["--max_tokens", "5", "--max_model_len=64", "--enforce-eager"]))
assert args.pop("max_tokens") == 5 and args["max_model_len"] == 64
llm = LLM(**args)
params = llm.get_default_sampling_params()
assert params.max_tokens
""",
    "from_cli_args": """
import argparse
from vllm import EngineArgs
parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
args = parser.parse_args(["--model", "gpt2", "--dtype", "half", "--trust-remote-code"])
engine_args = EngineArgs.from_cli_args(args)
assert (engine_args.model, engine_args.dtype) == ("gpt2", "float16")
""",
    # The engine.
    "an engine, step by step": f"""{ENGINE}
engine = LLMEngine.from_engine_args(EngineArgs(model="gpt2"))
prompts = [("Once", {GREEDY}), ("One day", SamplingParams(n=2, max_tokens=3))]
request_id, finished = 0, []
while prompts or engine.has_unfinished_requests():
    if prompts:
        prompt, sampling_params = prompts.pop(0)
        engine.add_request(str(request_id), prompt, sampling_params)
        request_id += 1
    for request_output in engine.step():
        if request_output.finished:
            finished.append(request_output.request_id)
assert sorted(finished) == ["0", "1"]
""",
    "the engine of an LLM": f"""{GENERATE}
engine = llm.llm_engine
engine.add_request("a", "Once", {GREEDY})
engine.add_request("b", {{"prompt_token_ids": [5, 6]}}, {GREEDY})
assert engine.get_num_unfinished_requests() == 2
engine.abort_request(["a"])
outputs = []
while engine.has_unfinished_requests():
    outputs += [output for output in engine.step() if output.finished]
assert [output.request_id for output in outputs] == ["b"]
assert llm.llm_engine.model_config and llm.llm_engine.tokenizer
""",
    "the classes from their modules": """
from vllm.engine.llm_engine import LLMEngine
from vllm.entrypoints.llm import LLM
from vllm.v1.engine.llm_engine import LLMEngine as Same
assert LLMEngine is Same and isinstance(LLM("gpt2").llm_engine, LLMEngine)
""",
}


def as_nanoserve(source: str) -> str:
    """`source` with vLLM's import lines changed as the document says, and no other line."""
    paths = {name(row[0]): name(row[1]) for row in rows("imports")}
    lines = []
    for line in source.splitlines():
        match = re.match(r"from (vllm[\w.]*) import ", line)
        if match:
            line = line.replace(match[1], paths[match[1]], 1)
        lines.append("import nanoserve as vllm" if line == "import vllm" else line)
    return "\n".join(lines)


@contextmanager
def shared_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """LLM(...) checks its options, as always, and hands out `llm` instead of loading a model."""

    class SharedLLM(LLM):
        def __new__(cls, model: Any = None, **options: Any) -> Any:  # type: ignore[misc]
            assert model is not None
            EngineConfig(**read_options("LLM", {"model": model, **options}))
            return llm

    def from_engine_args(engine_args: nanoserve.EngineArgs) -> LLMEngine:
        assert engine_args.create_engine_config().model is not None
        return llm.engine

    with monkeypatch.context() as patch:
        patch.setattr(nanoserve, "LLM", SharedLLM)
        patch.setattr("nanoserve.llm.LLM", SharedLLM)
        patch.setattr(LLMEngine, "from_engine_args", staticmethod(from_engine_args))
        yield


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_for_vllm_runs(
    program: str, demo_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The assertions are in the programs."""
    source = as_nanoserve(PROGRAMS[program])
    assert "assert" in source
    with shared_engine(demo_llm, monkeypatch):
        exec(compile(source, program, "exec"), {"__name__": "__main__"})
    assert not demo_llm.has_unfinished_requests()


def test_there_are_enough_programs() -> None:
    """At least 60 forms; every module of vLLM that has a counterpart is imported by one."""
    assert len(PROGRAMS) >= 60


# -- the document --


def read(file: str = ENGLISH) -> str:
    return (FOLDER / file).read_text(encoding="utf-8")


def name(cell: str) -> str:
    """`vllm.inputs` -> vllm.inputs"""
    return cell.partition("`")[2].partition("`")[0]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def rows(marker: str, file: str = ENGLISH) -> list[list[str]]:
    """The rows of the table behind <!-- marker -->, without its two head lines."""
    _, found, rest = read(file).partition(f"<!-- {marker} -->\n")
    assert found, f"{file} has no table <!-- {marker} -->"
    lines = [line for line in rest.partition("\n\n")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def option_lines() -> list[str]:
    """The part of the document that is made from the tables of options."""
    same = [f"`{option.name}`" for option in OPTIONS if option.name not in ONLY_HERE]
    lines = ["### Same name", "", ", ".join(same) + "."]
    only_here = ", ".join(f"`{name}` ({what})" for name, what in ONLY_HERE.items())
    lines += ["", f"Only here: {only_here}."]
    lines += ["", "### Other name", "", "| vLLM, or nanoserve before | here |", "|---|---|"]
    lines += [f"| `{alias}` | `{declared}` |" for alias, declared in ALIASES.items()]
    for option, values in VALUE_ALIASES.items():
        lines += [f'| `{option}="{a}"` | `{option}="{b}"` |' for a, b in values.items()]
    for verdict, title in VERDICTS.items():
        lines += ["", f"### {title}", ""]
        lines += [option_line(group) for group in GROUPS if group.verdict == verdict]
    return lines


ONLY_HERE = {
    "max_num_waiting": "vLLM's `max_num_queued_reqs` counts running requests, too",
    "num_cpu_blocks": "V0 computes it from `swap_space`",
    "custom_ops": "in vLLM a list inside `compilation_config`",
}
VERDICTS = {
    "no effect": "Accepted, and without effect",
    "other name": "Done in another way",
    "not there yet": "Not there yet",
    "left out": "Left out",
}


def option_line(group: Any) -> str:
    """One group of options: the topic, the reason, the options with the values they accept."""
    shown = []
    for option, known in KNOWN.items():
        if known.group is group:
            is_plain = known.accepted is EMPTY or (known.accepted == (False,) and known.is_switch)
            accepted = known.describe_accepted().replace("any value", "any")
            shown.append(f"`{option}`" if is_plain else f"`{option}` ({accepted})")
    return f"- **{group.topic}**: {group.reason} Options: {', '.join(shown)}."


def sampling_lines() -> list[str]:
    return [f"| `{field}` | {advice} |" for field, (_, advice) in MISSING.items()]


def test_the_options_are_those_of_the_code() -> None:
    num_options = len((VLLM_0_32 + VLLM_0_6_6).split())
    assert all(re.search(rf"\b{num_options}\b", read(file)) for file in LANGUAGES)
    between = read().partition(BEGIN)[2].partition("-->\n")[2].partition(END)[0]
    assert between.strip().splitlines() == option_lines()
    assert ["| " + " | ".join(row) + " |" for row in rows("sampling")] == sampling_lines()


@pytest.mark.parametrize("file", LANGUAGES)
def test_the_rule_for_values_of_options(file: str) -> None:
    """Every option of the lists accepts what the document says, and refuses anything else."""
    text = read(file).partition(BEGIN)[2].partition(END)[0]
    text = text.translate(str.maketrans("（）", "()")).replace(" 或 ", " or ")
    listed = {}
    for line in [line for line in text.splitlines() if line.startswith("- **")]:
        options = re.split("Options: |选项：", line)[1]
        listed.update(re.findall(r"`(\w+)`(?: ?\(([^()]*)\))?", options))
    assert set(listed) == set(KNOWN)
    values = [None, True, False, 0, 1, 0.0, "auto", "", {}, [], "yes", 12345, ["x"], object()]
    for option, said in listed.items():
        allowed = [None]
        if said not in ("", "any", "任意"):
            allowed += [eval(word) for word in said.split(" or ")]
        elif not said:
            allowed += [False] if KNOWN[option].is_switch else ["auto", "", {}, []]
        for value in [*values, *allowed]:
            is_bool = isinstance(value, bool)
            same = (value == each and isinstance(each, bool) == is_bool for each in allowed)
            if said in ("any", "任意") or any(same):
                is_for_vectors = value in ("embed", "embedding")
                expected = {"runner": "pooling"} if is_for_vectors else {}
                assert read_options("LLM", {option: value}) == expected, option
            else:
                with pytest.raises(ValueError, match=re.escape(KNOWN[option].group.reason)):
                    read_options("LLM", {option: value})


def test_both_languages_have_the_same_tables() -> None:
    """The same names in the same order, whatever the sentences between them are."""
    english, chinese = read(ENGLISH), read(CHINESE)
    for text in (english, chinese):
        assert f"[{'English' if text is chinese else '中文'}](" in text
    markers = re.findall(r"<!-- ([\w ]+) -->", english)
    assert re.findall(r"<!-- ([\w ]+) -->", chinese) == markers
    for marker in markers:
        if marker != "end of options":
            for ours, theirs in zip(rows(marker, CHINESE), rows(marker), strict=True):
                assert (names(ours[0]), len(ours)) == (names(theirs[0]), len(theirs))
                if theirs[1] in WORDS or ours[1] in WORDS.values():
                    assert ours[1] == WORDS[theirs[1]], theirs[0]
    parts = [text.partition(BEGIN)[2].partition(END)[0] for text in (english, chinese)]
    same = [[line for line in part.splitlines() if line.startswith("`model`")] for part in parts]
    assert [names(line) for line in same[1]] == [names(line) for line in same[0]] != []
    bullets = [[line for line in part.splitlines() if line[:2] == "- "] for part in parts]
    assert len(bullets[0]) == len(bullets[1]) == len(GROUPS)
    for ours, theirs in zip(*bullets, strict=True):
        options = [option for option in names(theirs) if option in KNOWN]
        assert [option for option in names(ours) if option in KNOWN] == options


WORDS = {
    "same": "相同",
    "other name": "名称不同",
    "not there yet": "尚未实现",
    "left out": "有意不做",
}


def test_imports_of_the_document() -> None:
    for theirs, ours, what in rows("imports"):
        assert name(theirs).startswith("vllm")
        for each in names(what):
            assert getattr(import_module(name(ours)), each)


# The public methods of vLLM 0.32.0's classes.
LLM_METHODS = """
generate enqueue wait_for_completion chat enqueue_chat beam_search encode embed classify score
from_engine_args get_tokenizer get_world_size reset_mm_cache get_default_sampling_params
collective_rpc apply_model start_profile stop_profile reset_prefix_cache sleep
release_kv_cache_memory wake_up get_metrics init_weight_transfer_engine
shutdown_weight_transfer_engine start_weight_update start_draft_weight_update update_weights
finish_weight_update update_weight_version get_weight_version llm_engine
"""
ENGINE_METHODS = """
from_vllm_config from_engine_args get_num_unfinished_requests has_unfinished_requests abort_request
add_request step start_profile stop_profile reset_mm_cache reset_prefix_cache reset_encoder_cache
sleep wake_up is_sleeping get_metrics tokenizer get_tokenizer do_log_stats add_lora remove_lora
list_loras pin_lora collective_rpc vllm_config model_config
"""


@pytest.mark.parametrize(("cls", "methods"), [("LLM", LLM_METHODS), ("LLMEngine", ENGINE_METHODS)])
def test_methods_of_the_document(cls: str, methods: str, demo_llm: LLM) -> None:
    """Every method of vLLM's class has a row. What is "same" is there; what is missing is not."""
    ours = demo_llm if cls == "LLM" else demo_llm.engine
    table = {name(theirs): (verdict, notes) for theirs, verdict, notes in rows(f"methods of {cls}")}
    assert set(methods.split()) <= set(table)
    for method, (verdict, notes) in table.items():
        assert verdict in ("same", "other name", "not there yet", "left out")
        assert hasattr(ours, method) == (verdict == "same"), method
        if verdict == "other name":
            assert hasattr(ours, name(notes)), method


# Parameters of vLLM 0.32.0, in their order.
SIGNATURES: list[tuple[Callable[..., Any], str]] = [
    (LLM.generate, "prompts sampling_params use_tqdm lora_request priority tokenization_kwargs"),
    (
        LLM.chat,
        "messages sampling_params use_tqdm lora_request priority chat_template "
        "chat_template_content_format add_generation_prompt continue_final_message tools "
        "chat_template_kwargs tokenization_kwargs mm_processor_kwargs",
    ),
    (
        LLM.encode,
        "prompts pooling_params use_tqdm lora_request pooling_task tokenization_kwargs",
    ),
    (LLM.embed, "prompts use_tqdm pooling_params lora_request tokenization_kwargs"),
    (
        LLM.score,
        "data_1 data_2 use_tqdm pooling_params lora_request tokenization_kwargs chat_template",
    ),
    (LLM.beam_search, "prompts params lora_request use_tqdm concurrency_limit"),
    (LLM.enqueue, "prompts sampling_params lora_request priority use_tqdm tokenization_kwargs"),
    (LLM.reset_prefix_cache, "reset_running_requests reset_connector"),
    (LLMEngine.add_request, "request_id prompt params"),
]


@pytest.mark.parametrize(("function", "parameters"), SIGNATURES)
def test_parameters_have_vllms_names_and_order(
    function: Callable[..., Any], parameters: str
) -> None:
    ours = list(inspect.signature(function).parameters)[1:]
    assert ours[: len(parameters.split())] == parameters.split()


def test_defaults_of_the_document() -> None:
    """The right column begins with our default."""
    defaults = {option.name: option.default for option in OPTIONS}
    for option, _, ours in rows("defaults"):
        assert name(ours) == str(defaults[name(option)])


# The fields of vLLM 0.32.0's SamplingParams, in their order: up to skip_clone, then the others.
POSITIONAL = """
n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k min_p
seed stop stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs
prompt_logprob_token_ids prompt_logprob_start logprob_token_ids flat_logprobs detokenize
skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind
stream_interval skip_clone
"""
BY_NAME = """
structured_outputs logit_bias allowed_token_ids extra_args bad_words skip_reading_prefix_cache
thinking_token_budget repetition_detection routed_experts_prompt_start trace_decode_token_ids
"""
NOT_HERE = "num_logprobs sampling_type eos_token_id all_stop_token_ids bad_words_token_ids"


def test_sampling_params_of_the_document() -> None:
    """vLLM's order up to skip_clone; the fields behind it; what is said to be missing is."""
    ours = [each.name for each in fields(SamplingParams)]
    assert ours == [*POSITIONAL.split(), *BY_NAME.split(), "logits_processors"]
    assert SamplingParams(*[getattr(SamplingParams(), each) for each in ours]) == SamplingParams()
    for file in LANGUAGES:
        section = read(file).partition("## SamplingParams\n")[2].partition("<!-- sampling -->")[0]
        missing = {"output_text_buffer_length", *NOT_HERE.split()}
        assert missing | {"skip_clone", "logits_processors"} <= set(names(section))
        assert not [each for each in missing if hasattr(SamplingParams(), each)]
    with pytest.raises(TypeError, match="output_text_buffer_length"):
        SamplingParams(output_text_buffer_length=0)  # type: ignore[call-arg]


def test_values_of_the_document() -> None:
    """The middle column is about vLLM."""
    for value, _, here in rows("values"):
        if here == "accepted":
            eval(f"SamplingParams({name(value)})")
        else:
            with pytest.raises(ValueError, match=f"^{name(value).partition('=')[0]} is "):
                eval(f"SamplingParams({name(value)})")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("SamplingParams(max_tokens='5')", TypeError),
        ("SamplingParams(stop=5)", TypeError),
        ("SamplingParams(detokenize=1)", TypeError),
        ("SamplingParams(stop_token_ids=['a'])", TypeError),
        ("EngineArgs(max_num_seqs='8')", TypeError),
        ("EngineArgs(enable_prefix_caching=1)", TypeError),
        ("EngineArgs(max_num_seq=8)", TypeError),
        ("SamplingParams(top_p=2)", VLLMValidationError),
        ("SamplingParams(stop=[None])", VLLMValidationError),
        ("SamplingParams(structured_outputs=5)", VLLMValidationError),
        ("BeamSearchParams(2.0, 3)", VLLMValidationError),
        ("EngineArgs(block_size=0)", ValueError),
        ("EngineArgs(dtype=5)", ValueError),
        ("EngineArgs(disable_log_stats='yes')", ValueError),
        ("EngineArgs(use_tqdm_on_load=1)", ValueError),
    ],
)
def test_exceptions_of_the_document(call: str, error: type[Exception]) -> None:
    """The rows about options and SamplingParams, with one wrong value each."""
    scope = {**vars(nanoserve), "BeamSearchParams": BeamSearchParams}
    with pytest.raises(error) as raised:
        eval(call, scope)
    assert type(raised.value) is error


def test_prompts_of_the_document(demo_llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    scope = {"TextPrompt": nanoserve.TextPrompt, "TokensPrompt": nanoserve.TokensPrompt}
    for prompt, verdict in rows("prompts"):
        given = eval(name(prompt), scope)
        if verdict == "same":
            assert demo_llm.generate(given, params, use_tqdm=False)[0].finished
        else:
            with pytest.raises(ValueError, match="nanoserve has text prompts only"):
                demo_llm.generate(given, params, use_tqdm=False)


def test_outputs_of_the_document(demo_llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, logprobs=0, prompt_logprobs=0)
    [output] = demo_llm.generate("Once upon a time", params, use_tqdm=False)
    assert output.outputs[0].logprobs is not None
    completion = output.outputs[0]
    logprob = next(iter(output.outputs[0].logprobs[0].values()))
    objects: dict[str, RequestOutput | CompletionOutput | Logprob] = {
        "RequestOutput": output,
        "CompletionOutput": completion,
        "Logprob": logprob,
    }
    table = {name(cls): [names(cell) for cell in cells] for cls, *cells in rows("outputs")}
    assert set(table) == set(objects)
    missing = {name(cls): names(cell) for cls, cell in rows("missing-fields")}
    for cls, (same, always_none) in table.items():
        assert {each.name for each in fields(objects[cls])} == {*same, *always_none}
        assert all(getattr(objects[cls], field) is None for field in always_none)
        assert not any(hasattr(objects[cls], field) for field in missing.pop(cls, ()))
    assert not missing


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_one_output_for_all_completions(kind: RequestOutputKind, demo_llm: LLM) -> None:
    """Unlike vLLM, as the document says."""
    params = SamplingParams(n=2, max_tokens=3, min_tokens=3, seed=1, output_kind=kind)
    demo_llm.add_request("a", "Once", params)
    while demo_llm.has_unfinished_requests():
        outputs = demo_llm.step()
        assert [[each.index for each in output.outputs] for output in outputs] == [[0, 1]]


if __name__ == "__main__":
    text = read()
    start, _, rest = text.partition(BEGIN)
    head, _, behind = rest.partition("-->\n")
    new = f"{start}{BEGIN}{head}-->\n" + "\n".join(option_lines()) + f"\n{END}"
    (FOLDER / ENGLISH).write_text(new + behind.partition(END)[2], encoding="utf-8")
