"""Which of several replicas should a request go to?

To the one that has computed most of its prompt already, unless that one has too much to do. Each
replica has a prefix cache of its own, so the next turn of a chat costs little where the turns
before it were computed, and the whole prompt elsewhere. The router does not ask the replicas what
they have: it remembers what it has sent to them. It needs no tokenizer, as equal beginnings of a
text are equal beginnings of its tokens (but for the last of them).

    a prompt, in chunks (here of 16 characters)   "You are a helpfu|l bot. User: Hi.| Bot: Hello."
    for each full chunk, a hash of all up to its end                h1               h2
    hashes of what replica 0 was sent before                        h1               h2
                   replica 1                                        h1               h5

    choose(prompt, loads={0: 3, 1: 2})    0: it knows two chunks of the prompt; replica 1 knows one
    choose(prompt, loads={0: 30, 1: 2})   1: replica 0 has too much to do
    choose(other, loads={0: 3, 1: 2})     1: nobody knows it, and replica 1 has the least to do

A replica has too much to do if it serves more than balance_abs_threshold requests more than the
least loaded one, and more than balance_rel_threshold times as many. A share of the prompt below
cache_threshold counts as nothing. Of several replicas that know as much, the least loaded one is
chosen; of those, the one with the fewest chunks; of those, the one that has waited longest for a
prompt. Memory is bounded: a replica's least recently used chunks are forgotten, as its prefix cache
forgets blocks.

SGLang's cache-aware policy has these three thresholds and a radix tree of the texts. It compares
the most and the least loaded replica, and leaves affinity while they differ too much; here only the
replica that would be chosen is compared, so that the others keep their chats. Ray Serve's
PrefixCacheAffinityRouter does as SGLang's, with one threshold (imbalanced_threshold, the difference
of the lengths of the queues), and takes the least loaded of two replicas drawn at random if it is
passed. vLLM's own balancer looks at the loads alone.

Left out: asking the replicas which blocks they hold (vLLM's KV events, which NVIDIA's Dynamo and
llm-d use): exact, and a stream of messages from each replica.

SGLang: sgl-router/src/policies/cache_aware.rs; Ray: python/ray/llm/_internal/serve/
routing_policies/prefix_aware/. vLLM: vllm/v1/engine/core_client.py DPLBAsyncMPClient (V1).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Generic, Protocol, TypeVar

Replica = TypeVar("Replica", bound=Hashable)  # however its owner names it: a number, an id

CHUNK_CHARACTERS, CHUNK_TOKENS = 64, 16  # about as long: the size of a KV block
MOST_CHUNKS = 1024  # of a prompt; what comes after 64 Ki characters makes no difference


class Router(Protocol[Replica]):
    """A policy. The same calls give the same answers."""

    def choose(self, prefix: str | Sequence[int], loads: Mapping[Replica, int]) -> Replica:
        """The replica for a prompt: one of `loads`, which has the number of requests that each
        replica is serving, without replicas that are gone. `add` says that it was sent there."""

    def add(self, prefix: str | Sequence[int], replica: Replica) -> None:
        """A prompt has been sent to this replica."""

    def remove(self, replica: Replica) -> None:
        """A replica is gone, or has lost its cache. It may be added to later."""


class RoundRobin(Generic[Replica]):
    """Each replica in turn, whatever the prompt."""

    def __init__(self) -> None:
        self._num_chosen = 0

    def choose(self, prefix: str | Sequence[int], loads: Mapping[Replica, int]) -> Replica:
        self._num_chosen += 1
        return list(loads)[(self._num_chosen - 1) % len(loads)]

    def add(self, prefix: str | Sequence[int], replica: Replica) -> None:
        pass

    def remove(self, replica: Replica) -> None:
        pass


class PrefixRouter(Generic[Replica]):
    """The replica that knows the prompt, unless it has too much to do.

    Invariant: with the hash of a chunk, a replica has those of all chunks in front of it, and at
    most max_chunks in all.
    """

    def __init__(
        self,
        *,
        cache_threshold: float = 0.1,
        balance_abs_threshold: int = 8,
        balance_rel_threshold: float = 1.5,
        max_chunks: int = 2**16,
    ) -> None:
        """cache_threshold: share of a prompt, from 0 to 1. balance_abs_threshold: requests.
        max_chunks: of each replica, about 10 MB; 2**16 are a million tokens."""
        if not 0 <= cache_threshold <= 1:
            raise ValueError(f"cache_threshold is {cache_threshold}; allowed: 0 to 1.")
        if balance_abs_threshold < 0 or balance_rel_threshold < 1:
            raise ValueError(
                f"balance_abs_threshold is {balance_abs_threshold}, balance_rel_threshold "
                f"{balance_rel_threshold}; allowed: 0 or more, 1 or more."
            )
        if max_chunks < 1:
            raise ValueError(f"max_chunks is {max_chunks}; allowed: 1 or more.")
        self.cache_threshold = cache_threshold
        self.balance_abs_threshold = balance_abs_threshold
        self.balance_rel_threshold = balance_rel_threshold
        self.max_chunks = max_chunks
        # The hashes of each replica, the least recently used first; values mean nothing.
        self._chunks: dict[Replica, OrderedDict[bytes, None]] = defaultdict(OrderedDict)
        self._num_added = 0
        self._last_added: dict[Replica, int] = {}  # which prompt was the last that it was sent

    def choose(self, prefix: str | Sequence[int], loads: Mapping[Replica, int]) -> Replica:
        def by_load(replica: Replica) -> tuple[int, int, int]:
            # All are full of chunks some day; were the first one chosen then, its cache would
            # have to do for all.
            waits_since = self._last_added.get(replica, 0)
            return loads[replica], self.num_chunks(replica), waits_since

        least = min(loads, key=by_load)
        holders, share = self.match(prefix, loads)
        best = min(holders, key=by_load)
        if share < self.cache_threshold or self._is_busy(loads[best], loads[least]):
            return least
        return best

    def match(
        self, prefix: str | Sequence[int], replicas: Iterable[Replica]
    ) -> tuple[list[Replica], float]:
        """The replicas that know the longest beginning of the prompt, and its share of the prompt
        in full chunks. (all, 0.0) if nobody knows the first chunk."""
        hashes = hash_chunks(prefix)
        known = {replica: self._num_known(hashes, replica) for replica in replicas}
        most = max(known.values())
        holders = [replica for replica, number in known.items() if number == most]
        return holders, most / max(1, len(hashes))

    def _num_known(self, hashes: list[bytes], replica: Replica) -> int:
        """How many of these chunks it has: the first ones, so that halving finds the last."""
        chunks: Mapping[bytes, None] = self._chunks.get(replica, {})
        return bisect_left(hashes, True, key=lambda each: each not in chunks)

    def add(self, prefix: str | Sequence[int], replica: Replica) -> None:
        self._num_added += 1
        self._last_added[replica] = self._num_added
        chunks = self._chunks[replica]
        for each in reversed(hash_chunks(prefix)):  # the first chunk is used last, forgotten last
            chunks[each] = None
            chunks.move_to_end(each)
        while len(chunks) > self.max_chunks:
            chunks.popitem(last=False)

    def remove(self, replica: Replica) -> None:
        self._chunks.pop(replica, None)
        self._last_added.pop(replica, None)

    def num_chunks(self, replica: Replica) -> int:
        """How many chunks it was sent, without those that are forgotten."""
        return len(self._chunks.get(replica, ()))

    def _is_busy(self, load: int, least: int) -> bool:
        is_far = load - least > self.balance_abs_threshold
        return is_far and load > self.balance_rel_threshold * least


def hash_chunks(prefix: str | Sequence[int]) -> list[bytes]:
    """For each full chunk of the prompt, a hash of all up to its end.

    >>> len(hash_chunks("a" * 200)), len(hash_chunks([7] * 33))
    (3, 2)
    """
    size = CHUNK_CHARACTERS if isinstance(prefix, str) else CHUNK_TOKENS
    num_chunks = min(len(prefix) // size, MOST_CHUNKS)
    running, hashes = blake2b(digest_size=8), []
    for start in range(0, num_chunks * size, size):
        chunk = prefix[start : start + size]
        text = chunk if isinstance(chunk, str) else " ".join(map(str, chunk))
        running.update(text.encode("utf-8", "surrogatepass"))
        hashes.append(running.digest())
    return hashes
