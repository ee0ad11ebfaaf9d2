"""What an engine says about itself, and who decides where it goes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator

import pytest
from engines import EOS, finish, make_engine, params

from nanoserve import LLM, LLMEngine
from nanoserve import logger as module
from nanoserve.logger import LEVEL_ALIASES, LEVELS, configure_logging, init_logger, warning_once


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], logging.Logger]]:
    """fresh() in a test: logging becomes as in a new script, with no handlers and no levels.

    Not done here, because pytest adds its own handlers between a fixture and the test.
    """
    ours = logging.getLogger("nanoserve")
    before = ours.level

    def forget_handlers() -> logging.Logger:
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        monkeypatch.setattr(ours, "handlers", [])
        monkeypatch.delenv("NANOSERVE_LOGGING_LEVEL", raising=False)
        monkeypatch.setattr(module, "WARNED", set())
        ours.setLevel(logging.NOTSET)
        return ours

    yield forget_handlers
    ours.setLevel(before)


def test_a_plain_script_sees_info_and_warnings(
    fresh: Callable[[], logging.Logger], capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr; and calling configure_logging twice shows nothing twice."""
    fresh()
    configure_logging()
    configure_logging()
    logger = init_logger("nanoserve.engine")
    logger.debug("hidden")
    logger.info("model %s", "demo")
    logger.warning("too few blocks")
    expected = "nanoserve: model demo\nnanoserve WARNING: too few blocks\n"
    assert capsys.readouterr() == ("", expected)


def test_a_failure_is_shown_with_its_traceback(
    fresh: Callable[[], logging.Logger], capsys: pytest.CaptureFixture[str]
) -> None:
    fresh()
    configure_logging()
    try:
        raise KeyError("block 7")
    except KeyError:
        init_logger("nanoserve.engine").exception("a listener failed")
    shown = capsys.readouterr().err
    assert shown.startswith("nanoserve ERROR: a listener failed\nTraceback")
    assert "KeyError: 'block 7'" in shown


@pytest.mark.parametrize("level", [*LEVELS, *LEVEL_ALIASES])
def test_the_level_from_the_environment(
    level: str,
    fresh: Callable[[], logging.Logger],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exactly the messages of this level and above. Lower case is understood, and Python's other
    names."""
    ours = fresh()
    monkeypatch.setenv("NANOSERVE_LOGGING_LEVEL", level.lower())
    configure_logging()
    for each in LEVELS:
        ours.log(getattr(logging, each), "at %s", each)
    shown = [line.split()[-1] for line in capsys.readouterr().err.splitlines()]
    assert shown == list(LEVELS[LEVELS.index(LEVEL_ALIASES.get(level, level)) :])


def test_the_level_may_change_between_two_engines(
    fresh: Callable[[], logging.Logger],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours = fresh()
    configure_logging()
    monkeypatch.setenv("NANOSERVE_LOGGING_LEVEL", "ERROR")
    configure_logging()
    ours.info("hidden")
    assert capsys.readouterr() == ("", "")


def test_a_wrong_level_is_refused(
    fresh: Callable[[], logging.Logger], monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh()
    monkeypatch.setenv("NANOSERVE_LOGGING_LEVEL", "loud")
    with pytest.raises(ValueError, match=r"NANOSERVE_LOGGING_LEVEL is 'LOUD'; allowed: DEBUG,"):
        configure_logging()


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_application_that_configures_logging_decides(
    when: str, fresh: Callable[[], logging.Logger], capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first engine or after it: one line for each message, in the application's form,
    and its level is kept."""
    ours = fresh()
    if when == "after":
        configure_logging()
    logging.basicConfig(format="app %(name)s %(message)s", level=logging.INFO)
    if when == "before":
        configure_logging()
        assert ours.level == logging.NOTSET
        assert not ours.handlers
    init_logger("nanoserve.engine").info("ready")
    assert capsys.readouterr().err == "app nanoserve.engine ready\n"


def test_other_loggers_are_left_alone(
    fresh: Callable[[], logging.Logger], capsys: pytest.CaptureFixture[str]
) -> None:
    fresh()
    root = logging.getLogger()
    before = root.level
    configure_logging()
    assert root.handlers == []
    assert root.level == before
    logging.getLogger("another").info("hidden")
    assert capsys.readouterr() == ("", "")


def test_every_name_is_below_nanoserve() -> None:
    assert init_logger("nanoserve.tools.doctor").name == "nanoserve.tools.doctor"
    assert init_logger("nanoserve").name == "nanoserve"
    assert init_logger("__main__").name == "nanoserve.__main__"
    assert init_logger("nanoserver").name == "nanoserve.nanoserver"


def test_warning_once(
    fresh: Callable[[], logging.Logger],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours = fresh()
    configure_logging()
    for _ in range(3):
        warning_once(ours, "2 threads on 1 core")
    assert capsys.readouterr().err == "nanoserve WARNING: 2 threads on 1 core\n"


def test_a_notebook_shows_reports_without_red(
    fresh: Callable[[], logging.Logger],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A notebook colours stderr red. There, reports go to stdout, warnings to stderr."""
    ours = fresh()

    class OutStream:
        """What ipykernel puts in the place of sys.stdout."""

        def __init__(self, stream: object) -> None:
            self.stream = stream

        def __getattr__(self, name: str) -> object:
            return getattr(self.stream, name)

    OutStream.__module__ = "ipykernel.iostream"
    monkeypatch.setattr(sys, "stdout", OutStream(sys.stdout))
    configure_logging()
    ours.info("ready")
    ours.warning("slow")
    assert capsys.readouterr() == ("nanoserve: ready\n", "nanoserve WARNING: slow\n")


# -- what an engine says --


def test_the_report_explains_a_slow_run(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of the same form for every engine; each value is one that the user can set."""
    monkeypatch.delenv("NANOSERVE_LOGGING_LEVEL", raising=False)
    caplog.set_level(logging.INFO, "nanoserve")
    options = {"max_num_batched_tokens": 33, "max_num_seqs": 5, "preemption_mode": "swap"}
    engine = make_engine(num_kv_blocks=17, **options)
    lines = [record.getMessage() for record in caplog.records]
    assert [line[:11] for line in lines] == [
        "model      ",
        "device     ",
        "KV cache   ",
        "scheduler  ",
        "           ",
    ]
    assert "(LlamaForCausalLM), max_model_len 64" in lines[0]
    assert lines[1].endswith("none, none, attention=fake")
    assert lines[2].endswith("17 blocks of 4 tokens, prefix caching on")
    assert lines[3].endswith("max_num_seqs 5, token budget 33, chunked prefill on")
    assert lines[4] == "           preemption by swap"
    assert engine.step_listeners == [], "no step is logged"


def test_the_report_names_device_and_threads(
    caplog: pytest.LogCaptureFixture, demo_llm: LLM
) -> None:
    lines = module.startup_report(demo_llm.engine)
    attention = demo_llm.engine.executor.runner.backend.name
    assert lines[1].startswith(f"device     cpu, float32, attention={attention}, ")
    assert lines[1].endswith((" thread", " threads"))
    assert repr(demo_llm) == "LLM(demo, cpu float32, 512 blocks, 0 running, 0 waiting)"
    assert f"attention={attention}" in demo_llm.engine.executor.describe()


def test_the_report_fits_into_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of a large engine on a GPU, behind "nanoserve: "."""
    options = {"max_num_batched_tokens": 131072, "max_num_seqs": 512, "async_scheduling": True}
    engine = make_engine(scheduling_policy="priority", num_kv_blocks=2_000_000, **options)
    text = "device=cuda:0, dtype=torch.bfloat16, attention=triton, CUDA graphs for 35 batch sizes "
    monkeypatch.setattr(engine.executor, "describe", lambda: text + "(1234 MiB)")
    lines = module.startup_report(engine)
    assert [line for line in lines if len("nanoserve: " + line) >= 80] == []
    assert "CUDA graphs for 35 batch sizes (1234 MiB)" in lines[2]
    text = "device=cpu, dtype=torch.bfloat16, attention=torch, model=transformers, "
    text += "tensor parallel on 2 ranks over gloo"
    monkeypatch.setattr(engine.executor, "describe", lambda: text)
    lines = module.startup_report(engine)
    assert [line for line in lines if len("nanoserve: " + line) >= 80] == []
    assert any("tensor parallel on 2 ranks over gloo" in line for line in lines)


def read_steps(engine: LLMEngine, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Run the engine to its end; the lines that its steps have logged."""
    caplog.clear()
    finish(engine)
    return [r.getMessage() for r in caplog.records if r.name == "nanoserve.scheduler"]


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("NANOSERVE_LOG_SCHEDULER", "1")
    monkeypatch.delenv("NANOSERVE_LOGGING_LEVEL", raising=False)
    caplog.set_level(logging.INFO, "nanoserve")


def test_each_step_is_a_line(logged: None, caplog: pytest.LogCaptureFixture) -> None:
    """Who ran with how many tokens, who waits, who ended and why; the free blocks."""
    engine = make_engine(max_num_seqs=1)
    engine.add_request("story", [5, 6, 7, 8, 9], params(max_tokens=2))
    engine.add_request("chat", [9, 8], params(max_tokens=1))
    assert read_steps(engine, caplog) == [
        "step 1: 5 tokens: story 5; waiting: chat; 62 of 64 blocks free",
        "step 2: 1 token: story 1; waiting: chat; finished: story (length); 64 of 64 blocks free",
        "step 3: 2 tokens: chat 2; finished: chat (length); 64 of 64 blocks free",
    ]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preemption_is_named_when_it_happens(
    mode: str, logged: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Two requests that outgrow four blocks: as many lines say so as there were preemptions."""
    engine = make_engine(num_kv_blocks=4, preemption_mode=mode, enable_prefix_caching=False)
    engine.add_request("a", [5, 6, 7], params(max_tokens=9))
    engine.add_request("b", [7, 6, 5], params(max_tokens=9))
    sequences = list(engine.scheduler.sequences.values())
    lines = [line for line in read_steps(engine, caplog) if "preempted" in line]
    assert len(lines) == sum(seq.metrics.num_preemptions for seq in sequences) > 0
    assert all("waiting: b; preempted: b;" in line for line in lines)


def test_a_long_list_is_cut(logged: None, caplog: pytest.LogCaptureFixture) -> None:
    """And the completions of a request have an index each."""
    engine = make_engine(eos_token_ids=(EOS,))
    engine.add_request("r", [5, 6], params(n=10, max_tokens=2))
    lines = read_steps(engine, caplog)
    assert lines[0].startswith("step 1: 2 tokens: r[0] 2; ")
    names = ", ".join(f"r[{index}] 1" for index in range(8))
    assert lines[1].startswith(f"step 2: 10 tokens: {names} and 2 more; ")


def test_reprs_say_where_an_engine_is() -> None:
    engine = make_engine(num_kv_blocks=4, max_num_seqs=1)
    engine.add_request("a", [5, 6, 7, 8, 9], params())
    engine.add_request("b", [7, 6, 5], params())
    engine.step()
    name = engine.model_config.path.name
    assert repr(engine) == f"LLMEngine({name}, none none, 4 blocks, 1 running, 1 waiting)"
    assert repr(engine.scheduler) == "Scheduler(1 running, 1 waiting, 0 swapped)"
    assert repr(engine.block_manager) == "BlockManager(2 of 4 blocks free)"
    engine.close()
    assert repr(engine) == f"LLMEngine({name}, closed)"
