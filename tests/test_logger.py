"""Messages: shown when nobody has configured logging, the application's business otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from nanoserve import logger as module
from nanoserve.logger import LEVELS, configure_logging, init_logger, warning_once


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


@pytest.mark.parametrize("level", LEVELS)
def test_the_level_from_the_environment(
    level: str,
    fresh: Callable[[], logging.Logger],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exactly the messages of this level and above. Lower case is understood, too."""
    ours = fresh()
    monkeypatch.setenv("NANOSERVE_LOGGING_LEVEL", level.lower())
    configure_logging()
    for each in LEVELS:
        ours.log(getattr(logging, each), "at %s", each)
    shown = [line.split()[-1] for line in capsys.readouterr().err.splitlines()]
    assert shown == list(LEVELS[LEVELS.index(level) :])


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
    import sys

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
