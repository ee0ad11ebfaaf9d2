"""Can a model be made to write what a program can read?

A grammar says which texts are allowed: a JSON schema, a regular expression, a list of choices. Each
token is drawn from the logits of the model; before that, the logits of all tokens that would lead
out of the grammar become -inf. With the regex [0-9]+ and three tokens of the output known:

    output so far   "2" "0" "2"
    vocabulary      "a"   "5"   "12"   "7b"   <eos>
    may follow       no   yes    yes     no     yes      one bit for each token: the bitmask
    logits          -inf  1.2    0.3   -inf    -0.7      one of these is drawn

So the output is valid whatever the model is: it chooses among the valid texts. Its end-of-sequence
token is allowed where the grammar may end, and nowhere else. (An output that max_tokens or a stop
string cuts is the beginning of a valid text.)

    params.py            StructuredOutputsParams: what a request asks for
    parts.py             what that changes in the engine
    manager.py           StructuredOutputManager: who compiles it, and when
    backend.py           StructuredOutputBackend, StructuredOutputGrammar: what compiles, what masks
    vocabulary.py        the bytes of each token
    dfa.py               the lesson: a regular expression becomes an automaton over bytes,
    automaton.py         and the automaton masks of tokens
    backend_xgrammar.py  JSON schemas, EBNF and structural tags, by the package xgrammar

Left out: the backends guidance, Outlines and LM Format Enforcer, reasoning before the grammar
begins, jump-forward decoding, masks made by several threads.

vLLM: vllm/model_executor/guided_decoding/ (V0); vllm/v1/structured_output/ (V1, 0.32).
"""

from nanoserve.chapters.structured_output.params import (
    StructuredOutputsConfig as StructuredOutputsConfig,
)
from nanoserve.chapters.structured_output.params import (
    StructuredOutputsParams as StructuredOutputsParams,
)
