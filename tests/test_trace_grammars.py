"""What the pictures of a grammar show is what its automaton does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from nanoserve import LLM, RequestOutput, SamplingParams
from nanoserve.extras import lesson, trace
from nanoserve.extras.structured_output import StructuredOutputsParams
from nanoserve.extras.structured_output.automaton import TokenAutomaton, TokenTrie
from nanoserve.extras.structured_output.dfa import build_nfa, determinize
from nanoserve.extras.structured_output.vocabulary import Vocabulary
from nanoserve.extras.trace.frames import Tokens
from nanoserve.extras.trace.grammars import choices_of, edges_of, texts_to

matplotlib = pytest.importorskip("matplotlib")
DFA = determinize(build_nfa("-?[0-9a]+|é ?"))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    matplotlib.use("agg")
    with lesson.small_llm() as small:
        yield small


def shown() -> Counter[str]:
    """The texts of the last picture."""
    import matplotlib.pyplot as plt
    from matplotlib.text import Text

    return Counter(text.get_text() for text in plt.gcf().findobj(Text))


def test_edges_and_texts_are_those_of_the_table() -> None:
    texts, edges = texts_to(DFA), edges_of(DFA)
    assert all(DFA.walk(1, text) == state for state, text in texts.items())
    assert len(texts) == len(DFA.is_accepting) - 1  # all but DEAD
    minus, digit, accent = (DFA.walk(1, text) for text in (b"-", b"0", b"\xc3"))
    assert edges[1, minus] == "-"
    assert edges[1, digit] == edges[minus, digit] == edges[digit, digit] == "0-9 a"
    e = DFA.walk(1, "é".encode())
    assert (edges[1, accent], edges[accent, e]) == ("C3", "A9")
    assert edges[e, DFA.walk(e, b" ")] == "␣"


def test_the_automaton_has_every_state_and_every_arrow(llm: LLM) -> None:
    trace.automaton("title", DFA)
    wanted = Counter(map(str, texts_to(DFA))) + Counter(edges_of(DFA).values())
    assert wanted <= shown()


def test_the_table_has_every_token_that_is_allowed(llm: LLM) -> None:
    vocabulary = Vocabulary((b"1", b"a1", b"-", b"-0", b"x", None), frozenset([5]))
    tokens = TokenAutomaton(DFA, TokenTrie(vocabulary), vocabulary, frozenset([5]))
    trace.token_table("title", tokens)
    states = texts_to(DFA)
    behind = [tokens.advance(state, token) for state in states for token in range(5)]
    wanted = Counter(f"→ {state}" for state in behind if state)
    wanted["end"] = sum(bool(DFA.is_accepting[state]) for state in states)
    found = shown()
    assert Counter({t: n for t, n in found.items() if t == "end" or t.startswith("→")}) == wanted


def test_a_token_is_overruled_if_the_model_alone_would_take_another(llm: LLM) -> None:
    def ask(rules: StructuredOutputsParams | None) -> RequestOutput:
        params = SamplingParams(temperature=0, max_tokens=20, logprobs=1, structured_outputs=rules)
        return llm.generate(lesson.prompt(llm, "A"), params, use_tqdm=False)[0]

    outputs = {"free": ask(None), "digits": ask(StructuredOutputsParams(regex="[0-9]{3}"))}
    assert all(likeliest == came for likeliest, came in choices_of(outputs["free"]))
    free = outputs["free"].outputs[0].token_ids
    pairs = choices_of(outputs["digits"])
    first = next(i for i, (likeliest, came) in enumerate(pairs) if likeliest != came)
    assert [likeliest for likeliest, _ in pairs[: first + 1]] == list(free[: first + 1])
    trace.overruled("title", outputs, llm)
    found, text = shown(), Tokens(llm.get_tokenizer()).text
    wanted = Counter(text(came, 12) for each in outputs.values() for _, came in choices_of(each))
    wanted.update(text(likeliest, 12) for likeliest, came in pairs if likeliest != came)
    assert wanted <= found
    number = sum(likeliest != came for likeliest, came in pairs)
    assert f"{len(pairs)} tokens, {number} overruled" in found
