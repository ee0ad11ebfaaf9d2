"""Which mistakes do students make?

Each mutant is one mistake in one function of the engine: a piece of its source, and what stands
there instead. They are for three uses: the tests of this kit (each mutant must lose points in its
own task), lab 9 (students write tests that find them), and a lecturer's first look at what a wrong
answer says. A lecturer adds own ones in a file of the same form (`read_bank`), which stays private.

    Mutant("1.2", "a shared block stays in the free queue", "del self.free_queue[block_id]", "pass")

The text must occur exactly once in the function, or ValueError says so: so a change of the engine
cannot leave a mutant that changes nothing.

vLLM: none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from nanoserve.extras.course import holes


class Mutant(NamedTuple):
    """One mistake."""

    task: str  # "1.2"
    mistake: str  # a sentence
    right: str  # a piece of the function's source
    wrong: str  # what stands there instead


def mutate(source: str, name: str, mutant: Mutant) -> str:
    """The file's source with the mistake in function `name`. Raises ValueError if the piece is not
    there exactly once."""
    function = holes.find(source, name)
    lines = source.splitlines(keepends=True)
    start, end = function.lineno - 1, function.end_lineno
    text = "".join(lines[start:end])
    if text.count(mutant.right) != 1:
        raise ValueError(
            f"mutant {mutant.task}, {mutant.mistake!r}: {mutant.right!r} stands "
            f"{text.count(mutant.right)} times in {name}; it must stand there once."
        )
    return "".join([*lines[:start], text.replace(mutant.right, mutant.wrong), *lines[end:]])


def read_bank(file: Path) -> list[Mutant]:
    """A lecturer's own mutants: a JSON list of lists of four strings."""
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        return [Mutant(*(str(part) for part in entry)) for entry in entries]
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{file} is no bank of mutants: {error}") from error


MUTANTS = [
    Mutant("1.1", "the most recently freed block is taken", "last=False", "last=True"),
    Mutant("1.1", "the old content can still be found", "self.uncache(block_id)", "pass"),
    Mutant("1.1", "no reference is noted", "self.ref_counts[block_id] = 1", "pass"),
    Mutant("1.2", "a shared block stays in the queue", "del self.free_queue[block_id]", "pass"),
    Mutant("1.2", "the reference is not counted", "self.ref_counts[block_id] += 1", "pass"),
    Mutant(
        "1.3",
        "the prefix cache forgets a block when it is freed",
        "self.free_queue[block_id] = None\n",
        "self.free_queue[block_id] = None\n            self.uncache(block_id)\n",
    ),
    Mutant(
        "1.3",
        "a block that nobody can find goes to the end",
        "self.free_queue.move_to_end(block_id, last=False)",
        "pass",
    ),
    Mutant(
        "1.3",
        "freed with the first reference",
        "if self.ref_counts[block_id] == 0:",
        "if self.ref_counts[block_id] <= 1 and block_id not in self.free_queue:",
    ),
    Mutant(
        "1.4",
        "floor and one more",
        "-(-num_tokens // self.block_size)",
        "num_tokens // self.block_size + 1",
    ),
    Mutant(
        "1.5",
        "the last free block is never used",
        "num_left > 0 or (num_left == 0 and not self._must_copy(seq))",
        "num_left > 0",
    ),
    Mutant(
        "1.5",
        "one block a step, as in nano-vllm",
        "self.num_blocks_for(seq.num_computed_tokens + num_new_tokens)",
        "len(self.block_tables[seq.seq_id]) + ((seq.num_computed_tokens + num_new_tokens)"
        " % self.block_size == 1)",
    ),
    Mutant(
        "1.5",
        "the copy is forgotten",
        "num_left == 0 and not self._must_copy(seq)",
        "num_left == 0",
    ),
    Mutant(
        "1.6",
        "the head joins the queue before the tail",
        "reversed(self.block_tables.pop(seq.seq_id, ()))",
        "self.block_tables.pop(seq.seq_id, ())",
    ),
    Mutant("1.6", "CPU blocks stay taken", "self.cpu_pool.free(block_id)", "pass"),
    Mutant(
        "2.1", "the parent does not count", "key = (parent, token_ids)", "key = (None, token_ids)"
    ),
    Mutant("2.2", "a later block takes over", " and block_hash not in self.cached_blocks", ""),
    Mutant(
        "2.2",
        "the block does not know its hash",
        "self.block_hashes[block_id] = block_hash",
        "pass",
    ),
    Mutant("2.3", "the block keeps its hash", "self.block_hashes[block_id] = None", "pass"),
    Mutant(
        "2.4",
        "the salt is left out",
        "self._hash_table.get(None, seq.extra_keys)",
        "self._hash_table.get(None, None)",
    ),
    Mutant(
        "2.4",
        "each block stands alone",
        "self._hash_table.get(parent, tuple",
        "self._hash_table.get(hashes and hashes[0] or parent, tuple",
    ),
    Mutant(
        "2.5",
        "the whole prompt may hit: zero queries",
        "(seq.num_tokens - 1) // self.block_size",
        "seq.num_tokens // self.block_size",
    ),
    Mutant("2.5", "a miss is skipped", "break", "continue"),
    Mutant(
        "2.5",
        "a hit in spite of prompt_logprobs",
        " or seq.sampling_params.skip_reading_prefix_cache",
        "",
    ),
    Mutant(
        "2.6", "a cached free block is counted twice", "num_new + num_taken_back <=", "num_new <="
    ),
    Mutant(
        "2.6",
        "shared blocks are counted, too",
        "sum(self.pool.ref_counts[block_id] == 0 for block_id in cached_blocks)",
        "len(cached_blocks)",
    ),
    Mutant(
        "2.7",
        "the block that is partly filled is cached",
        "end // self.block_size",
        "-(-end // self.block_size)",
    ),
    Mutant(
        "2.7",
        "only the first block is cached",
        "[first:last]\n            hashes",
        "[first:first + 1]\n            hashes",
    ),
    Mutant("3.1", "nothing is left for those behind", "step.budget - num_behind)", "step.budget)"),
    Mutant(
        "3.1",
        "a chunk of any length",
        "min(self.max_chunk, step.budget - num_behind)",
        "step.budget - num_behind",
    ),
    Mutant(
        "3.2",
        "chunks although they are off",
        " if num_tokens == num_uncomputed or self.enable_chunked_prefill else 0",
        "",
    ),
    Mutant(
        "3.2",
        "the whole budget",
        "min(num_uncomputed, self.max_chunk, step.budget)",
        "min(num_uncomputed, self.max_chunk)",
    ),
    Mutant("3.3", "one too many", "num_leaving + 1 + seq", "num_leaving + seq"),
    Mutant(
        "3.3",
        "branches are not counted",
        " + sum(other.num_pending_forks for other in self.running)",
        "",
    ),
    Mutant(
        "3.4",
        "the first chunk ignores the cache",
        "seq.num_tokens - num_cached, step",
        "seq.num_tokens, step",
    ),
    Mutant(
        "3.4",
        "what does not fit is admitted",
        " or not self.block_manager.can_allocate(seq, cached_blocks)",
        "",
    ),
    Mutant(
        "3.4",
        "num_cached_tokens is not noted",
        "seq.num_cached_tokens = seq.num_computed_tokens",
        "pass",
    ),
    Mutant(
        "3.5",
        "what does not fit is passed: starvation",
        "elif not self._admit(waiting, step):\n                return",
        "elif not self._admit(waiting, step):\n                position += 1",
    ),
    Mutant(
        "3.5",
        "what is not ready stops all behind it",
        "not waiting.is_ready():\n                position += 1",
        "not waiting.is_ready():\n                return",
    ),
    Mutant("3.6", "the budget is not reduced", "step.budget -= num_tokens", "pass"),
    Mutant("3.6", "a token is on its way after each chunk", "if is_last:\n", "if True:\n"),
    Mutant(
        "3.6", "the sequence is sent in every step", "self._known_seq_ids.add(seq.seq_id)", "pass"
    ),
    Mutant("4.1", "the oldest is preempted", "self.running[-1]", "self.running[0]"),
    Mutant("4.2", "its tokens still count as computed", "seq.num_computed_tokens = 0", "pass"),
    Mutant("4.2", "its blocks are not freed", "self.block_manager.free(seq)", "pass"),
    Mutant(
        "4.2",
        "it waits at the end of the queue",
        "insort(self.waiting, seq, key=self.urgency)",
        "self.waiting.append(seq)",
    ),
    Mutant("4.3", "the runner is not told", "self._dropped_seq_ids.append(seq.seq_id)", "pass"),
    Mutant(
        "4.4",
        "the pairs are reversed",
        "zip(block_table, cpu_blocks, strict=True)",
        "zip(cpu_blocks, block_table, strict=True)",
    ),
    Mutant("4.4", "its KV blocks stay taken", "self.free(seq)", "pass"),
    Mutant(
        "4.5",
        "the pairs are reversed",
        "zip(cpu_blocks, block_table, strict=True)",
        "zip(block_table, cpu_blocks, strict=True)",
    ),
    Mutant("4.6", "both have one table", "list(block_table)", "block_table"),
    Mutant("4.6", "no reference is added", "self.pool.share(block_id)", "pass"),
    Mutant(
        "4.7",
        "full blocks are copied, too",
        "if offset == 0:\n            return False\n",
        "index = -1\n",
    ),
    Mutant("4.8", "the shared block keeps its reference", "self.pool.free(shared)", "pass"),
    Mutant("4.8", "the pair is reversed", "(shared, block_table[-1])", "(block_table[-1], shared)"),
    Mutant(
        "5.1",
        "negative logits are divided, too",
        "torch.where(some > 0, some / repetition, some * repetition)",
        "some / repetition",
    ),
    Mutant("5.1", "presence counts occurrences", "(counts > 0)", "counts"),
    Mutant("5.1", "the prompt counts for presence", "(counts > 0)", "(counts >= 0)"),
    Mutant(
        "5.2",
        "against 1 instead of the likeliest",
        "logits.amax(dim=-1, keepdim=True)",
        "logits.logsumexp(dim=-1, keepdim=True)",
    ),
    Mutant(
        "5.3",
        "the token that crosses top_p is dropped",
        "before = probs.cumsum(dim=-1) - probs",
        "before = probs.cumsum(dim=-1)",
    ),
    Mutant("5.3", "top_k is off by one", "rank >= top_k[:, None]", "rank > top_k[:, None]"),
    Mutant(
        "5.3",
        "top_p of all tokens, not of the top_k",
        "ordered = ordered.masked_fill(rank >= top_k[:, None], -torch.inf)",
        "pass",
    ),
    Mutant("5.4", "a token without probability at u = 0", "right=True", "right=False"),
    Mutant("5.4", "one random number for all rows", "uniform[:, None]", "uniform[:1, None]"),
    Mutant("5.5", "branches are alike", "mixed + branches.astype(np.uint64)", "mixed"),
    Mutant(
        "5.5",
        "neighbours are alike",
        "_splitmix64(mixed + positions.astype(np.uint64))",
        "mixed + (positions.astype(np.uint64) << np.uint64(40))",
    ),
    Mutant(
        "5.6", "ranks begin at 1", "(logprobs > sampled_logprobs)", "(logprobs >= sampled_logprobs)"
    ),
    Mutant("5.6", "not normalized", "logits.log_softmax(dim=-1)", "logits - 1.0"),
    Mutant(
        "5.7",
        "penalties before the processors",
        "if batch.processors:\n",
        "if batch.penalties is not None:\n"
        "        logits = apply_penalties(logits, batch.penalties)\n"
        "    if batch.processors:\n",
    ),
    Mutant(
        "6.1",
        "positions begin at 0 in each chunk",
        "num_computed - query_start_loc",
        "0 * num_computed - query_start_loc",
    ),
    Mutant(
        "6.1",
        "the slot is counted from the position",
        "blocks.astype(np.int64) * self.block_size + positions % self.block_size",
        "positions",
    ),
    Mutant(
        "6.1",
        "the slot is a block",
        "blocks.astype(np.int64) * self.block_size + positions % self.block_size",
        "blocks.astype(np.int64)",
    ),
    Mutant(
        "6.1",
        "a token is sampled behind each chunk",
        "is_last = positions >= batch.num_tokens[token_rows] - 1",
        "is_last = positions >= (seq_lens - 1).repeat(num_scheduled)",
    ),
    Mutant(
        "6.1",
        "a sequence's number is taken for its row",
        "token_rows = rows.repeat(num_scheduled)",
        "token_rows = np.arange(len(rows)).repeat(num_scheduled)",
    ),
    Mutant("6.2", "slot -1 is written", "if slot >= 0:", "if True:"),
    Mutant(
        "6.2",
        "the slot is an offset in its block",
        "slot // block_size, slot % block_size",
        "slot % block_size, slot // block_size",
    ),
    Mutant(
        "6.3",
        "the block table is not read",
        "cache[block.long(), slot]",
        "cache[position // block_size, slot]",
    ),
    Mutant(
        "6.3",
        "head h reads key head h modulo their number",
        "key = key.repeat_interleave(heads_per_kv_head, dim=1)",
        "key = key.repeat(1, heads_per_kv_head, 1)",
    ),
    Mutant(
        "6.3",
        "the queries of a chunk stand at the beginning",
        "position[seq_len - (end - start) :, None]",
        "position[: end - start, None]",
    ),
    Mutant(
        "6.3",
        "a query does not see its own key",
        "hidden = distance < 0",
        "hidden = (distance < 0) | (distance == 0) & (seq_len > 1)",
    ),
    Mutant(
        "6.3",
        "the window is one key too wide",
        "distance >= sliding_window",
        "distance > sliding_window",
    ),
    Mutant("6.3", "the scores are not scaled", " * scale\n", "\n"),
    Mutant(
        "6.3",
        "hidden scores are 0, and not -inf",
        "masked_fill(hidden, -torch.inf)",
        "masked_fill(hidden, 0)",
    ),
    Mutant(
        "6.4",
        "the old sums do not shrink",
        "running.total * shrink + weight.sum",
        "running.total + weight.sum",
    ),
    Mutant("6.4", "the values do not shrink", "running.acc * shrink", "running.acc"),
    Mutant("6.4", "a row that sees nothing is NaN", "m.masked_fill(m == -torch.inf, 0)", "m"),
    Mutant(
        "6.4",
        "the largest score of the last block only",
        "torch.maximum(running.m, score.amax(dim=-1, keepdim=True))",
        "score.amax(dim=-1, keepdim=True)",
    ),
    Mutant(
        "6.4",
        "no maximum at all",
        "torch.maximum(running.m, score.amax(dim=-1, keepdim=True))",
        "torch.zeros_like(running.m)",
    ),
    Mutant("6.5", "parts are added as they are", "(part.m - m).exp()", "torch.ones_like(m)"),
    Mutant(
        "6.5",
        "parts are averaged",
        "acc = sum(part.acc * factor",
        "acc = sum(part.acc / part.total * factor",
    ),
    Mutant(
        "6.6",
        "the whole last block is read",
        "min(first + block_size, seq_len)",
        "first + block_size",
    ),
    Mutant(
        "6.6",
        "the queries of a chunk stand at the beginning",
        "torch.arange(seq_len - (end - start), seq_len, device=query.device)",
        "torch.arange(end - start, device=query.device)",
    ),
    Mutant(
        "6.6",
        "the number of the block is its place",
        "int(metadata.block_table[i, first // block_size])",
        "first // block_size",
    ),
    Mutant("6.6", "only the first split counts", "merge(parts)", "parts[0]"),
    Mutant(
        "6.6", "the output is not divided by the total", "merged.acc / merged.total", "merged.acc"
    ),
    Mutant(
        "7.1",
        "eps is outside the root",
        "F.rms_norm(x, x.shape[-1:], eps=eps)",
        "x / (x.pow(2).mean(-1, keepdim=True).sqrt() + eps)",
    ),
    Mutant(
        "7.1",
        "in half precision",
        "F.rms_norm(x, x.shape[-1:], eps=eps)",
        "(x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt())",
    ),
    Mutant(
        "7.1",
        "the mean is taken off, as in layer norm",
        "F.rms_norm(x, x.shape[-1:], eps=eps)",
        "F.layer_norm(x, x.shape[-1:], eps=eps)",
    ),
    Mutant("7.1", "the weight is forgotten", "return weight * ", "return "),
    Mutant(
        "7.2",
        "the angles are rounded",
        "torch.arange(max_model_len, dtype=torch.float32), frequencies)",
        "torch.arange(max_model_len).to(layer_config.dtype), frequencies.to(layer_config.dtype))",
    ),
    Mutant(
        "7.2",
        "neighbours have one angle",
        "(cos, cos, -sin, sin), dim=-1)",
        "(cos.repeat_interleave(2, -1), -sin, sin), dim=-1)",
    ),
    Mutant("7.2", "the sign of sin", "-sin, sin)", "sin, -sin)"),
    Mutant("7.2", "sin is not scaled", "angles.sin() * scaling", "angles.sin()"),
    Mutant(
        "7.3",
        "neighbours are pairs",
        "x.roll(rotary_dim // 2, dims=-1)",
        "x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)",
    ),
    Mutant("7.3", "x is written to", "(x * cos)", "x.mul_(cos)"),
    Mutant("7.3", "turned the other way round", "dims=-1), sin)", "dims=-1), -sin)"),
    Mutant("7.3", "all dimensions are turned", "rotary_dim < x.shape[-1]", "False"),
    Mutant(
        "7.4",
        "v and k are exchanged",
        "backend.store(k, v, kv_cache",
        "backend.store(v, k, kv_cache",
    ),
    Mutant(
        "7.4",
        "the keys are first",
        "q, k = qk.split_with_sizes((num_rows - 2 * num_kv_heads, num_kv_heads), dim=1)",
        "k, q = qk.split_with_sizes((num_kv_heads, num_rows - 2 * num_kv_heads), dim=1)",
    ),
    Mutant("7.4", "the norm is forgotten", "if qk_norm is not None:", "if False:"),
    Mutant(
        "7.4",
        "keys are stored before they are turned",
        "backend.store(k, v,",
        "backend.store(heads[:, -2 * num_kv_heads : -num_kv_heads], v,",
    ),
    Mutant(
        "7.5",
        "the norm is behind attention",
        "y = self.self_attn(y, rope",
        "y = self.self_attn(residual.clone(), rope",
    ),
    Mutant(
        "7.5",
        "the stream does not go around the MLP",
        "self.mlp(y, metadata), residual",
        "self.mlp(y, metadata), 0 * residual",
    ),
    Mutant(
        "7.5",
        "the residual is not added",
        "self.input_layernorm.add_and_norm(*x)",
        "self.input_layernorm.add_and_norm(x[0], None)",
    ),
    Mutant("7.6", "all matrices fill the first rows", "offset += size", "pass"),
    Mutant(
        "7.6",
        "each rank reads the beginning",
        "rows, 0, start)",
        "rows, 0, 0)",
    ),
    Mutant(
        "7.6", "the matrices are not beside the layer", "name.rpartition(", "f'{name}.'.rpartition("
    ),
    Mutant(
        "7.6", "the shape is that of the part", "(full, self.input_size)", "(size, self.input_size)"
    ),
    Mutant(
        "7.7",
        "only the first place is filled",
        "for shard in shards[name]:",
        "for shard in shards[name][:1]:",
    ),
    Mutant(
        "7.7",
        "the whole tensor is read",
        "source[shard.slices]",
        "source[(slice(None),) * len(shard.full_shape)][shard.slices]",
    ),
    Mutant(
        "7.7",
        "only the first file is read",
        "for file in dict.fromkeys(tensor.file for tensor in tensors.values()):",
        "for file in list(dict.fromkeys(tensor.file for tensor in tensors.values()))[:1]:",
    ),
    Mutant("8.1", "the unit is cut", "size = total // num_parts", "size = total // self.tp_size"),
    Mutant(
        "8.1",
        "units are repeated in turn",
        "self.tp_rank * num_parts // self.tp_size * size",
        "self.tp_rank % num_parts * size",
    ),
    Mutant(
        "8.1",
        "what is left over is lost",
        "if num_units % num_parts or self.tp_size % num_parts:",
        "if False:",
    ),
    Mutant(
        "8.2",
        "rows instead of columns",
        "rows, 1, self.start",
        "rows, 0, self.start",
    ),
    Mutant("8.2", "each rank reads the first columns", "rows, 1, self.start", "rows, 1, 0"),
    Mutant(
        "8.3",
        "each rank adds the bias",
        "self.bias if self.parallel.tp_rank == 0 else None",
        "self.bias",
    ),
    Mutant(
        "8.3",
        "nothing is summed",
        "self.parallel.all_reduce(self.linear_method.apply(self, x, bias, metadata))",
        "self.linear_method.apply(self, x, bias, metadata)",
    ),
    Mutant(
        "8.4",
        "the vectors of foreign ids are summed, too",
        "vectors.masked_fill(is_foreign[:, None], 0)",
        "vectors",
    ),
    Mutant("8.4", "ids before the own ones are not foreign", "(local < 0) | ", ""),
    Mutant(
        "8.4",
        "nothing is summed",
        "self.parallel.all_reduce(vectors.masked_fill(is_foreign[:, None], 0))",
        "vectors.masked_fill(is_foreign[:, None], 0)",
    ),
    Mutant(
        "8.5", "parts below each other", "torch.cat(parts[0], dim=-1)", "torch.cat(parts[0], dim=0)"
    ),
    Mutant("8.5", "each rank wants the parts", "if self.tp_rank == 0 else []", "if True else []"),
    Mutant(
        "8.5",
        "one rank sends to itself",
        "if self.device_group is None:\n            return tensor\n",
        "if self.device_group is None:\n            return tensor.clone()\n",
    ),
    Mutant("8.6", "the padding can be sampled", "[:, : self.vocab_size]", ""),
    Mutant("8.6", "each rank has its own part only", "self.parallel.gather(logits)", "logits"),
    Mutant(
        "11.1",
        "only the new piece is searched",
        "text.find(stop, max(0, len(text) - num_new - len(stop) + 1))",
        "text.find(stop, len(text) - num_new)",
    ),
    Mutant(
        "11.1",
        "what was complete before is found again",
        "max(0, len(text) - num_new - len(stop) + 1)",
        "0",
    ),
    Mutant("11.1", "the one that begins first", "match[0] + len(match[1])", "match[0]"),
    Mutant(
        "11.1",
        "the first of the list",
        "return min(found, key=lambda match: match[0] + len(match[1]), default=None)",
        "return found[0] if found else None",
    ),
    Mutant("11.2", "half a character is shown", 'return ""', "return self.flush()"),
    Mutant("11.2", "what was shown is held, too", "self.held.clear()", "pass"),
    Mutant(
        "11.2",
        "token by token",
        "text = self.stream.step(self.backend, token_id)",
        "text = self.backend.decode([token_id])",
    ),
    Mutant(
        "11.3",
        "the context may begin inside a character",
        "return context\n        return []",
        "return context\n            return context\n        return []",
    ),
    Mutant("11.3", "all of the prompt", "prompt_token_ids[-length:]", "prompt_token_ids"),
    Mutant(
        "11.3",
        "a prompt that ends inside a character",
        "return []",
        "return prompt_token_ids[-self.CONTEXT :]",
    ),
    Mutant("11.4", "the stop token is shown", "token_ids = token_ids[:-1]", "pass"),
    Mutant(
        "11.4",
        "minimum tokens are ignored",
        "() if is_too_early else params.stop or ()",
        "params.stop or ()",
    ),
    Mutant("11.4", "minimum tokens off by one", "<= params.min_tokens", "< params.min_tokens"),
    Mutant("11.4", "the tokens behind it stay", "update.keep(number)", "pass"),
    Mutant(
        "11.4",
        "the stop string is always shown",
        "position + len(stop) if params.include_stop_str_in_output else position",
        "position + len(stop)",
    ),
    Mutant(
        "11.4",
        "what is held is lost at the end",
        "new_texts.append(self.detokenizer.flush())",
        "pass",
    ),
    Mutant("11.4", "all new text at once", "stops, len(new_text))", "stops, len(self.text))"),
    Mutant("11.5", "one too many", "len(stop) - 1", "len(stop)"),
    Mutant(
        "11.5",
        "held back in vain",
        "() if params.include_stop_str_in_output else params.stop or ()",
        "params.stop or ()",
    ),
    Mutant(
        "11.6",
        "held back for ever",
        "(0 if finish_reason else self._num_held_chars())",
        "self._num_held_chars()",
    ),
    Mutant("11.6", "nothing is held back", "(0 if finish_reason else self._num_held_chars())", "0"),
    Mutant("11.6", "each delta begins at 0", "self.num_sent_chars if is_delta else 0", "0"),
    Mutant("11.6", "what was shown is taken back", "max(first_char, last_char)", "last_char"),
    Mutant("12.1", "the latest match", "int(ends[0])", "int(ends[-1])"),
    Mutant("12.1", "no lower limit", "if length >= least else None", "if length else None"),
    Mutant("12.1", "no upper limit", "if length == longest:", "if False:"),
    Mutant(
        "12.1",
        "the last tokens match themselves",
        "token_ids[:last] == token_ids[last]",
        "token_ids == token_ids[last]",
    ),
    Mutant(
        "12.2",
        "the match is drafted, too",
        "token_ids[end : end + most]",
        "token_ids[end - 1 : end - 1 + most]",
    ),
    Mutant("12.2", "as many as there are", "token_ids[end : end + most]", "token_ids[end:]"),
    Mutant(
        "12.2",
        "the limits are exchanged",
        "self.config.prompt_lookup_min, self.config.prompt_lookup_max",
        "self.config.prompt_lookup_max, self.config.prompt_lookup_min",
    ),
    Mutant(
        "12.3",
        "accepted with min(1, q / p)",
        "accept * draft_probs.gather(1, drafts)[:, 0] < target",
        "accept * target < draft_probs.gather(1, drafts)[:, 0]",
    ),
    Mutant(
        "12.3",
        "accepted with p",
        "accept * draft_probs.gather(1, drafts)[:, 0] < target",
        "accept < target",
    ),
    Mutant("12.3", "recovered from p", "(target_probs - draft_probs).clamp(min=0)", "target_probs"),
    Mutant(
        "12.3",
        "the residual is not cut at 0",
        "(target_probs - draft_probs).clamp(min=0)",
        "(target_probs - draft_probs).abs()",
    ),
    Mutant(
        "12.3",
        "a certain draft may come back",
        "target_probs.scatter(1, drafts, 0.0)",
        "target_probs",
    ),
    Mutant(
        "12.3",
        "a draft of p = 0 stays at u = 0",
        "is_accepted = accept < target\n",
        "is_accepted = accept <= target\n",
    ),
    Mutant("12.3", "one random number for both", "draw(rest, recover)", "draw(rest, accept)"),
    Mutant(
        "12.3",
        "an empty residual",
        "torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, target_probs)",
        "rest",
    ),
    Mutant("12.4", "one stream for both", "branches + stream * STREAM", "branches + STREAM"),
    Mutant(
        "12.4",
        "the stream of plain decoding",
        'enumerate(("accept", "recover"), start=1)',
        'enumerate(("accept", "recover"))',
    ),
    Mutant("12.4", "the streams of the next branches", "stream * STREAM", "stream"),
    Mutant(
        "12.5",
        "the bonus token is recovered",
        "(self.draft_token_ids < 0) | (batch.temperature < GREEDY_TEMPERATURE)",
        "batch.temperature < GREEDY_TEMPERATURE",
    ),
    Mutant(
        "12.5",
        "greedy rows are drawn",
        "(self.draft_token_ids < 0) | (batch.temperature < GREEDY_TEMPERATURE)",
        "self.draft_token_ids < 0",
    ),
    Mutant(
        "12.5", "without the temperature", "compute_probs(logits, batch)", "logits.softmax(dim=-1)"
    ),
    Mutant("12.5", "a drawn draft accepted as if it were certain", "self.draft_probs,", "None,"),
    Mutant(
        "12.6",
        "the bonus token is lost",
        "len(output.sampled_token_ids[seq.seq_id]) - 1",
        "len(output.sampled_token_ids[seq.seq_id])",
    ),
    Mutant(
        "12.6",
        "rejected drafts count as computed",
        "seq.num_computed_tokens -= number - update.num_accepted_tokens",
        "pass",
    ),
    Mutant(
        "12.6",
        "all drafts are taken back",
        "seq.num_computed_tokens -= number - update.num_accepted_tokens",
        "seq.num_computed_tokens -= number",
    ),
    Mutant(
        "12.6",
        "what was accepted is not cached",
        "scheduler.block_manager.cache_blocks(seq, start, end)",
        "pass",
    ),
    Mutant(
        "12.6",
        "the rejected ones are cached, too",
        "(seq, start, end)",
        "(seq, start, end + number)",
    ),
    Mutant(
        "12.6",
        "drafts beyond max_tokens",
        "min(item.num_spec_tokens, seq.max_tokens - seq.num_output_tokens - 1)",
        "item.num_spec_tokens",
    ),
    Mutant("14.1", "slot -1 is written", "if slot < 0:", "if slot < -1:"),
    Mutant(
        "14.1",
        "the cache has the strides of the step",
        "target + head * key_cache_head_stride",
        "target + head * key_head_stride",
    ),
    Mutant(
        "14.2",
        "lse is not brought to its maximum",
        "tl.exp2(split_lse - tl.max(split_lse, axis=0))",
        "tl.exp2(split_lse)",
    ),
    Mutant("14.2", "not divided by the sum of the weights", " / tl.sum(weight, axis=0)", ""),
    Mutant("14.3", "the total does not shrink", "total * shrink", "total"),
    Mutant("14.3", "acc does not shrink", "acc = acc * shrink[:, None]", "pass"),
    Mutant("14.3", "no causality", "(distance >= 0) & exists[None, :]", "exists[None, :]"),
    Mutant(
        "14.3",
        "values behind the end are read",
        "exists[:, None] & (value_dims",
        "(position >= 0)[:, None] & (value_dims",
    ),
    Mutant("14.3", "the window is one key too wide", "distance < WINDOW", "distance <= WINDOW"),
]
