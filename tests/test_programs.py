"""What a user of vLLM writes runs here when the import lines change, and nothing else.

PROGRAMS has a short program for each form of call that vLLM's examples and documentation use, with
vLLM's import lines. coming_from_vllm.md says what they become.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import nanoserve
from nanoserve import LLMEngine

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
    "a main function": f"""
from vllm import LLM, SamplingParams
def main():
    llm = LLM(model="gpt2")
    return llm.generate(["Once"], {GREEDY})
if __name__ == "__main__":
    outputs = main()
assert outputs
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
llm = LLM("gpt2", tokenizer_mode="auto", skip_tokenizer_init=False,
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
    # Methods and options of the chapter vllm_api.
    "enqueue": f"""{GENERATE}
ids = llm.enqueue(["Once upon a time", "One day"], {GREEDY})
ids += llm.enqueue("Once", SamplingParams(temperature=0, max_tokens=2))
outputs = llm.wait_for_completion(use_tqdm=False)
assert [output.request_id for output in outputs] == ids and llm.wait_for_completion() == []
assert outputs[0].outputs[0].text == llm.generate("Once upon a time", {GREEDY})[0].outputs[0].text
""",
    "a function on the model": """
from vllm import LLM

llm = LLM("gpt2")
[number] = llm.apply_model(lambda model: sum(each.numel() for each in model.parameters()))
assert number > 10**6
""",
    "a profile": f"""
import json
import tempfile
from pathlib import Path
from vllm import LLM, SamplingParams

folder = tempfile.mkdtemp()
llm = LLM("gpt2", profiler_config={{"profiler": "torch", "torch_profiler_dir": folder}})
llm.start_profile()
llm.generate("Once", {GREEDY})
llm.stop_profile()
[trace] = Path(folder).glob("*.json")
assert any("matmul" in str(each.get("name")) or "linear" in str(each.get("name"))
           for each in json.loads(trace.read_text())["traceEvents"])
""",
    "logprobs of what the filters leave": """
from math import exp
from vllm import LLM, SamplingParams

llm = LLM("gpt2", logprobs_mode="processed_logprobs")
params = SamplingParams(temperature=2.0, top_k=2, logprobs=5, max_tokens=6, seed=3)
outputs = llm.generate(["Once", "One"], [params, SamplingParams(temperature=0, logprobs=5)])
for output, filtered in zip(outputs, (True, False)):
    for candidates in output.outputs[0].logprobs:
        probs = sorted((exp(each.logprob) for each in candidates.values()), reverse=True)
        assert (probs[2] == 0) == filtered and (not filtered or abs(sum(probs) - 1) < 1e-5)
""",
    "a chat template as an option": """
from vllm import LLM, SamplingParams

llm = LLM("gpt2", chat_template="{{ messages[0]['content'] }}")
[output] = llm.chat([{"role": "user", "content": "Once"}], SamplingParams(max_tokens=2))
assert output.prompt == "Once"
[other] = LLM("gpt2").chat([{"role": "user", "content": "Once"}], SamplingParams(max_tokens=2))
assert other.prompt != "Once"
""",
    "defaults of requests": """
from vllm import LLM

plain = LLM("gpt2", generation_config="vllm").get_default_sampling_params()
own = LLM("gpt2", override_generation_config={"temperature": 0.2}).get_default_sampling_params()
assert (plain.temperature, plain.top_p, own.temperature, own.top_p) == (1.0, 1.0, 0.2, 0.9)
""",
    "an empty prefix cache while requests run": f"""{GENERATE}
llm.add_request("a", "Once upon a time there was a fox", {GREEDY})
llm.step()
assert not llm.reset_prefix_cache()
assert llm.reset_prefix_cache(reset_running_requests=True)
while llm.has_unfinished_requests():
    outputs = llm.step()
alone = llm.generate("Once upon a time there was a fox", {GREEDY})
assert outputs[-1].outputs[0].token_ids == alone[0].outputs[0].token_ids
""",
    "names of other modules": """
from vllm import LLM, SamplingParams
from vllm.config import CompilationConfig, KVTransferConfig, PoolerConfig
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory, destroy_model_parallel
from vllm.transformers_utils.tokenizer import get_tokenizer
from vllm.utils import random_uuid
from vllm.v1.engine.async_llm import AsyncLLM

llm = LLM("gpt2", compilation_config=CompilationConfig(mode=3, cudagraph_mode="FULL"))
assert llm.get_tokenizer() is llm.llm_engine.get_tokenizer() and len(random_uuid()) == 32
pooler = PoolerConfig(pooling_type="MEAN")
llm = LLM("gpt2", runner="pooling", convert="embed", pooler_config=pooler)
assert len(llm.embed("Once")[0].outputs.embedding) > 0
destroy_model_parallel()
cleanup_dist_env_and_memory()
""",
}


def imports() -> dict[str, str]:
    """vLLM's module -> ours: the table of coming_from_vllm.md."""
    text = (Path(nanoserve.__file__).parent / "coming_from_vllm.md").read_text()
    table = text.split("## Imports")[1].split("##")[0]
    rows = [re.findall(r"`(vllm[\w.]*|nanoserve[\w.]*)`", row) for row in table.splitlines()]
    return {theirs: row[-1] for row in rows if row for theirs in row[:-1]}


def as_nanoserve(source: str) -> str:
    """`source` with its import lines changed as the document says, and no other line."""
    paths = imports()
    source = re.sub(
        r"^from (vllm[\w.]*) import", lambda m: f"from {paths[m[1]]} import", source, flags=re.M
    )
    return source.replace("import vllm\n", "import nanoserve as vllm\n")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_for_vllm_runs(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The assertions are in the programs. gpt2 is the demo model here: there is no hub."""
    source = as_nanoserve(PROGRAMS[program])
    assert "assert" in source
    made: list[Any] = []
    resolve = nanoserve.engine.resolve_folder  # type: ignore[attr-defined]

    def make(self: LLMEngine, config: Any) -> None:
        made.append(self)
        init(self, config)

    init = LLMEngine.__init__
    monkeypatch.setattr(LLMEngine, "__init__", make)
    monkeypatch.setattr("nanoserve.engine.resolve_folder", lambda model, *default: resolve(None))
    exec(compile(source, program, "exec"), {"__name__": "__main__"})
    for engine in made:
        assert not engine.has_unfinished_requests()
        engine.close()


def test_the_demo_model_is_found_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lora = nanoserve.LoRARequest("pirate", 1, "nanoserve/demo/lora")  # type: ignore[attr-defined]
    params = nanoserve.SamplingParams(temperature=0, max_tokens=4)
    with nanoserve.LLM("nanoserve/demo", enable_lora=True) as llm:
        plain, pirate = llm.generate(["Who are you?"] * 2, params, lora_request=[None, lora])
        assert plain.outputs[0].text != pirate.outputs[0].text


def test_an_override_of_rope_theta_has_an_effect() -> None:
    for given in ({"rope_theta": 5.0}, {"rope_parameters": {"rope_theta": 5.0}}):
        with nanoserve.LLM(hf_overrides=given) as llm:
            assert llm.llm_engine.model_config.rope_parameters["rope_theta"] == 5.0
