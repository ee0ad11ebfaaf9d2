"""Lab 7: ranks.

A model that is too large for one device is cut, so that each rank holds a part of each matrix. You
decide where to cut, so that two matrices need one sum; and write the sum, as a ring. Read the
headers of nanoserve/layers.py and nanoserve/distributed/parallel.py. No GPU and no second process
is needed: the tests play all ranks.
"""

from collections.abc import Callable

from torch import Tensor


def column_shard(weight: Tensor, rank: int, size: int) -> Tensor:
    """The rank's part of W [out, in], cut by outputs: [out / size, in]. y = x W^T. Raises
    ValueError if the outputs cannot be divided evenly.
    """
    raise NotImplementedError("Task 7.1")


def row_shard(weight: Tensor, rank: int, size: int) -> Tensor:
    """The rank's part of W [out, in], cut by inputs: [out, in / size]. Raises ValueError, too."""
    raise NotImplementedError("Task 7.1")


def mlp(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    rank: int,
    size: int,
    all_reduce: Callable[[Tensor], Tensor],
) -> Tensor:
    """relu(x up^T) down^T on one rank of several: each rank has all of x [num_tokens, hidden] and
    multiplies by its own parts of up [inner, hidden] and down [hidden, inner] only. all_reduce(t)
    is the sum of all ranks' t. Call it once.
    """
    raise NotImplementedError("Task 7.2")


def heads_of(num_heads: int, num_kv_heads: int, rank: int, size: int) -> tuple[range, range]:
    """(query heads, key heads) of a rank. Query heads are divided evenly, and each rank has the key
    heads that its query heads read: head h reads key head h // (num_heads // num_kv_heads). With
    fewer key heads than ranks, neighbouring ranks hold the same one.
    """
    raise NotImplementedError("Task 7.3")


def ring_all_reduce(
    x: Tensor, rank: int, size: int, send: Callable[[Tensor], None], receive: Callable[[], Tensor]
) -> Tensor:
    """The sum of all ranks' x [length], on every rank. All ranks run this at the same time.

    send(t) hands t to the next rank of the ring, (rank + 1) % size; receive() waits for what the
    rank before has sent. Cut x into `size` pieces (torch.chunk or tensor_split). In size - 1 rounds
    each rank passes a piece on, to which the next one adds its own; then every rank has one whole
    sum, and size - 1 more rounds pass the sums on. So each rank sends 2 (size - 1) pieces, about
    twice its x, however many ranks there are.
    """
    raise NotImplementedError("Task 7.4")


def argmax_of_parts(parts: list[Tensor]) -> Tensor:
    """The likeliest token of each row, when each rank has the logits [num_rows, vocab / size] of a
    part of the vocabulary. From each rank take one value and one index a row, no more: that is what
    would be sent. Of equal logits the first token. -> [num_rows] int64.
    """
    raise NotImplementedError("Task 7.5")
