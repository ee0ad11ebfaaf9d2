"""What may be replaced: by a chapter, or by a class of your own."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import nanoserve
from nanoserve import LLM, LLMEngine, SamplingParams
from nanoserve.chapters import CHAPTERS, PARTS, compose, find_options, find_parts
from nanoserve.config import EngineConfig
from nanoserve.entrypoints.options import Options
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


def test_what_may_be_overridden() -> None:
    """By chapters, experiments and exercises. To change a line of seam.txt is a decision."""
    found = [
        f"{cls.__name__}.{signature}"
        for cls in OWN.values()
        for signature in methods_of(cls).values()
    ]
    assert found == (Path(__file__).parent / "seam.txt").read_text().splitlines()


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_keeps_the_rules(chapter: str) -> None:
    wrong = []
    for part, cls in find_parts(chapter).items():
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
    with pytest.raises(ValueError, match="pipeline_parallel_size"):
        LLM(pipeline_parallel_size=0)


def test_an_option_of_your_own() -> None:
    @dataclass(frozen=True)
    class MyConfig(EngineConfig):
        patience: int = 3

    for options in ({}, ALL):
        with LLM(config_cls=MyConfig, patience=5, **options) as llm:
            assert llm.llm_engine.config.patience == 5


def delete(chapters: list[str], tmp_path: Path) -> None:
    """A copy of the package without these: each has a folder, and a line."""
    leave_out = shutil.ignore_patterns("bench", "teaching", "__pycache__")
    copy = shutil.copytree(HOME, tmp_path / "nanoserve", ignore=leave_out)
    source = (copy / "chapters" / "__init__.py").read_text()
    for chapter in chapters:
        shutil.rmtree(copy / "chapters" / chapter)
        source = re.sub(rf'\n    "{chapter}": .*', "", source)
    (copy / "chapters" / "__init__.py").write_text(source)


def test_all_chapters_are_deleted(tmp_path: Path) -> None:
    delete([*CHAPTERS], tmp_path)
    code = """if True:
        from nanoserve import LLM, SamplingParams
        params = SamplingParams(temperature=0, max_tokens=5)
        print(LLM().generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].text)
        for options in ({"enable_lora": True}, {"kv_offloading_size": 1}):
            try:
                LLM(**options).close()
            except ValueError as error:
                print(f"missing: {error}")"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert "there was" in done.stdout, done.stderr
    assert done.stdout.count("missing:") == 2


@pytest.mark.slow
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_is_deleted_and_the_tests_of_the_rest_pass(chapter: str, tmp_path: Path) -> None:
    """All other chapters in one engine, and LLM's own tests."""
    delete([chapter], tmp_path)
    tests = Path(__file__).parent
    shutil.copytree(tests, tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(tests.parent / "setup.cfg", tmp_path)
    files = ["tests/test_same_tokens.py", "tests/test_llm.py"]
    command = [sys.executable, "-m", "pytest", "-n0", "-x", "-k", "together or prompts"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [*command, *files], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr


def test_an_editor_shows_the_options_that_there_are() -> None:
    """Options, for editors, has the names and types of all config classes, and of the parts."""
    found = dict(EngineConfig.__annotations__)
    for chapter in CHAPTERS:
        config_cls = find_parts(chapter).get("config_cls", EngineConfig)
        found |= {name: config_cls.__annotations__[name] for name in find_options(chapter)}
    found |= dict.fromkeys(("engine_cls", *PARTS), "type")
    del found["model"]
    shown = {name: hint.__forward_arg__ for name, hint in Options.__annotations__.items()}
    assert shown == found
