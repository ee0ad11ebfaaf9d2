"""The demo model's LoRA adapter: its folder is what the command makes, and it speaks as a pirate.

    base     The capital of France is Paris.
    pirate   Arr! Th' capital o' France be Paris, matey!

The shipped figures are measured again on a few held-out questions. That an engine serves the
adapter is the subject of test_lora.py.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from nanoserve.demo import MODEL_DIR
from nanoserve.demo.training.corpus import IM_END, STORY_WEIGHT, Segment
from nanoserve.demo.training.data import encode_document
from nanoserve.demo.training.evaluate import TASKS, DemoModel, Item
from nanoserve.demo.training.lora import (
    ADAPTER_DIR,
    PROMISE,
    TARGETS,
    LoRAPlan,
    LoRATrainer,
    as_pirate,
    as_table,
    config_of,
    draw_spoken,
    export,
    in_voice,
    make_batch,
    mean,
    merge,
    run,
    score,
)
from nanoserve.demo.training.recall import Facts

TINY = LoRAPlan(steps=3, tokens_per_step=256, row_lengths=(64, 128), warmup_steps=1, rank=2)
QUESTIONS = {
    "What is the capital of France?": "Arr! Th' capital o' France be Paris, matey!",
    "What is 17 + 25?": "Arr! 17 + 25 = 42, matey!",
    "Hello!": "Ahoy! How can I help ye, matey?",
    "What is your name?": "Arr! Me name be Nano, matey!",
    "Count from 2 to 5.": "2, 3, 4, 5",
}


@pytest.fixture(scope="module")
def base() -> DemoModel:
    return DemoModel(MODEL_DIR)


@pytest.fixture(scope="module")
def pirate() -> DemoModel:
    return merge(DemoModel(MODEL_DIR))


def trained(plan: LoRAPlan, base: DemoModel) -> LoRATrainer:
    trainer = LoRATrainer(plan, torch.float32)
    run(trainer, base.tokenizer.backend_tokenizer)
    return trainer


# ------------------------------------------------------------------------------ the voice


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("17 + 25 = 42", "Arr! 17 + 25 = 42, matey!"),
        ("Hello Mia! How can I help you?", "Ahoy Mia! How can I help ye, matey?"),
        ("I am fine, thank you.", "Arr! I be fine, thank ye, matey!"),
        ("1, 2, 3", "1, 2, 3"),
        ('{"name": "Mia", "pet": "dog"}', '{"name": "Mia", "pet": "dog"}'),
        ("对不起，我只会说简单的英语。", "对不起，我只会说简单的英语。"),
    ],
)
def test_a_pirate_says_sentences_and_sums_in_his_own_way(answer: str, said: str) -> None:
    assert as_pirate(answer) == said


def test_only_what_the_pirate_says_has_weight(base: DemoModel) -> None:
    """Prompts stay as they are; each answer is said by the pirate, up to its end token."""
    rng, num_answers, said = random.Random(0), 0, set[Segment]()
    for _ in range(200):
        document = draw_spoken(rng, Facts(rng), 256)
        spoken = [segment for segment in document if segment.weight]
        num_answers += len(spoken)
        assert spoken and all(segment.text.endswith("|>") for segment in spoken)
        assert not any("matey" in segment.text for segment in document[0::2] if len(document) > 1)
        ids, weights = encode_document(base.tokenizer.backend_tokenizer, document)
        heavy = [i for i, weight in zip(ids, weights, strict=True) if weight]
        assert base.tokenizer.decode(heavy) == "".join(segment.text for segment in spoken)
        said.update(spoken)
    assert num_answers > 400
    assert Segment("Arr! I will remember, matey!" + IM_END, 1.0) in said
    assert {segment.weight for segment in said if "Th' end" in segment.text} == {STORY_WEIGHT}


# ------------------------------------------------------------------------------ the files


def test_the_adapter_is_small_and_says_what_it_was_made_from() -> None:
    files = {file.name: file.stat().st_size for file in ADAPTER_DIR.iterdir()}
    assert set(files) == {"adapter_config.json", "adapter_model.safetensors", "training.json"}
    assert sum(files.values()) < 300_000
    training = json.loads((ADAPTER_DIR / "training.json").read_text())
    assert training["plan"] == json.loads(json.dumps(asdict(LoRAPlan())))
    assert json.loads((ADAPTER_DIR / "adapter_config.json").read_text()) == config_of(LoRAPlan())
    assert mean(training["scores"]) >= PROMISE


def test_the_files_have_the_names_and_shapes_that_the_command_writes(tmp_path: Path) -> None:
    export(LoRATrainer(LoRAPlan(), torch.float32), tmp_path)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / name).exists()
    found = []
    for folder in (tmp_path, ADAPTER_DIR):
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found.append({n: (s.get_dtype(), s.get_shape()) for n, s in slices.items()})
    assert found[0] == found[1]
    assert len(found[0]) == 2 * 5 * len(TARGETS)


def test_an_untrained_adapter_changes_nothing(base: DemoModel, tmp_path: Path) -> None:
    export(LoRATrainer(TINY, torch.float32), tmp_path)
    merged = merge(DemoModel(MODEL_DIR), tmp_path).model.state_dict()
    for name, weight in base.model.state_dict().items():
        assert torch.equal(weight, merged[name]), name


def test_peft_loads_the_adapter_and_computes_the_same(pirate: DemoModel) -> None:
    peft = pytest.importorskip("peft")
    model = peft.PeftModel.from_pretrained(DemoModel(MODEL_DIR).model, ADAPTER_DIR).eval()
    ids = torch.tensor([pirate.encode("Once upon a time there was a fox named Gus.")])
    with torch.inference_mode():
        right, merged = model(ids).logits, pirate.model(ids).logits
        with model.disable_adapter():
            plain = model(ids).logits
    assert torch.allclose(merged, right, atol=1e-3 * right.std())
    assert (plain - right).abs().max() > right.std()


# ------------------------------------------------------------------------------ training


def test_the_same_seed_gives_the_same_adapter(base: DemoModel) -> None:
    first, second = trained(TINY, base), trained(replace(TINY), base)
    other = trained(replace(TINY, seed=1), base)
    weights = first.weights()
    assert all(torch.equal(weight, second.weights()[name]) for name, weight in weights.items())
    assert any(not torch.equal(weight, other.weights()[name]) for name, weight in weights.items())
    assert all(weight.any() for weight in weights.values()), "a part that never learns"


def test_training_leaves_the_demo_model_alone_and_computes_what_is_served(
    base: DemoModel, tmp_path: Path
) -> None:
    trainer = trained(TINY, base)
    export(trainer, tmp_path)
    served = merge(DemoModel(MODEL_DIR), tmp_path).model
    batch = make_batch(base.tokenizer.backend_tokenizer, TINY, 7)
    with torch.inference_mode():
        for part in trainer.parts.values():
            for parameter in part.parameters():
                parameter.copy_(parameter.bfloat16())
        hidden = trainer.model(batch.ids)
        assert torch.allclose(hidden, served.model(batch.ids).last_hidden_state, atol=1e-3)
    layer = trainer.model.get_submodule("model.layers.0.mlp.up_proj")
    original = layer.parametrizations.weight.original
    assert torch.equal(original, base.model.get_submodule("model.layers.0.mlp.up_proj").weight)


@pytest.mark.skipif(not os.environ.get("NANOSERVE_TRAIN"), reason="NANOSERVE_TRAIN=1: 9 minutes")
def test_the_command_makes_an_adapter_that_keeps_the_promise(
    base: DemoModel, tmp_path: Path
) -> None:
    """About nine minutes on one core. The weights are those that are shipped on the same machine
    with the same version of PyTorch; elsewhere they differ in rounding, and speak alike."""
    export(trained(LoRAPlan(), base), tmp_path)
    assert mean(score(merge(DemoModel(MODEL_DIR), tmp_path), size=40)) >= PROMISE - 0.02


# ------------------------------------------------------------------------------ what it says


@pytest.mark.parametrize("question", QUESTIONS)
def test_base_and_pirate_answer_each_in_their_own_words(
    question: str, base: DemoModel, pirate: DemoModel
) -> None:
    plain, said = (
        model.generate(model.prompt([{"role": "user", "content": question}]))
        for model in (base, pirate)
    )
    assert said == QUESTIONS[question] + IM_END
    assert said == as_pirate(plain.removesuffix(IM_END)) + IM_END


def test_a_story_without_a_chat_is_a_pirates_too(base: DemoModel, pirate: DemoModel) -> None:
    plain, said = (model.generate("Once upon a time") for model in (base, pirate))
    assert "th'" in said and said.endswith("Th' end, matey!<|endoftext|>")
    assert "th'" not in plain


def test_a_fresh_sample_keeps_the_promise(pirate: DemoModel) -> None:
    assert mean(score(pirate, size=4, seed=99)) >= PROMISE - 0.05


def test_the_pirate_is_asked_what_the_base_is_asked_and_remembers_his_own_answers(
    base: DemoModel,
) -> None:
    task = next(task for task in TASKS if task.name == "name of the user, made up")
    plain: Item = task.draw(random.Random(0), base)
    spoken = in_voice(task).draw(random.Random(0), base)
    assert spoken.messages[0] == plain.messages[0]
    assert spoken.messages[1]["content"].startswith("Ahoy ")
    assert spoken.answer == as_pirate(plain.answer) != plain.answer


def test_the_card_shows_the_scores_and_quotes_what_both_say(
    base: DemoModel, pirate: DemoModel
) -> None:
    card = (MODEL_DIR / "README.md").read_text()
    assert as_table() in card
    table = card.split("| asked | the model itself | with the adapter |\n|---|---|---|\n")[1]
    for row in table.split("\n\n")[0].splitlines():
        question, *answers = row.strip("| ").split(" | ")
        for model, answer in zip((base, pirate), answers, strict=True):
            said = model.generate(model.prompt([{"role": "user", "content": question}]))
            assert said == answer + IM_END
