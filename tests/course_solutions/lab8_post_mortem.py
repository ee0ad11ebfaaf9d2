import random

from nanoserve.teaching.course.toy import right_answer


def ask(toy, name, prompt, most=3):
    toy.add(name, prompt, max_tokens=most)
    assert toy.run()[name] == right_answer(prompt, most), f"{name} is wrong"


def catch_stale_hash(make):
    toy = make(num_blocks=3)
    for name, prompt in {"A": "abcdefghi", "B": "zzzzefgh", "C": "abcdefghi"}.items():
        ask(toy, name, prompt, 1)
    toy = make(num_blocks=4)
    for name, prompt in {"A": "abcdefghi", "B": "mnopqrstuvwxy", "C": "abcdefghi"}.items():
        ask(toy, name, prompt, 1)


def catch_whole_prompt_hit(make):
    for length in range(1, 13):
        toy = make()
        for name in "AB":
            ask(toy, name, "abcdefghijkl"[:length])


def catch_hit_not_consumed(make):
    toy, computed = make(), 0
    for name in "AB":
        toy.add(name, "abcdefghijklm", max_tokens=1)
        while toy.scheduler.sequences:
            computed += sum(toy.step().values())
    assert computed + toy.block_manager.num_hit_tokens == 26


def catch_freed_page(make):
    toy = make()
    for name in "AB":
        toy.add(name, "abcdefgh", max_tokens=8)
    toy.step()
    toy.add("C", "xxxxyyyy", max_tokens=8)
    answers = toy.run()
    assert answers["A"] == answers["B"] == right_answer("abcdefgh", 8)
    assert answers["C"] == right_answer("xxxxyyyy", 8)


def catch_pinned_too_early(make):
    toy = make(num_blocks=6)
    ask(toy, "Z", "abcdefghi", 1)
    toy.add("A", "mnopqrstu", max_tokens=3)
    toy.step()
    try:
        ask(toy, "B", "abcdefghijklmnopqr", 1)
    except KeyError as error:
        raise AssertionError("a block that nobody had") from error
    assert not any(toy.block_manager.pool.ref_counts)


def rule(manager):
    pool = manager.pool
    tables = [block for table in manager.block_tables.values() for block in table]
    for block, count in enumerate(pool.ref_counts):
        assert count == tables.count(block)
        assert (count == 0) == (block in pool.free_queue)
    for block_hash, block in pool.cached_blocks.items():
        assert pool.block_hashes[block] is block_hash


def catch_anything(make):
    rng = random.Random(8)
    for _ in range(8):
        toy, prompts = make(num_blocks=10), {}
        for number in range(12):
            name = f"R{number}"
            prompts[name] = [rng.choice((97, 98)) for _ in range(rng.randint(1, 20))]
            toy.add(name, prompts[name]).extra_keys = number % 2 or None
        for _ in range(500):
            if not toy.scheduler.sequences:
                break
            try:
                toy.step()
            except (KeyError, IndexError) as error:
                raise AssertionError(str(error)) from error
            rule(toy.block_manager)
        for name, answer in toy.run().items():
            assert answer == right_answer(prompts[name], 4)
    toy = make()
    first, second = (toy.add(name, "abcdefghi") for name in "AB")
    first.extra_keys, second.extra_keys = 1, 2
    toy.run()
    assert second.num_cached_tokens == 0
    catch_hit_not_consumed(make)
    toy = make(num_blocks=8)
    for prompt in ("abcdefghijkl", "mnop", "qrst", "uvwxyzabcdef", "5678"):
        ask(toy, prompt, prompt, 1)
    toy.add("again", "abcdefghijkl", max_tokens=1)
    assert toy.step()["again"] < 12
