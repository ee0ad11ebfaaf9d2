"""Models that run through transformers: what attention gets, what is refused, what stays the same.

test_families.py compares their greedy tokens.
"""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import assert_same_greedy, reference_logits
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, GPT2LMHeadModel

from nanoserve import LLM, BeamSearchParams, SamplingParams
from nanoserve.attention import AttentionBackend, StepMetadata
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.layers import LayerConfig
from nanoserve.models.base import Model
from nanoserve.models.loader import load_model
from nanoserve.models.registry import ModelRegistry
from nanoserve.models.transformers_fallback import (
    TransformersForCausalLM,
    Unsupported,
    attend,
    run_probe,
    without_logs,
)
from nanoserve.parallel import ParallelState

MakeCheckpoint = Callable[..., Path]
PROMPT = [5, 9, 200, 31, 7, 18, 44, 101, 3, 250, 77]
GREEDY = SamplingParams(temperature=0, max_tokens=6)
ORIGINAL = 64  # positions before any stretching


def load(folder: Path, max_model_len: int = 64, **options: Any) -> Model:
    parallel = options.pop("parallel", ParallelState())
    model_config = ModelConfig.from_folder(folder)
    config = EngineConfig(max_model_len=max_model_len, **options).resolve(model_config)
    layer_config = LayerConfig(parallel=parallel)
    return load_model(config, model_config, layer_config, use_tqdm=False)


def answer(folder: Path, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    with LLM(folder, **{"dtype": "float32", "num_kv_blocks": 100, **options}) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]


def config_only(folder: Path, model_type: str, architecture: str, **overrides: Any) -> Path:
    """A folder with nothing but a config.json."""
    settings = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, **overrides}
    if model_type != "mamba":
        settings.setdefault("num_attention_heads", 4)
    config = AutoConfig.for_model(model_type, **settings)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return folder


# ------------------------------------------------------------------------------ the forward pass


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "gemma2", "cohere"])
def test_logits_of_all_positions_in_any_rows(
    make_checkpoint: MakeCheckpoint, model_type: str
) -> None:
    """Hidden states, then logits of the rows wanted, whatever comes between the body and them."""
    extra = {"gemma2": {"final_logit_softcapping": 5.0, "head_dim": 16}, "opt": {"ffn_dim": 112}}
    folder = make_checkpoint(model_type, **extra.get(model_type, {}))
    model = load(folder)
    cpu = torch.device("cpu")
    caches = [spec.allocate(4, 4, torch.float32, cpu) for spec in model.kv_cache_specs()]
    block_table = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    positions = torch.arange(len(PROMPT))
    metadata = StepMetadata(
        slot_mapping=block_table[0, positions // 4].long() * 4 + positions % 4,
        block_table=block_table,
        query_start_loc=torch.tensor([0, len(PROMPT)], dtype=torch.int32),
        seq_lens=torch.tensor([len(PROMPT)], dtype=torch.int32),
    )
    with torch.inference_mode():
        hidden = model(torch.tensor(PROMPT), positions, caches, metadata)
        logits = model.compute_logits(hidden)
        some = model.compute_logits(hidden[[7, 2]])
    expected = reference_logits(folder, PROMPT)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * float(expected.std()))
    torch.testing.assert_close(some, logits[[7, 2]])


def test_attention_gets_the_arguments_it_documents(make_checkpoint: MakeCheckpoint) -> None:
    """A backend gets the same shapes as from native models."""
    seen: list[tuple[Any, ...]] = []

    class Spy(AttentionBackend):
        def attend(self, query: Tensor, *args: Any, **options: Any) -> Tensor:
            seen.append((tuple(query.shape), query.is_contiguous(), options))
            return super().attend(query, *args, **options)

    folder = make_checkpoint(
        "gemma2", head_dim=24, sliding_window=7, query_pre_attn_scalar=36, num_hidden_layers=2
    )
    [tokens] = answer(folder, [PROMPT], attention_backend=Spy())
    assert_same_greedy(folder, PROMPT, tokens, GREEDY.max_tokens or 0)
    options = {"scale": 1 / 6, "logits_soft_cap": 50.0}
    assert seen[:2] == [
        ((len(PROMPT), 4, 24), True, {**options, "sliding_window": 7}),
        ((len(PROMPT), 4, 24), True, {**options, "sliding_window": None}),
    ]
    assert seen[2][0] == (1, 4, 24)


def test_a_family_that_drops_keyword_arguments(make_checkpoint: MakeCheckpoint) -> None:
    """The step is an attribute of this model's attention modules, and only while it lasts."""
    folder = make_checkpoint("nemotron")
    prompts = [PROMPT, PROMPT[:3], [8, 8, 8]]
    with LLM(folder, num_kv_blocks=60, max_num_batched_tokens=5, block_size=4) as llm:
        model = llm.engine.executor.runner.model
        assert isinstance(model, TransformersForCausalLM)
        assert len(model.modules_with_step) == 2
        for prompt, output in zip(
            prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True
        ):
            assert_same_greedy(folder, prompt, output.outputs[0].token_ids, 6)
        assert not any("nanoserve_step" in vars(module) for module in model.modules())


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
@pytest.mark.parametrize("max_model_len", [ORIGINAL, 2 * ORIGINAL])
def test_ropes_that_follow_the_length_are_fixed(
    make_checkpoint: MakeCheckpoint, rope_type: str, max_model_len: int
) -> None:
    """By max_model_len, as in our own model, which is the oracle here: transformers goes by the
    longest row of the batch. A request alone or in long company gets the same."""
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    length = ORIGINAL
    if rope_type == "longrope":
        rope["short_factor"] = [1.0 + 0.1 * i for i in range(8)]
        rope["long_factor"] = [2.0 + 0.5 * i for i in range(8)]
        rope["original_max_position_embeddings"] = ORIGINAL
        length = 2 * ORIGINAL
    folder = make_checkpoint("llama", rope_parameters=rope, max_position_embeddings=length)
    prompts = [PROMPT, (PROMPT * 12)[: max_model_len - 10]]
    ours = answer(folder, prompts, max_model_len=max_model_len)
    theirs = answer(folder, prompts, max_model_len=max_model_len, model_impl="transformers")
    assert theirs == ours
    alone = answer(folder, prompts[:1], max_model_len=max_model_len, model_impl="transformers")
    assert alone == theirs[:1]


def test_bfloat16_stays_near(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint("gpt_neox", dtype="bfloat16")
    [tokens] = answer(folder, [PROMPT], dtype="bfloat16")
    assert_same_greedy(folder, PROMPT, tokens, 6, dtype=torch.bfloat16)


# ------------------------------------------------------------------------------ all above it


def test_everything_above_attention_is_unchanged(make_checkpoint: MakeCheckpoint) -> None:
    """Completions that fork, seeds, prompt logprobs, swap, beams: as with our own model."""
    folder = make_checkpoint("llama")
    several = SamplingParams(n=3, temperature=0.9, seed=4, max_tokens=8, prompt_logprobs=2)
    found: list[Any] = []
    prompt_logprobs: list[list[float]] = []
    for model_impl in ("nanoserve", "transformers"):
        with LLM(
            folder,
            model_impl=model_impl,
            num_kv_blocks=16,
            block_size=4,
            preemption_mode="swap",
            max_num_batched_tokens=8,
            max_num_seqs=4,
        ) as llm:
            outputs = llm.generate([PROMPT, PROMPT[:4], PROMPT[2:]], several, use_tqdm=False)
            streamed = [out.outputs[0].token_ids for out in llm.stream(PROMPT, GREEDY)]
            [search] = llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=4))
        found.append(
            (
                [[c.token_ids for c in output.outputs] for output in outputs],
                streamed[-1],
                [beam.tokens for beam in search.sequences],
            )
        )
        prompt_logprobs.append(
            [
                logprob.logprob
                for output in outputs
                for entry in (output.prompt_logprobs or [])[1:]
                for logprob in (entry or {}).values()
            ]
        )
    assert found[0] == found[1]
    ours, theirs = map(torch.tensor, prompt_logprobs)
    assert len(ours) >= 2 * (len(PROMPT) - 1)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_two_engines_do_not_see_each_other(make_checkpoint: MakeCheckpoint) -> None:
    """Step by step in turns: the function that both models call holds nothing of either."""
    folders = [make_checkpoint("gpt2"), make_checkpoint("opt", ffn_dim=112)]
    alone = [answer(folder, [PROMPT])[0] for folder in folders]
    llms = [LLM(folder, num_kv_blocks=40, max_num_batched_tokens=4) for folder in folders]
    found: list[list[int]] = [[], []]
    for llm in llms:
        llm.add_request("r", PROMPT, GREEDY)
    while any(llm.has_unfinished_requests() for llm in llms):
        for number, llm in enumerate(llms):
            for output in llm.step():
                found[number] = output.outputs[0].token_ids
    for llm in llms:
        llm.close()
    assert found == alone


@pytest.mark.parametrize("model_impl", ["nanoserve", "transformers"])
def test_the_first_line_says_whose_model_runs(
    make_checkpoint: MakeCheckpoint, caplog: pytest.LogCaptureFixture, model_impl: str
) -> None:
    with (
        caplog.at_level("INFO", "nanoserve"),
        LLM(make_checkpoint("llama"), model_impl=model_impl, num_kv_blocks=10) as llm,
    ):
        described = llm.engine.executor.describe()
    assert ("model=transformers" in described) == (model_impl == "transformers")


# ------------------------------------------------------------------------------ refused

NAMES = r".*Supported natively: LlamaForCausalLM.* through transformers on one rank"


@pytest.mark.parametrize(
    ("model_type", "architecture", "overrides", "words"),
    [
        ("bloom", "BloomForCausalLM", {"max_position_embeddings": 64}, "attention interface"),
        ("gptj", "GPTJForCausalLM", {"rotary_dim": 8}, "attention interface"),
        ("falcon", "FalconForCausalLM", {"alibi": True}, "ALiBi"),
        ("falcon", "FalconForCausalLM", {"alibi": False}, "attention interface"),
        (
            "mamba",
            "MambaForCausalLM",
            {"num_attention_heads": 4, "max_position_embeddings": 64, "intermediate_size": 64},
            "keeps a state",
        ),
        ("gpt_oss", "GptOssForCausalLM", {"num_key_value_heads": 2}, "passes s_aux to attention"),
        ("doge", "DogeForCausalLM", {"num_key_value_heads": 2}, "adds a mask"),
        (
            "minimax",
            "MiniMaxForCausalLM",
            {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2},
            "attends in 1 of its 2 layers",
        ),
        ("bert", "BertLMHeadModel", {"is_decoder": False}, "lets tokens attend to later ones"),
    ],
)
def test_what_cannot_run_is_refused_with_a_sentence(
    tmp_path: Path, model_type: str, architecture: str, overrides: dict[str, Any], words: str
) -> None:
    """Which says why, and lists what can."""
    folder = config_only(tmp_path, model_type, architecture, **overrides)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "intermediate_size": 112}))
    with pytest.raises(ValueError, match=f"{architecture} is not supported: .*{words}{NAMES}"):
        LLM(folder, load_format="dummy", num_kv_blocks=10)


@pytest.mark.parametrize("model_type", ["mamba", "t5", "mpt"])
def test_a_config_that_names_no_heads_or_positions(tmp_path: Path, model_type: str) -> None:
    config_only(tmp_path, model_type, "SomeForCausalLM")
    with pytest.raises(ValueError, match=r"config.json has no '.*SomeForCausalLM.*what can"):
        LLM(tmp_path, load_format="dummy")


def test_an_unknown_architecture_is_named(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(make_checkpoint("llama"), tmp_path / "c"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Nobody"]}))
    with pytest.raises(ValueError, match=r"Nobody is not supported: transformers knows no" + NAMES):
        LLM(folder)


def test_a_config_that_transformers_refuses(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(make_checkpoint("gemma2", head_dim=16), tmp_path / "c"))
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"] = ["full_attention", "sideways_attention"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"/config\.json: The layer_types .*sideways") as refused:
        load(folder)
    assert "not supported" not in str(refused.value)  # the architecture is


BUILD = "the model cannot be built from it"


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("gemma2", {"hidden_activation": "swiglu"}, f"{BUILD} (unknown 'swiglu')"),
        ("opt", {"activation_function": "swiglu"}, f"{BUILD} (unknown 'swiglu')"),
        ("gpt2", {"activation_function": "swiglu"}, f"{BUILD} (unknown 'swiglu')"),
        ("gemma2", {"rope_parameters": {"rope_type": "yarm"}}, f"{BUILD} (unknown 'yarm')"),
        ("gemma2", {"sliding_window": -3}, "sliding_window is -3; allowed: an int from 1"),
        (
            "gemma2",
            {"num_hidden_layers": 3},
            "num_hidden_layers (3) must be equal to the number of layer_types (2)",
        ),
        (
            "gemma2",
            {"initializer_range": "x"},
            "Field 'initializer_range' expected float, got str (value: 'x')",
        ),
        ("gemma2", {"query_pre_attn_scalar": 0}, f"{BUILD} (0.0 cannot be raised"),
        (
            "gemma2",
            {"rope_parameters": {"rope_type": "linear"}},
            "Missing required keys in rope_parameters for 'rope_type'='linear': {'factor'}",
        ),
        ("gpt2", {"n_head": 5}, f"{BUILD} (embed_dim must be divisible by num_heads (got"),
    ],
)
def test_one_wrong_key_is_named_in_one_line(
    make_checkpoint: MakeCheckpoint,
    tmp_path: Path,
    transformers_log: list[str],
    model_type: str,
    changes: dict[str, Any],
    words: str,
) -> None:
    """The error begins with the file, not with the architecture, which is not the cause."""
    extra: dict[str, Any] = {"gemma2": {"head_dim": 16}, "opt": {"ffn_dim": 112}}
    source = make_checkpoint(model_type, **extra.get(model_type, {}))
    folder = change_config(Path(shutil.copytree(source, tmp_path / "c")), **changes)
    with pytest.raises(ValueError, match=r"config\.json: ") as refused:
        load(folder)
    assert str(refused.value).startswith(f"{folder / 'config.json'}: {words}")
    assert "\n" not in str(refused.value)
    assert transformers_log == []


@pytest.fixture
def transformers_log() -> Iterator[list[str]]:
    """What transformers logs, which does not go to the root logger."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield heard
    logger.removeHandler(handler)


def test_what_an_error_says_here_is_not_logged_before(
    gpt2: Path, transformers_log: list[str]
) -> None:
    """Of transformers' report, the error has the names. What the user loads is reported still."""
    tensors = load_file(gpt2 / "model.safetensors")
    tensors.pop("transformer.h.0.mlp.c_fc.weight")
    save_file(tensors, gpt2 / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="missing: "):
        load(gpt2)
    assert transformers_log == []
    GPT2LMHeadModel.from_pretrained(gpt2)
    assert any("LOAD REPORT" in text for text in transformers_log)


def test_other_threads_log_meanwhile(transformers_log: list[str]) -> None:
    logger = logging.getLogger("transformers.modeling_utils")
    with without_logs({logger.name: " REPORT"}):
        for text in ("A REPORT", "news"):
            logger.warning(text)
        thread = threading.Thread(target=logger.warning, args=("their REPORT",))
        thread.start()
        thread.join()
    logger.warning("a later REPORT")
    assert transformers_log == ["news", "their REPORT", "a later REPORT"]


def test_ranks_need_our_own_models(make_checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel .*can't be cut among ranks" + NAMES):
        load(make_checkpoint("gpt2"), parallel=ParallelState(0, 2))


def test_whose_model_may_be_chosen(make_checkpoint: MakeCheckpoint) -> None:
    assert isinstance(load(make_checkpoint("gpt2")), TransformersForCausalLM)
    folder = make_checkpoint("llama")
    assert not isinstance(load(folder), TransformersForCausalLM)
    assert isinstance(load(folder, model_impl="transformers"), TransformersForCausalLM)
    known = ", ".join(ModelRegistry.architectures())
    with pytest.raises(ValueError, match=f"GPT2LMHeadModel is not supported; supported: {known}"):
        load(make_checkpoint("gpt2"), model_impl="nanoserve")
    with pytest.raises(ValueError, match="model_impl is 'terratorch'; allowed: auto, nanoserve"):
        load(folder, model_impl="terratorch")


# ------------------------------------------------------------------------------ the probe itself


class Body(nn.Module):
    """A body whose layers call attention with the keyword arguments of a test."""

    def __init__(self, *kwargs: dict[str, Any], again: bool = False, mask: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.layers = nn.ModuleList(nn.Identity() for _ in kwargs)
        self.kwargs, self.again = kwargs, again
        self.mask = torch.zeros(1, 1, 2, 2) if mask else None

    def forward(self, input_ids: Tensor, nanoserve_step: Any, **_: Any) -> Any:
        q, k, v = torch.zeros(1, 4, 2, 6), torch.zeros(1, 2, 2, 6), torch.zeros(1, 2, 2, 5)
        for layer, kwargs in zip(self.layers, self.kwargs, strict=True):
            layer = self.layers[0] if self.again else layer
            out, _ = attend(layer, q, k, v, self.mask, nanoserve_step=nanoserve_step, **kwargs)
            assert out.shape == (1, 2, 4, 5)
        return SimpleNamespace(last_hidden_state=torch.zeros(1, 2, 8))


def settings_of(num_layers: int, **settings: Any) -> Any:
    return SimpleNamespace(num_hidden_layers=num_layers, **settings)


def test_the_probe_records_each_call_of_attention() -> None:
    body = Body({"scaling": 0.5, "softcap": 9.0}, {"sliding_window": 3, "use_cache": False})
    first, second = run_probe(body, settings_of(2), 16).calls
    assert (first.num_heads, first.scale, first.logits_soft_cap) == (4, 0.5, 9.0)
    assert (first.spec.num_kv_heads, first.spec.key_dim, first.spec.value_dim) == (2, 6, 5)
    assert first.spec.sliding_window is None
    assert (second.scale, second.logits_soft_cap, second.spec.sliding_window) == (6**-0.5, None, 3)


@pytest.mark.parametrize(
    ("body", "settings", "words"),
    [
        (Body({"s_aux": torch.ones(4)}), {}, "passes s_aux to attention"),
        (Body({"is_causal": False}), {}, "attend to later ones"),
        (Body({}, mask=True), {}, "adds a mask"),
        (Body({}, {}, again=True), {}, "one attention layer several times"),
        (Body({}), {"num_hidden_layers": 2}, "attends in 1 of its 2 layers"),
        (Body(), {"num_hidden_layers": 1}, "does not use transformers' attention interface"),
        (Body({}), {"layer_types": ["chunked_attention"]}, "type chunked_attention"),
        (Body({}), {"layer_types": ["sliding_attention"]}, "sliding_attention, .*window=None"),
        (Body({"sliding_window": 3}), {"layer_types": ["full_attention"]}, "window=3"),
        (Body({}), {"sliding_window": 3}, "sliding window that it does not pass"),
        (Body({"position_ids": torch.ones(2), "news": 1}), {}, "passes news to attention"),
    ],
)
def test_the_probe_refuses_what_would_be_lost(
    body: Body, settings: dict[str, Any], words: str
) -> None:
    config = settings_of(len(body.kwargs))
    vars(config).update(settings)
    with pytest.raises(Unsupported, match=words):
        run_probe(body, config, 16)


# ------------------------------------------------------------------------------ weights


def test_weights_that_do_not_match_are_named(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """transformers would fill what is missing at random, and go on with a warning."""
    name = "transformer.h.0.mlp.c_fc.weight"

    def damaged(edit: Callable[[dict[str, Tensor]], Any]) -> Path:
        folder = Path(shutil.copytree(make_checkpoint("gpt2"), tmp_path / "c", dirs_exist_ok=True))
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    with pytest.raises(ValueError, match=rf"c do not match .*missing: {name}"):
        load(damaged(lambda tensors: tensors.pop(name)))
    with pytest.raises(ValueError, match=r"do not match .*unexpected: .*extra"):
        load(damaged(lambda tensors: tensors.update({"transformer.extra": torch.ones(2)})))
    with pytest.raises(ValueError, match=rf"mismatched: .*{name}"):
        load(damaged(lambda tensors: tensors.update({name: torch.ones(3, 5)})))


def test_nothing_but_safetensors_is_read(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(make_checkpoint("gpt2"), tmp_path / "c"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no \.safetensors file"):
        load(folder)
    (folder / "pytorch_model.bin").rename(folder / "weights.safetensors")
    load(folder)  # any name will do, as for our own models


def test_code_in_a_checkpoint_is_not_run(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Phi-3 and DeepSeek come with some; transformers has these families itself."""
    folder = Path(shutil.copytree(make_checkpoint("gpt2"), tmp_path / "c"))
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('run')")
    assert answer(folder, [PROMPT]) == answer(make_checkpoint("gpt2"), [PROMPT])
    load(folder, load_format="dummy")


def change_config(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.fixture
def gpt2(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    """A good checkpoint, for a test to change."""
    return Path(shutil.copytree(make_checkpoint("gpt2"), tmp_path / "gpt2"))


def test_transformers_reads_no_file_of_the_folder(gpt2: Path, tmp_path: Path) -> None:
    """It would: a part of a distributed checkpoint, an adapter that names another folder, another
    config, a damaged generation_config.json."""
    expected = answer(gpt2, [PROMPT])
    (gpt2 / "shard-00000-model-00001-of-00001.safetensors").write_bytes(b"damaged")
    adapter = {"base_model_name_or_path": str(tmp_path / "no-such-folder"), "peft_type": "LORA"}
    (gpt2 / "adapter_config.json").write_text(json.dumps(adapter))
    (gpt2 / "config.4.0.0.json").write_text("{")
    (gpt2 / "generation_config.json").write_text('{"cache_implementation": "none such"}')
    change_config(
        gpt2,
        transformers_weights="../elsewhere.safetensors",
        configuration_files=["config.4.0.0.json", "../config.5.0.0.json"],
        _attn_implementation="nobody/evil-kernel",
    )
    assert answer(gpt2, [PROMPT]) == expected


@pytest.mark.parametrize(
    "changes", [{"vocab_size": 2**31 - 1}, {"n_embd": 2**20}, {"n_layer": 1000}, {"n_inner": 2**22}]
)
def test_sizes_are_compared_with_the_files(
    gpt2: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int]
) -> None:
    """Before transformers gets to fill anything."""
    monkeypatch.setattr(GPT2LMHeadModel, "from_pretrained", None)
    with pytest.raises(ValueError, match=r"gpt2 do not match its config\.json.*\d"):
        load(change_config(gpt2, **changes))


def test_dummy_weights_that_no_memory_holds(gpt2: Path) -> None:
    with pytest.raises(ValueError, match=r"need \d+\.\d GiB as float32 on cpu"):
        load(change_config(gpt2, vocab_size=2**31 - 1, n_embd=2**16), load_format="dummy")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_weights_that_are_no_floats(gpt2: Path, dtype: torch.dtype) -> None:
    tensors = load_file(gpt2 / "model.safetensors")
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)  # a buffer of old checkpoints
    tensors["transformer.h.0.attn.bias"] = mask
    save_file(tensors, gpt2 / "model.safetensors", metadata={"format": "pt"})
    load(gpt2)
    name = "transformer.h.0.attn.c_attn.bias"
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, gpt2 / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{name} in model\.safetensors has type"):
        load(gpt2)


def test_damage_and_quantization_have_the_same_errors_as_our_own_models(gpt2: Path) -> None:
    data = (gpt2 / "model.safetensors").read_bytes()
    (gpt2 / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or cut short"):
        load(gpt2)
    (gpt2 / "model.safetensors").write_bytes(pickle.dumps([]))
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or cut short"):
        load(gpt2)
    change_config(gpt2, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match=r"quantization_config \(fp8\)"):
        load(gpt2)


def test_an_index_without_metadata(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """transformers would raise KeyError; the names of the files are enough."""
    folder = Path(shutil.copytree(make_checkpoint("gpt2", shards=2), tmp_path / "c"))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]}))
    assert answer(folder, [PROMPT]) == answer(make_checkpoint("gpt2"), [PROMPT])
