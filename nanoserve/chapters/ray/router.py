"""Which of several replicas should a request go to?

To the one that has computed most of its prompt already, unless that one has too much to do. Each
replica has a prefix cache of its own, so the next turn of a chat costs little where the turns
before it were computed, and the whole prompt elsewhere. The router does not ask the replicas what
they have: it remembers what it has sent to them. It needs no tokenizer: texts with equal beginnings
have tokens with equal beginnings.

    a prompt, in chunks (here of 16 characters)   "You are a helpfu|l bot. User: Hi.| Bot: Hello."
    for each full chunk, a hash of all up to its end                h1               h2
    hashes of what replica 0 was sent before                        h1               h2
                   replica 1                                        h1               h5

    choose(prompt, loads={0: 3, 1: 2})     0: it knows two chunks of the prompt, replica 1 knows one
    choose(prompt, loads={0: 30, 1: 2})    1: replica 0 has too much to do
    choose(other, loads={0: 3, 1: 2})      1: nobody knows it, and replica 1 has less to do

Memory is bounded: of each replica the chunks that were used last are known, as in its own cache.

Left out: asking the replicas which blocks they hold. vLLM's own balancer (DPLBAsyncMPClient in
vllm/v1/engine/core_client.py) looks at the loads alone; SGLang's router at prefixes, too.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Mapping
from hashlib import blake2b
from itertools import takewhile

CHUNK = 64  # characters
MAX_CHUNKS = 2**16  # of a replica, and 1024 of a prompt
MOST_MORE, MOST_TIMES = 8, 1.5  # requests above the least load, and times that load: too much to do


class PrefixRouter:
    """Replicas may be named by anything hashable."""

    def __init__(self) -> None:
        self.chunks: dict[Hashable, OrderedDict[bytes, None]] = defaultdict(OrderedDict)

    def choose(self, prompt: str, loads: Mapping[Hashable, int]) -> Hashable:
        """The replica for a prompt. loads: how many requests each one runs; at least one."""
        hashes = hash_chunks(prompt)
        least = min(loads.values())
        most = max(least + MOST_MORE, least * MOST_TIMES)
        known = {name: self.num_known(hashes, name) for name in loads if loads[name] <= most}
        # Of those that know as much, who has least to do; of these, who was sent least.
        return min(known, key=lambda name: (-known[name], loads[name], len(self.chunks[name])))

    def num_known(self, hashes: list[bytes], name: Hashable) -> int:
        return sum(1 for _ in takewhile(self.chunks[name].__contains__, hashes))

    def add(self, prompt: str, name: Hashable) -> None:
        """A prompt was sent to this replica."""
        chunks = self.chunks[name]
        for each in reversed(hash_chunks(prompt)):  # the first chunk is forgotten last
            chunks[each] = None
            chunks.move_to_end(each)
        while len(chunks) > MAX_CHUNKS:
            chunks.popitem(last=False)

    def remove(self, name: Hashable) -> None:
        """A replica is gone."""
        self.chunks.pop(name, None)


def hash_chunks(prompt: str) -> list[bytes]:
    """For each full chunk, a hash of all up to its end: len(hash_chunks("a" * 200)) == 3."""
    running, hashes = blake2b(digest_size=8), []
    for end in range(CHUNK, min(len(prompt), 1024 * CHUNK) + 1, CHUNK):
        running.update(prompt[end - CHUNK : end].encode("utf-8", "surrogatepass"))
        hashes.append(running.digest())
    return hashes
