"""The embedded demo model: its folder loads, its card is true, its training can be repeated.

Scores are measured again here on a few of the held-out questions; the full table comes from
`python -m nanoserve.demo.training.evaluate`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from nanoserve.demo import MODEL_DIR
from nanoserve.demo.training import drafters, first_guesses, skills, tables, talk
from nanoserve.demo.training.corpus import (
    DRILL_MIX,
    LONG_MIX,
    SHORT_MIX,
    Maker,
    draw_document,
    text_of,
)
from nanoserve.demo.training.data import Batches, encode_document, train_tokenizer
from nanoserve.demo.training.drafters import (
    METHODS,
    PROMISES,
    DrafterBatches,
    DrafterPlan,
    Drafters,
    DrafterTrainer,
    held_out_texts,
    weights_of,
)
from nanoserve.demo.training.evaluate import (
    FIRST_GUESSES_PROMISE,
    TASKS,
    DemoModel,
    Score,
    Task,
    answer_to,
    as_table,
    is_good,
    score_stories,
    score_task,
    story_faults,
)
from nanoserve.demo.training.first_guesses import GUESSES, Guess, is_held_out_guess, normalised
from nanoserve.demo.training.model import ModelShape, orthogonalise
from nanoserve.demo.training.recall import Facts
from nanoserve.demo.training.skills import Turn
from nanoserve.demo.training.stories import Character, tell_story
from nanoserve.demo.training.train import CHAT_TEMPLATE, Plan, Trainer, export, run

TINY = Plan(
    steps=8,
    tokens_per_step=256,
    warmup_steps=2,
    tokenizer_documents=300,
    longest_row=64,
    shape=ModelShape(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_layers=2, head_dim=16
    ),
)


@pytest.fixture(scope="module")
def demo() -> DemoModel:
    return DemoModel(MODEL_DIR)


@pytest.fixture(scope="module")
def scores() -> list[Score]:
    return [Score(**entry) for entry in json.loads((MODEL_DIR / "scores.json").read_text())]


def tiny_trainer(plan: Plan = TINY) -> Trainer:
    return Trainer(plan, torch.device("cpu"), torch.float32)


def documents(seed: int, mix: dict[Maker, float], count: int = 300, room: int = 256) -> list[str]:
    rng = random.Random(seed)
    return [text_of(draw_document(rng, Facts(rng), room, mix)) for _ in range(count)]


# ------------------------------------------------------------------------------ the folder


def test_the_weights_are_small() -> None:
    assert (MODEL_DIR / "model.safetensors").stat().st_size <= 8_000_000


def test_transformers_reads_the_rope_base_from_either_layout(tmp_path: Path) -> None:
    config = json.loads((MODEL_DIR / "config.json").read_text())
    theta = config["rope_theta"]
    for left_out in ("rope_theta", "rope_parameters", None):
        layout = {key: value for key, value in config.items() if key != left_out}
        (tmp_path / "config.json").write_text(json.dumps(layout))
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
        inv_freq = model.model.rotary_emb.inv_freq
        dim = config["head_dim"]
        assert torch.allclose(inv_freq, theta ** -(torch.arange(0, dim, 2) / dim), rtol=1e-5)


def test_generation_stops_at_both_end_tokens(demo: DemoModel) -> None:
    ends = demo.model.generation_config.eos_token_id
    assert demo.tokenizer.convert_ids_to_tokens(ends) == ["<|im_end|>", "<|endoftext|>"]


def test_the_chat_template_knows_system_user_and_assistant(demo: DemoModel) -> None:
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Who are you?"},
    ]
    assert demo.prompt(messages) == (
        "<|im_start|>system\nAnswer briefly.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_chat_template_is_the_one_that_training_writes(demo: DemoModel) -> None:
    """It has calls of tools, too: see test_tool_parsers.py."""
    assert demo.tokenizer.chat_template == CHAT_TEMPLATE


def test_digits_and_names_are_the_same_tokens_wherever_they_stand(demo: DemoModel) -> None:
    assert [demo.tokenizer.decode(i) for i in demo.encode(" 47")] == [" ", "4", "7"]
    for name in ("Mia", "Bodiga"):
        assert demo.encode(f'"{name}')[1:] == demo.encode(f" {name}")[1:] == demo.encode(name)


def test_any_text_survives_the_tokenizer(demo: DemoModel) -> None:
    text = "naïve  café — 你好 🙂\n\n\tprint('x')  "
    assert demo.tokenizer.decode(demo.encode(text)) == text


# ------------------------------------------------------------------------------ the corpus


@pytest.mark.parametrize("mix", [DRILL_MIX, SHORT_MIX, LONG_MIX])
def test_the_corpus_depends_on_the_seed_alone(mix: dict[Maker, float]) -> None:
    assert documents(3, mix) == documents(3, mix)
    assert documents(3, mix) != documents(4, mix)


HELD_OUT_SKILLS = [
    skills.addition, skills.capital, skills.colour, skills.simple_fact, skills.repeat,
    skills.say_times, skills.continue_pattern, skills.count, skills.json_record,
    talk.unknown, talk.chinese,
]  # fmt: skip


@pytest.mark.parametrize("draw", HELD_OUT_SKILLS)
def test_what_is_held_out_is_never_drawn_for_training(draw: Callable[..., Turn]) -> None:
    rng = random.Random(0)
    held_out = {draw(rng, held_out=True).question for _ in range(300)}
    trained = {draw(rng).question for _ in range(3000)}
    assert not held_out & trained


def test_no_training_document_contains_a_held_out_item() -> None:
    for mix, room in ((DRILL_MIX, 128), (SHORT_MIX, 256), (LONG_MIX, 1024)):
        text = "\n".join(documents(1, mix, 1500, room))
        for a, b in re.findall(r"\b(\d+) ?(?:\+|plus|and) ?(\d+)\b", text):
            assert not skills.is_held_out("sum", *sorted((int(a), int(b))))
        for record in re.findall(r'\{"name": .*?\}', text):
            name, age, pet = list(json.loads(record).values())[:3]
            assert not skills.is_held_out("json", name, age, pet)
        for statement in re.findall(r"The [a-z]+ [a-z]+ holds \d{4}\.", text):
            assert not skills.is_held_out("fact", statement)
        for kind, name in re.findall(r"[Ss]tory about an? ([a-z]+) named ([A-Z][a-z]+)", text):
            assert not skills.is_held_out("hero", kind, name)
        for question in re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text, re.DOTALL):
            assert not is_held_out_guess(question)


def test_there_are_a_hundred_first_guesses() -> None:
    assert len({guess.prompts for guess in GUESSES}) == 100
    assert all(guess.contains and guess.contains[0] for guess in GUESSES)


def test_the_corpus_knows_no_name_of_the_held_out_guesses() -> None:
    known = {
        word
        for table in vars(tables).values()
        if isinstance(table, list)
        for entry in table
        if isinstance(entry, str)
        for word in entry.split()
    }
    assert not first_guesses.NAMES & known
    rng = random.Random(0)
    drawn = {part for _ in range(20_000) for part in skills.any_name(rng).split()}
    assert not {normalised(name) for name in first_guesses.NAMES} & set(map(normalised, drawn))


def test_a_question_typed_in_a_hurry_keeps_the_words_its_answer_repeats() -> None:
    rng = random.Random(0)
    for draw in (skills.repeat, skills.say_times, skills.free_fact, skills.json_record):
        for _ in range(500):
            turn = draw(rng)
            typed = talk.casually(rng, turn.question, keep_capitals=True)
            for word in re.findall(r"\w+", turn.key):
                assert word in typed or not re.search(rf"\b{word}\b", turn.question)


def test_an_answer_is_good_if_it_ends_and_contains_whole_words() -> None:
    guess = Guess(("40+2",), (" = 42",), ("sorry",), is_seen=False)
    assert is_good(guess, "40 + 2 = 42<|im_end|>")
    assert not is_good(guess, "40 + 2 = 421<|im_end|>")
    assert not is_good(guess, "40 + 2 = 42")
    assert not is_good(guess, "40 + 2 = 42 sorry<|im_end|>")
    list_of_three = Guess(("list 3 fruits",), ("1. ", "3. "), ("4. ",), is_seen=False)
    assert is_good(list_of_three, "1. apple\n2. pear\n3. plum<|im_end|>")


def test_stories_keep_their_hero_and_their_thing() -> None:
    rng = random.Random(0)
    for _ in range(300):
        story = tell_story(rng)
        assert not story_faults(story.text + "<|im_end|>", story.hero, "<|im_end|>")


def test_the_story_check_finds_faults() -> None:
    mia = Character("Mia", "girl", True)
    assert story_faults("Mia met a fox named Mia. They ran.", mia, "<|im_end|>") == [
        "does not end",
        "has helpers []",
        "hero meets hero",
        "repeats itself or is no story",
    ]


def test_facts_of_one_row_never_share_a_key() -> None:
    facts = Facts(random.Random(0)).draw_many(100)
    assert len({fact.statement for fact in facts}) == 100


def test_weights_follow_the_text(demo: DemoModel) -> None:
    rng = random.Random(0)
    for _ in range(100):
        document = draw_document(rng, Facts(rng), 256, SHORT_MIX)
        ids, weights = encode_document(demo.tokenizer.backend_tokenizer, document)
        heavy = [i for i, weight in zip(ids, weights, strict=True) if weight == 2]
        expected = "".join(segment.text for segment in document if segment.weight == 2)
        assert demo.tokenizer.decode(heavy).replace(" ", "") == expected.replace(" ", "")


# ------------------------------------------------------------------------------ training


def test_an_interrupted_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(512, TINY.tokenizer_documents, seed=0)
    straight = tiny_trainer()
    run(straight, tokenizer)

    first, second = tiny_trainer(), tiny_trainer(replace(TINY))
    run(first, tokenizer, tmp_path / "run.pt", stop_at=3)
    second.load(tmp_path / "run.pt")
    run(second, tokenizer)

    assert second.step == straight.step == TINY.steps
    resumed = second.model.state_dict()
    for name, weight in straight.model.state_dict().items():
        assert torch.equal(weight, resumed[name]), name


def test_a_checkpoint_of_another_plan_is_refused(tmp_path: Path) -> None:
    trainer = tiny_trainer()
    trainer.save(tmp_path / "run.pt")
    with pytest.raises(ValueError, match="belongs to another run"):
        tiny_trainer(replace(TINY, seed=1)).load(tmp_path / "run.pt")


def test_training_and_transformers_compute_the_same(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(512, TINY.tokenizer_documents, seed=0)
    trainer = tiny_trainer()
    run(trainer, tokenizer, stop_at=2)
    export(trainer, tokenizer, tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    weights = {name: w.bfloat16().float() for name, w in trainer.model.state_dict().items()}
    trainer.model.load_state_dict(weights)
    ids = Batches(tokenizer, [64], 256, seed=5)[0].ids
    with torch.no_grad():
        logits = trainer.model(ids) @ trainer.model.model.embed_tokens.weight.T
        assert torch.allclose(logits, exported(ids).logits, atol=1e-4)


def test_learning_rate_warms_up_stays_and_decays() -> None:
    factors = [Plan(steps=1000).lr_factor(step) for step in range(1000)]
    assert factors[0] < 0.01 and factors[100:550] == [1.0] * 450 and factors[-1] == 0.01


def test_orthogonalise_brings_singular_values_near_one() -> None:
    matrices = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(0))
    singular = torch.linalg.svdvals(orthogonalise(matrices))
    assert singular.min() > 0.5 and singular.max() < 1.5


# ------------------------------------------------------------------------------ the drafters


TINY_DRAFTERS = DrafterPlan(
    steps=4,
    tokens_per_step=256,
    warmup_steps=1,
    draft=ModelShape(
        hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1
    ),
)


@pytest.fixture(scope="module")
def shipped() -> Drafters:
    """The drafters as they are in their folders, computing in float32."""
    model = Drafters(DrafterPlan(), torch.float32)
    for method in METHODS:
        weights = load_file(MODEL_DIR / method / "model.safetensors")
        head = weights.pop("lm_head.weight", None) if method == "medusa" else None
        assert head is None or torch.equal(head, model.embedding.bfloat16())
        getattr(model, method).load_state_dict(weights)
    return model


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_is_small_and_says_what_it_was_made_from(method: str) -> None:
    folder = MODEL_DIR / method
    assert (folder / "model.safetensors").stat().st_size <= 1_000_000
    training = json.loads((folder / "training.json").read_text())
    assert "corpus" in training["data"] and training["accepted_of_3"] >= PROMISES[method]
    assert (
        json.loads((folder / "config.json").read_text()) == drafters.configs(DrafterPlan())[method]
    )


def test_the_draft_model_has_the_tokenizer_of_the_demo_model() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (MODEL_DIR / "draft" / name).read_text() == (MODEL_DIR / name).read_text()


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_keeps_its_promise_on_fresh_prompts(
    method: str, shipped: Drafters, fresh_texts: list[tuple[list[int], list[int]]]
) -> None:
    assert shipped.acceptance(method, fresh_texts) >= PROMISES[method] - 0.3


@pytest.fixture(scope="module")
def fresh_texts(demo: DemoModel) -> list[tuple[list[int], list[int]]]:
    return held_out_texts(demo, seed=99, longest=48, every=4)


def test_acceptance_counts_the_right_guesses_before_the_first_wrong_one(shipped: Drafters) -> None:
    """The text is 1, 2, 3, ...; the guesses are right but for the second of every other step."""
    steps = []

    def guess(tokens: list[int]) -> list[int]:
        steps.append(tokens[-1])
        return [tokens[-1] + i + (i == 2 and len(steps) % 2) for i in (1, 2, 3)]

    shipped.guess_fake = guess  # type: ignore[assignment]
    assert shipped.acceptance("fake", [([0], list(range(1, 14)))]) == 2.0  # 1, 3, 1, 3
    assert steps == [1, 3, 7, 9]
    del shipped.guess_fake


def test_interrupted_drafters_end_with_the_same_weights(demo: DemoModel, tmp_path: Path) -> None:
    tokenizer = demo.tokenizer.backend_tokenizer
    answers = [[[5, 6, 7], [8, 9, 2]], [[11, 12], [13, 2]]]
    batches = DrafterBatches(tokenizer, answers, TINY_DRAFTERS)
    straight, first, second = (DrafterTrainer(TINY_DRAFTERS, torch.float32) for _ in range(3))
    drafters.run(straight, batches)
    first.advance(batches[0])
    first.save(tmp_path / "run.pt")
    second.load(tmp_path / "run.pt")
    drafters.run(second, batches)
    for method, weights in weights_of(straight.drafters).items():
        resumed = weights_of(second.drafters)[method]
        assert all(torch.equal(weight, resumed[name]) for name, weight in weights.items())
    with pytest.raises(ValueError, match="belongs to another run"):
        DrafterTrainer(replace(TINY_DRAFTERS, seed=1), torch.float32).load(tmp_path / "run.pt")


# ------------------------------------------------------------------------------ the card


def test_the_card_shows_the_acceptance_of_the_drafters() -> None:
    assert drafters.as_table() in (MODEL_DIR / "README.md").read_text()


def test_the_card_shows_the_measured_scores(scores: list[Score]) -> None:
    assert as_table(scores) in (MODEL_DIR / "README.md").read_text()


def test_the_card_gives_the_real_training_figures() -> None:
    card = (MODEL_DIR / "README.md").read_text()
    training = json.loads((MODEL_DIR / "training.json").read_text())
    for figure in (training["parameters"], training["tokens"], training["plan"]["steps"]):
        assert f"{figure:,}" in card


def test_measured_scores_keep_the_promises(scores: list[Score]) -> None:
    for score in scores:
        assert score.score >= score.promise, score


def is_quick(task: Task) -> bool:
    return task.promise > 0 and not re.search("1536|2000", task.name)


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(task, id=task.name, marks=[pytest.mark.slow] if number % 3 else [])
        for number, task in enumerate(filter(is_quick, TASKS))
    ],
)
def test_a_fresh_sample_keeps_the_promise(demo: DemoModel, task: Task) -> None:
    score = score_task(demo, task, size=16, seed=99)
    allowed = 2 * (score.promise * (1 - score.promise) / score.n) ** 0.5  # of sampling error
    assert score.score >= score.promise - allowed


def test_first_guesses_get_good_answers(demo: DemoModel) -> None:
    guesses = GUESSES[2::5]
    good = sum(is_good(guess, answer_to(demo, guess)) for guess in guesses)
    assert good / len(guesses) >= FIRST_GUESSES_PROMISE - 0.1


def test_the_card_quotes_what_the_model_says(demo: DemoModel) -> None:
    card = (MODEL_DIR / "README.md").read_text()
    table = card.split("| asked | answered |\n|---|---|\n")[1].split("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()]
    quoted = [(asked, answer) for asked, answer in rows if "chat template" not in asked]
    assert len(quoted) >= 8
    for asked, answer in quoted:
        prompt = demo.prompt([{"role": "user", "content": asked}])
        assert demo.generate(prompt) == answer + "<|im_end|>"


@pytest.mark.slow
def test_stories_keep_the_promise(demo: DemoModel) -> None:
    score = score_stories(demo, "story, on request", count=6)
    assert score.score >= score.promise - 0.25


def test_a_story_starts_from_once_upon_a_time(demo: DemoModel) -> None:
    text = "Once upon a time" + demo.generate("Once upon a time")
    name = re.search(r"named (\w+)\.", text)
    assert name, text
    assert not story_faults(text, Character(name[1], "girl", True), "<|endoftext|>")
