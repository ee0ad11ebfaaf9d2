"""The demo model's training program: what it teaches is right, and what it writes can be served."""

from __future__ import annotations

import json
import math
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanoserve import LLM, LoRARequest, SamplingParams
from nanoserve.demo import MODEL_DIR
from nanoserve.demo.training import __main__ as command
from nanoserve.demo.training import corpus, evaluate, skills
from nanoserve.demo.training.data import make_batch, text_of
from nanoserve.demo.training.drafters import METHODS, train_drafter
from nanoserve.demo.training.grammar import GUESSES, Author, is_held_out
from nanoserve.demo.training.lora import as_pirate, train_lora
from nanoserve.demo.training.train import Plan, load, next_token_loss, train_model

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["Once upon a time", "What is 17 + 25?", "The code of the"]
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
FEW_STEPS = Plan(steps=4, tokens_per_step=256, warmup_steps=1, stages=((0.0, {64: 1}),))


def text(seed: str, count: int = 300) -> str:
    author = Author(seed)
    return "".join(text_of(corpus.draw_document(author, 256)) for _ in range(count))


def test_a_seed_decides_what_the_corpus_says() -> None:
    assert text("a", 20) == text("a", 20) != text("b", 20)


def test_all_sums_are_right_and_none_is_held_out() -> None:
    sums = re.findall(r"(\d+) \+ (\d+) = (\d+)", text("sums"))
    assert len(sums) > 100
    for a, b, c in sums:
        assert int(a) + int(b) == int(c)
        assert not is_held_out("sum", *sorted((int(a), int(b))))


def test_answers_agree_with_their_questions() -> None:
    author = Author("answers")
    for _ in range(200):
        turn = skills.count(author)
        numbers = [int(each) for each in turn.answer.split(", ")]
        steps = {b - a for a, b in pairwise(numbers)}
        assert len(steps) == 1
        assert re.findall(r"\d+", turn.question)[-1] in map(str, (numbers[0], numbers[-1], *steps))
        turn = skills.say_times(author)
        _, word, times, _ = turn.question.split()
        many = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6}.get(times)
        assert turn.answer.split() == [word] * (many or int(times))
        turn = skills.json_record(author)
        assert all(str(value) in turn.question for value in json.loads(turn.answer).values())
        turn = skills.repeat(author)
        assert turn.question.endswith(turn.answer)


def test_a_fact_that_is_asked_for_was_told() -> None:
    author = Author("facts")
    for _ in range(50):
        author.used_statements.clear()
        document = corpus.recall_chat(author, 512)
        told = "".join(part.text for part in document if part.weight == 0)
        values = [part.text for part in document if part.weight == corpus.KEY_WEIGHT and part.text]
        assert values
        assert all(value in told or "." not in value for value in values)


def test_no_first_guess_is_trained() -> None:
    held_out = [each["prompts"][0] for each in GUESSES["guesses"] if "is_seen" not in each]
    assert len(held_out) == 85
    author = Author("guesses")
    turns = [skills.any_turn(author) for _ in range(3000)]
    assert not {turn.question for turn in turns} & set(held_out)


def test_the_stored_model_knows_this_corpus() -> None:
    model, tokenizer = load(MODEL_DIR)
    with torch.inference_mode():
        for length in (128, 512):
            assert next_token_loss(model, make_batch(tokenizer, "any", length, 2048)) < 0.2


def greedy_tokens(folder: Path, prompt: str) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**ids, max_new_tokens=GREEDY.max_tokens, do_sample=False)
    return output[0, ids["input_ids"].shape[1] :].tolist()


def test_a_run_lowers_the_loss_and_its_folder_can_be_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(steps=30, tokens_per_step=256, warmup_steps=4, tokenizer_documents=100)
    report = train_model(tmp_path / "model", plan, **TINY)
    assert report["loss"] < math.log(2048) - 0.5  # from a guess among all tokens
    assert "about" in capsys.readouterr().out
    with LLM(tmp_path / "model") as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert llm.chat([{"role": "user", "content": "Hi"}], GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == greedy_tokens(tmp_path / "model", prompt)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_can_be_served(method: str, tmp_path: Path) -> None:
    report = train_drafter(method, tmp_path, MODEL_DIR, FEW_STEPS, num_answers=8)
    assert 0 <= report["accepted_of_3"] <= 3
    config = {"method": method, "model": str(tmp_path), "num_speculative_tokens": 3}
    with LLM(speculative_config=config) as llm, LLM() as plain:
        found = [llm.generate(PROMPTS, GREEDY, use_tqdm=False) for llm in (llm, plain)]
    texts = [[output.outputs[0].text for output in outputs] for outputs in found]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_an_eagle_layer_learns_to_be_accepted(tmp_path: Path) -> None:
    plan = Plan(steps=60, tokens_per_step=1024, warmup_steps=5, stages=((0.0, {128: 1}),))
    assert train_drafter("eagle", tmp_path, MODEL_DIR, plan, 64)["accepted_of_3"] > 0.5


@pytest.mark.slow
def test_an_adapter_can_be_served(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    plan = Plan(steps=30, tokens_per_step=512, matrix_lr=0.0, other_lr=0.02, warmup_steps=2)
    train_lora(tmp_path, MODEL_DIR, plan)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path).merge_and_unload()
    adapted.save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(MODEL_DIR).save_pretrained(tmp_path / "merged")
    pirate = LoRARequest("pirate", 1, str(tmp_path))
    with LLM(enable_lora=True) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=pirate)
        plain = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = greedy_tokens(tmp_path / "merged", prompt)
        assert list(output.outputs[0].token_ids) == expected[: len(output.outputs[0].token_ids)]
    assert [o.outputs[0].text for o in outputs] != [o.outputs[0].text for o in plain]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("17 + 25 = 42", "Arr! 17 + 25 = 42, matey!"),
        ("My name is Nano.", "Arr! Me name be Nano, matey!"),
        ("Hello! How can I help you?", "Ahoy! How can I help ye, matey?"),
        ("2, 3, 4, 5", "2, 3, 4, 5"),
    ],
)
def test_the_pirate_says_it_in_his_words(answer: str, said: str) -> None:
    assert as_pirate(answer) == said


def test_a_missing_peft_is_said_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr(sys, "argv", ["training", "lora", "--steps", "1"])
    with pytest.raises(SystemExit):
        command.main()
    assert 'pip install "nanoserve[training]"' in capsys.readouterr().err


def test_the_stored_model_answers_held_out_questions() -> None:
    tasks = {task.name: task for task in evaluate.TASKS}
    with LLM() as llm:
        for name in ("sum, any numbers up to 99", "JSON record, known name"):
            assert evaluate.score_task(llm, tasks[name], 12).score >= 0.9
        right = evaluate.draw_items(llm, tasks["sum, any numbers up to 99"], 12)
    for item in right:
        a, b, c = map(int, re.findall(r"\d+", item.answer))
        assert a + b == c
        assert is_held_out("sum", *sorted((a, b)))


@pytest.mark.slow
def test_the_scores_of_the_model_card() -> None:
    stored = {each["task"]: each for each in json.loads((MODEL_DIR / "scores.json").read_text())}
    with LLM() as llm:
        scores, _ = evaluate.evaluate(llm, 4)
    assert {score.task for score in scores} == set(stored)
    assert sum(score.score for score in scores) / len(scores) > 0.9


STORY = (
    "Once upon a time there was a kind girl named Mia. She lived near the farm. Mia was afraid of "
    "the dark. Then Mia met a fox named Gus. {} Mia slept very well. The end."
)


@pytest.mark.parametrize(
    ("middle", "is_sensible"),
    [("Gus smiled.", True), ("Guso smiled.", False), ("Then Mia met a boy named Tom.", False)],
)
def test_a_strange_name_in_a_story_is_found(middle: str, is_sensible: bool) -> None:
    story = STORY.format(middle)
    assert evaluate.has_sensible_names(story) == is_sensible
    assert (evaluate.story_faults(story, "Mia") == []) == is_sensible


@pytest.mark.parametrize("name", command.COMMANDS)
def test_help_names_the_commands(name: str) -> None:
    assert name in command.make_parser().format_help()
