"""How does a class of your own change the logits of a whole batch?

A function in SamplingParams(logits_processors=[...]) sees one row of logits at a time (V0's way). A
LogitsProcessor of vLLM V1 belongs to the engine: it sees the logits of all requests of a step as
one tensor, and is told which request has which row.

    class OnlyEven(LogitsProcessor): ...           LLM(logits_processors=[OnlyEven])

    step   requests   BatchUpdate, for update_state
    1      a b c      added (0, a) (1, b) (2, c)
    2      a b c      None: nothing has changed
    3      a c d      added (1, d): b has ended, d takes its row; moved 2 <-> 1
    4      d          removed 0, 1; moved 2 -> 0

`added` has (row, SamplingParams, prompt token ids, output token ids). The last list is the same
object from step to step, and always holds the output so far. A request says what it wants in
SamplingParams(extra_args={...}).

An AdapterLogitsProcessor keeps the rows for you: it asks for a function for each request. What a
class raises ends all requests of the step, since it is the engine's, and not of one request.

Left out: processors that do not change the argmax run where the others do, before penalties and
temperature (vLLM: after them); plugins that are found by entry points. Speculative decoding is
refused, as in vLLM: a draft has a row, too.

vLLM: vllm/v1/sample/logits_processor/: interface.py, state.py, __init__.py (V1).
"""

from nanoserve.chapters.logits_processors.interface import (
    AdapterLogitsProcessor as AdapterLogitsProcessor,
)
from nanoserve.chapters.logits_processors.interface import BatchUpdate as BatchUpdate
from nanoserve.chapters.logits_processors.interface import LogitsProcessor as LogitsProcessor
from nanoserve.chapters.logits_processors.interface import MoveDirectionality as MoveDirectionality
