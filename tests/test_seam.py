"""What may be replaced: by a chapter, or by a class of your own."""

from __future__ import annotations

import inspect
import pickle
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import nanoserve
from nanoserve import LLM, LLMEngine, SamplingParams
from nanoserve.chapters import CHAPTERS, PARTS, compose
from nanoserve.model_runner import ModelRunner
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence

HOME = Path(nanoserve.__file__).parent
GREEDY = SamplingParams(temperature=0, max_tokens=8)
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
ALL = {"enable_lora": True, "speculative_config": NGRAM, "kv_offloading_size": 0.01}
OWN = {
    "llm_cls": LLM,
    "engine_cls": LLMEngine,
    **{each: getattr(LLMEngine, each) for each in PARTS},
}


def methods_of(cls: type) -> dict[str, str]:
    """Name -> "name(positional arguments)", of the methods without an underscore."""
    found = {}
    for name, each in vars(cls).items():
        if inspect.isfunction(each) and not name.startswith("_"):
            parameters = [*inspect.signature(each).parameters.values()][1:]
            names = [str(p).split(":")[0].split("=")[0] for p in parameters]
            positional = [n for n, p in zip(names, parameters, strict=True) if p.kind.value < 3]
            found[name] = f"{name}({', '.join(positional)})"
    return found


# What chapters, experiments and exercises may override. To change a line is a decision.
SEAM = """
LLM: abort_request(request_ids), add_request(request_id, prompt, params), chat(messages,
    sampling_params, use_tqdm, lora_request, priority, chat_template, add_generation_prompt,
    continue_final_message, tools, chat_template_kwargs), close(), generate(prompts,
    sampling_params), get_default_sampling_params(), get_tokenizer(), has_unfinished_requests(),
    make_requests(prompts, params, output_kind), reset_prefix_cache(), run_requests(requests),
    step(), stream(prompts, sampling_params)
LLMEngine: abort_request(request_ids), add(request), add_request(request_id, prompt, params),
    between_steps(), close(), fail_request(request_id, error), has_request(request),
    has_unfinished_requests(), make_request(request_id, prompt, params, priority, cache_salt),
    process_outputs(updates), recover(error), reset_prefix_cache(), run_step(), settle(), step(),
    update(step, model_output)
EngineConfig: resolve(model)
Sequence: make_branch(branch)
Request: build_output(changed), fail(message, finish_reason), process(updates, finish)
BlockManager: allocate(seq, cached_blocks), append_slots(seq, num_new_tokens), cache_blocks(seq,
    start, end), can_allocate(seq, cached_blocks), can_append_slots(seq, num_new_tokens),
    can_swap_in(seq), can_swap_out(seq), copy_on_write(seq), find_hash(parent, token_ids),
    fork(parent, child), free(seq), get_computed_blocks(seq), hashes_of(seq, num_blocks),
    num_blocks_for(num_tokens), reset(), reset_prefix_cache(), swap_in(seq), swap_out(seq),
    take_block(), take_copies()
Scheduler: add(seq), admit(seq, step), append_tokens(seq, token_ids), finish(seq_id, status,
    stop_reason), finish_request(root, status), first_chunk(num_uncomputed, step),
    fork_branch(parent, branch, first), has_seq_slot(seq), is_blocked(seq), is_ready(seq),
    make_new_sequence(seq), make_output(step), preempt(seq), preempt_all(), preempt_until_fits(seq,
    num_tokens), remove(seq), schedule(), schedule_running(step), schedule_tokens(seq, num_tokens,
    step), schedule_waiting(step), start_running(seq), swap_in(seq, step),
    update_from_output(scheduler_output, model_output), update_sequence(seq, item, model_output),
    urgency(seq)
ModelRunner: build_model(max_model_len, layer_config), collect(pending, tokens, output),
    draw(input_batch, hidden), forward(input_batch), gather_arrays(step, rows),
    gather_prompt_logprobs(input_batch, hidden), keep_sampled(input_batch, sampled),
    kv_cache_specs(), launch(step), load_model(), make_sampling_batch(input_batch),
    prepare_inputs(step, rows, shape), read(pending), sample(input_batch, hidden), send(),
    send_inputs(step, arrays, shape), update_batch(step)
InputProcessor: check_prompt(token_ids), check_sampling(params), check_vocabulary(token_ids, where),
    process(request_id, prompt, sampling_params, priority, cache_salt), read_prompt(prompt),
    render_chat(messages), require_tokenizer(what), take_seq_ids(number), tokenize(text)
"""


def test_what_may_be_overridden() -> None:
    table = "".join(
        f"\n{cls.__name__}: {', '.join(sorted(methods_of(cls).values()))}" for cls in OWN.values()
    )
    assert SEAM.split() == table.split(), table


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_keeps_the_rules(chapter: str) -> None:
    parts, wrong = import_module(f"nanoserve.chapters.{chapter}.parts").PARTS, []
    for part, cls in parts.items():
        core = OWN[part]
        for name, signature in methods_of(cls).items():
            before = methods_of(core).get(name, signature)
            passes_on = "*args" in signature or before.startswith(signature[:-1] + ",")  # by name
            if signature != before and not passes_on:
                wrong.append(f"{cls.__name__}.{signature} changes {before}")
        private = {n for n in vars(cls) if n.startswith("_") and not n.startswith("__")}
        wrong += [f"{cls.__name__} overrides {name}" for name in private & {*dir(core)}]
    core_names = {name for cls in OWN.values() for name in dir(cls) if re.match("_[a-z]", name)}
    for path in (HOME / "chapters" / chapter).rglob("*.py"):
        source = path.read_text()
        used = {name for name in core_names if re.search(rf"\.{name}\b", source)}
        wrong += [f"{path.name} uses {n} of the core" for n in used if f"def {n}(" not in source]
    assert wrong == []


class Mine(Scheduler):
    """Last come, first served."""

    num_calls = 0

    def schedule(self) -> Any:
        self.num_calls += 1
        return super().schedule()

    def urgency(self, seq: Sequence) -> tuple[float, ...]:
        return (-seq.metrics.queued_ts, seq.seq_id)


class MyRunner(ModelRunner):
    pass


class MyEngine(LLMEngine):
    scheduler_cls = Mine


def generate(**options: Any) -> list[str]:
    with LLM(max_num_seqs=2, **options) as llm:
        outputs = llm.generate(["The cat", "Once", "A"], GREEDY, use_tqdm=False)
        assert not any(llm.llm_engine.block_manager.pool.ref_counts)
        scheduler = llm.llm_engine.scheduler
        assert not isinstance(scheduler, Mine) or scheduler.num_calls > 8
        return [output.outputs[0].text for output in outputs]


def test_a_class_of_your_own_is_the_base_of_the_stack() -> None:
    wanted = generate()
    for options in ({"scheduler_cls": Mine}, {"engine_cls": MyEngine}, {"runner_cls": MyRunner}):
        assert generate(**options) == generate(**options, **ALL) == wanted
    engine = compose({"engine_cls": MyEngine, "runner_cls": MyRunner, **ALL})[0]
    assert issubclass(engine, MyEngine) and issubclass(engine.runner_cls, MyRunner)
    assert engine.scheduler_cls.__mro__.index(Mine) == len(engine.scheduler_cls.__mro__) - 3
    for part in PARTS:  # a rank gets them so
        assert pickle.loads(pickle.dumps(getattr(engine, part))) is getattr(engine, part)


def test_an_error_in_your_class_comes_out_as_itself() -> None:
    class Wrong(Scheduler):
        def urgency(self, seq: Sequence) -> Any:
            return seq.no_such_field

    with LLM(scheduler_cls=Wrong) as llm:
        with pytest.raises(AttributeError, match="no_such_field"):
            llm.generate("The cat", GREEDY, use_tqdm=False)
        assert not llm.has_unfinished_requests()


def test_options_of_a_chapter_that_is_off() -> None:
    off = {"enable_lora": False, "speculative_config": None, "kv_offloading_size": None}
    LLM(**off, pipeline_parallel_size=1).close()
    for given in ({"max_loras": 2}, {"max_loras": 2, "enable_lora": False}):
        with pytest.raises(ValueError, match=r"max_loras.*enable_lora"):
            LLM(**given)
    with pytest.raises(TypeError, match="max_num_seqs"):
        LLM(max_num_seq=2)


@pytest.mark.parametrize(
    "chapters",
    [[*CHAPTERS], *(pytest.param([each], marks=pytest.mark.slow) for each in CHAPTERS)],
    ids="-".join,
)
def test_a_chapter_is_deleted_with_its_folder_and_its_line(
    chapters: list[str], tmp_path: Path
) -> None:
    leave_out = shutil.ignore_patterns("bench", "teaching", "__pycache__")
    copy = shutil.copytree(HOME, tmp_path / "nanoserve", ignore=leave_out)
    source = (copy / "chapters" / "__init__.py").read_text()
    for chapter in chapters:
        shutil.rmtree(copy / "chapters" / chapter)
        source = re.sub(rf'\n    "{chapter}": .*', "", source)
    (copy / "chapters" / "__init__.py").write_text(source)
    code = """if True:
        from nanoserve import LLM, SamplingParams
        params = SamplingParams(temperature=0, max_tokens=5)
        print(LLM().generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].text)"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert "there was" in done.stdout, done.stderr
