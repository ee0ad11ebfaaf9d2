"""Pictures of weights, RoPE and messages, and the oracles of notebooks 06 and 09."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nanoserve import SamplingParams
from nanoserve.config import ModelConfig
from nanoserve.extras import cases, lesson

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from nanoserve.extras import trace  # noqa: E402 (pictures need matplotlib)
from nanoserve.extras.trace.messages import Message  # noqa: E402
from nanoserve.models.weight_files import find_files, read_slices  # noqa: E402


@pytest.fixture(autouse=True)
def closed_figures() -> object:
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


def texts() -> list[str]:
    """All texts of the last picture."""
    import matplotlib.pyplot as plt

    return [text.get_text() for axes in plt.gcf().axes for text in axes.texts]


def test_every_tensor_of_the_checkpoint_is_where_it_is_said_to_be() -> None:
    """The rows of the parameter hold the very numbers of the file."""
    with lesson.small_llm() as llm:
        model = llm.engine.executor.runner.model
        [file] = find_files(llm.engine.model_config.path)
        stored = {name: source[:].float() for name, source in read_slices(file)}
        places = trace.placements(model)
        assert {place.name for place in places} == set(stored)
        for place in places:
            parameter = model.get_parameter(place.parameter)
            rows = parameter[slice(*place.rows)].view_as(stored[place.name])
            assert torch.equal(rows, stored[place.name]), place.name
        trace.packed_weights("packed", model, 32)
        assert "rows 128 to 191" in texts()


def test_the_parts_of_the_ranks_are_drawn() -> None:
    config = ModelConfig.from_folder(cases.MODEL_DIR)
    trace.rank_weights("ranks", [cases.meta_model(config, r, 2) for r in range(2)], 32)
    assert "rows\n0 to 63\nheads 0, 1" in texts() and "rows\n64 to 127\nheads 2, 3" in texts()
    assert "head 0" in texts() and "head 1" in texts()
    assert "columns\n192 to 383" in texts()


def test_the_parts_of_two_matrices_are_drawn() -> None:
    x, a, b = torch.eye(2), torch.full((2, 4), 3.0), torch.full((4, 2), 5.0)
    trace.two_matrices("two matrices", x, a, b)
    assert "60" in texts() and texts().count("30") == 2 * 4  # the sum, and the partial sums
    trace.two_matrices("two matrices", x, a, b, is_open=True)
    assert "60" not in texts() and texts().count("?") == 3 * 4


def test_rope_is_drawn() -> None:
    with lesson.small_llm() as llm:
        rotary = llm.engine.executor.runner.model.model.rotary_emb
        trace.rope_pairs("rope", rotary, torch.ones(32), torch.ones(32))
    assert texts().count("7") == 3  # the last position, once for each pair


def test_messages_are_written_down_and_drawn() -> None:
    with lesson.small_llm(tensor_parallel_size=2) as llm:
        parallel = llm.engine.executor.runner.parallel
        llm.add_request("A", lesson.prompt(llm, "A"), SamplingParams(max_tokens=4))
        llm.step()
        with trace.listen(parallel) as messages:
            llm.step()
        llm.step()
        assert messages[0] == Message("control", 4096)
        assert messages[1:12] == [Message("all_reduce", 512)] * 11
        assert messages[12:] == [Message("gather", 4096), Message("broadcast", 8)]
        trace.conversation("a step", messages)
        assert "layer 4\nMLP" in texts()
        llm.abort_request("A")
        measured = cases.steps(llm)
        assert measured.inputs[1] == (1, 1) and measured.oracle[1]["all_reduce"] == 11 * 512


def test_hidden_states_are_those_of_transformers() -> None:
    from transformers import AutoModelForCausalLM

    with lesson.small_llm(max_num_batched_tokens=64) as llm:
        prompt, layers = lesson.prompt(llm, "A"), llm.engine.executor.runner.model.model.layers
        params = SamplingParams(temperature=0, max_tokens=1)
        with trace.hidden_states(layers) as ours:
            [output] = llm.generate([prompt], params, use_tqdm=False)
        plain = AutoModelForCausalLM.from_pretrained(cases.MODEL_DIR, dtype="float32")
        with trace.hidden_states(plain.model.layers) as theirs, torch.inference_mode():
            plain(torch.tensor([prompt]))
        answer = output.outputs[0].token_ids
        said = trace.layer_words("words", llm, ours, theirs, answer)
    assert len(said) == 5 and said[-1] == answer
    assert len(ours) == len(theirs) == 5
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-4 * b.abs().max()


def test_oracles() -> None:
    """Against the rules in one line each."""
    for config, rows in zip(*cases.packing(), strict=True):
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        assert rows["v_proj"] == (q + kv, q + 2 * kv)
    for (x, weight, eps), norm in zip(*cases.norms(), strict=True):
        torch.testing.assert_close(norm, weight * F.rms_norm(x, (8,), eps=eps))
    for (head, heads, kv_heads), read in zip(*cases.key_heads(), strict=True):
        assert read == head * kv_heads // heads
    for (rank, ranks, heads), held in zip(*cases.key_head_shares(), strict=True):
        assert rank * heads // ranks in held
    parts = cases.embedding_parts()
    assert torch.stack(parts.oracle).sum(0).abs().amin(1).gt(0).all()  # each token is somebody's
