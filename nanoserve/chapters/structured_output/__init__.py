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
    backend.py           StructuredOutputBackend, StructuredOutputGrammar: what compiles, what masks
    automaton.py         a backend of our own, for regex and choice
    backend_xgrammar.py  xgrammar: JSON schemas, EBNF, structural tags, too
    backend_guidance.py  llguidance: the same
    vocabulary.py        the bytes of each token
    manager.py           StructuredOutputManager: compiles in other threads; a step's masks
    compile_process.py   compiles in a process that may be killed

*In the engine.* LLMEngine.make_request has the grammar compiled; Sequence.is_ready waits for it.
Scheduler.update_from_output advances it by the new tokens. While the device computes the next step,
RequestState asks for the mask of each row. A request's next mask depends on its last token, so such a
step is read before the next one is scheduled (Sequence.needs_sync).

Left out: the backends Outlines and LM Format Enforcer (a subclass of StructuredOutputBackend takes
either), and reasoning before the grammar begins.

vLLM: vllm/model_executor/guided_decoding/ (V0); vllm/v1/structured_output/ (V1).
"""

from nanoserve.chapters.structured_output.params import (
    StructuredOutputsConfig,
    StructuredOutputsParams,
)

__all__ = ["StructuredOutputsConfig", "StructuredOutputsParams"]
