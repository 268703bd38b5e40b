"""Images in the step. What is locked here:

1. Neighbours: a row's log-probs do not depend on another row's image; images that change places change the step.
2. Positions restart in every packed row; rows with images that take the positions of text are another model's.
3. Refused with the reason: images in layout tree, of a model that sees none, and placeholders that lost theirs. Layout
   auto leaves tree out.
4. Patches take room: a micro-batch keeps to the budget with them.
5. Recomputed activations and adapters change nothing: the gradient of what trains is the model's own, row by row.
   Dropout in any part of the model is refused with recomputation.
6. ``verify_layout`` sees a model that places images wrongly.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import evenstep.train
import tiny_vision as tiny
from critic_cases import tiny_critic
from evenstep import Row
from evenstep.errors import ConfigError, EngineError, PlanError, RowError
from evenstep.train import collate as collate_module
from evenstep.train import engines
from evenstep.train import vision as vision_module
from evenstep.train.lora import add_lora
from evenstep.train.run_folder import RunFolder
from evenstep.train.setup import Models
from evenstep.train.tune_probe import _Prober
from evenstep.train.verify import verify_layout
from evenstep.tune.spec import CellShape
from tiny_models import tiny_model


def trainer(model: Any = None, **options: Any) -> evenstep.train.Trainer:
    model = tiny.tiny_vision_model() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return evenstep.train.Trainer(model, optimizer, **{"layout": "packed", "max_tokens_per_gpu": 200} | options)


@pytest.fixture(scope="module", autouse=True)
def _float64() -> Any:
    with tiny.true_float64():
        yield


@pytest.fixture(scope="module")
def packed() -> evenstep.train.Trainer:
    return trainer()


def logprobs(one: evenstep.train.Trainer, rows: list[Row]) -> dict[Any, torch.Tensor]:
    return one.score(rows)


def with_images_of(row: Row, other: Row) -> Row:
    return replace(row, media=[replace(new, start=old.start) for old, new in zip(row.media, other.media, strict=True)])


def test_images_belong_to_their_row(packed: evenstep.train.Trainer) -> None:
    a, b = tiny.row_of("a", 1, tiny.picture(1), 2, 3), tiny.row_of("b", 4, tiny.picture(2), 5, 6)
    c = tiny.row_of("c", 7, 8, 9)
    before = logprobs(packed, [a, b, c])
    moved = logprobs(packed, [a, with_images_of(b, a), c])
    assert torch.equal(before["a"], moved["a"])
    assert torch.equal(before["c"], moved["c"])
    assert not torch.allclose(before["b"], moved["b"], atol=1e-3)
    swapped = logprobs(packed, [with_images_of(a, b), with_images_of(b, a), c])
    assert not torch.allclose(before["a"], swapped["a"], atol=1e-3)
    assert torch.equal(moved["b"], swapped["b"])


def test_order_decides_which_image_stands_where(packed: evenstep.train.Trainer) -> None:
    first, second = tiny.picture(1), tiny.picture(2)
    rows = [tiny.row_of("r", 1, *pair, 2, 3) for pair in ((first, second), (second, first))]
    one, other = (logprobs(packed, [row])["r"] for row in rows)
    assert not torch.allclose(one, other, atol=1e-3)


def test_positions_of_text_give_another_step(packed: evenstep.train.Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tiny.mixed_rows()
    right = logprobs(packed, rows)
    for row in rows:
        alone = tiny.own_logprobs(packed.model, row).detach()
        is_trained = torch.from_numpy(row.loss_mask[1:].copy())
        assert torch.allclose(right[row.row_id][1:][is_trained], alone[is_trained], atol=1e-12)
    monkeypatch.setattr(
        collate_module,
        "_positions_among_images",
        lambda rows, ids, index, positions, vision: positions.expand(3, 1, -1),
    )
    wrong = logprobs(packed, rows)
    assert torch.equal(right["text"], wrong["text"])
    assert not torch.allclose(right["two"], wrong["two"], atol=1e-3)


def test_tree_is_refused_and_auto_avoids_it(packed: evenstep.train.Trainer) -> None:
    rows = tiny.mixed_rows()
    with pytest.raises(PlanError, match="found images in 4 of 6 rows, such as 'one'; use layout 'packed'"):
        trainer(layout="tree").forward_backward(rows)
    auto = trainer(layout="auto")
    assert auto.auto is not None
    assert "tree" in auto.auto.layouts
    window = auto.prepare(rows)
    assert window.plan.layout != "tree"
    assert "tree" not in str(window.layout_reason)
    assert auto.forward_backward(window).loss == pytest.approx(packed.forward_backward(rows).loss, abs=1e-12)
    packed.optim_step()


def test_a_model_without_eyes_is_refused() -> None:
    rows = tiny.mixed_rows()
    with pytest.raises(RowError, match=r"row 'one' has 1 images, and the model sees none \(4 of 6 rows"):
        trainer(tiny_model("qwen3"), layout="padded").prepare(rows)


def test_placeholders_without_images_are_refused(packed: evenstep.train.Trainer) -> None:
    rows = [replace(row, media=()) for row in tiny.mixed_rows()]
    with pytest.raises(RowError, match="row 'one': token 2 is an image placeholder"):
        packed.prepare(rows)


def test_videos_are_refused(packed: evenstep.train.Trainer) -> None:
    video = 19
    ids = [1, tiny.START, video, video, tiny.END, 3, 4]
    row = replace(tiny.mixed_rows()[2], token_ids=ids, loss_mask=[0] * 5 + [1, 1], old_logprobs=[-2.0] * 7)
    with pytest.raises(RowError, match=r"row 'text': token 2 begins a video \(19\)"):
        packed.prepare([row])
    packed.prepare([replace(row, token_ids=[1, video, 3, 3, video, 3, 4])])  # sampled, in a fork's context


def test_a_tower_that_trains_alone_is_refused() -> None:
    model = tiny.tiny_vision_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("visual" in name)
    with pytest.raises(ConfigError, match="more than its vision tower"):
        trainer(model)
    adapted = add_lora(tiny.tiny_vision_model(), rank=2, alpha=4.0, seed=0, target_modules=["qkv"])
    with pytest.raises(ConfigError, match="more than its vision tower"):
        evenstep.train.Trainer(adapted, torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad]))


def test_servers_get_the_processor_with_the_weights(
    packed: evenstep.train.Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(engines, "export", lambda *_, **settings: given.update(settings))
    models = Models(
        policy=packed,
        tokenizer=None,  # type: ignore[arg-type]
        whole_copy=None,
        frozen_copy=None,
        critic=None,
        processor_file=tmp_path / "preprocessor_config.json",
    )
    config: Any = SimpleNamespace(engine=SimpleNamespace(max_concurrent=1, untie_embeddings=False))
    renderer: Any = SimpleNamespace(stop_token_ids=frozenset())
    source = engines.ServerPolicyEngine(config, models, renderer, RunFolder(tmp_path), print)
    monkeypatch.setattr(source, "_start", lambda folder: None)
    with pytest.raises(EngineError, match="found none yet"):
        source.update_weights(1)
    assert given["beside"] == (tmp_path / "preprocessor_config.json",)


def test_rows_of_a_budget_probe_have_no_placeholder(packed: evenstep.train.Trainer) -> None:
    config = SimpleNamespace(old_logprobs="detached", train=SimpleNamespace(kl_coef=0.0), has_critic=False)
    prober: Any = SimpleNamespace(config=config, draw=np.random.default_rng(0), num_ranks=1)
    rows = _Prober._rows(prober, packed, CellShape(num_rows=40, row_tokens=6), 2)
    assert len(packed.prepare(rows).rows) == 80
    assert not any(tiny.IMAGE in row.token_ids for row in rows)


def test_a_window_of_another_model_is_refused(packed: evenstep.train.Trainer) -> None:
    critic = tiny_critic("qwen3")
    for blind in (tiny_model("qwen3"), critic):
        scorer = evenstep.train.Scorer(blind, layout="packed", max_tokens_per_gpu=200)
        with pytest.raises(ConfigError, match="which sees no images"):
            scorer.score(packed.prepare(tiny.mixed_rows()))
    scorer = evenstep.train.Scorer(tiny_model("qwen3"), layout="packed", max_tokens_per_gpu=200)
    lost = scorer.prepare([replace(row, media=()) for row in tiny.mixed_rows()])
    with pytest.raises(RowError, match="row 'one': token 2 is an image placeholder"):
        packed.score(lost)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_patches_take_room(layout: str) -> None:
    rows = [tiny.row_of(str(i), 1, tiny.picture(i, height=8, width=8), 2, 3) for i in range(4)]
    one = trainer(layout=layout, max_tokens_per_gpu=60)
    cells = one.prepare(rows).plan.cells[0]
    sizes = [sum(rows[i].num_tokens + rows[i].num_patches for i in cell) for cell in cells]
    assert sizes == [50, 50]  # 9 tokens and 16 patches a row: two rows fit, by tokens alone six would
    assert max(len(cell) for cell in cells) == 2


@pytest.mark.parametrize("way", ["adapters", "recomputed"])
def test_adapters_and_recomputed_activations(way: str) -> None:
    model, own = tiny.tiny_vision_model(), tiny.tiny_vision_model()
    if way == "adapters":
        model, own = (add_lora(each, rank=2, alpha=4.0, seed=0) for each in (model, own))
        for each in (model, own):
            for number, (name, parameter) in enumerate(each.named_parameters()):
                if "lora_B" in name:  # at zero, A would have no gradient
                    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
                    parameter.data.copy_(0.1 * noise)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings: dict[str, Any] = {"activation_checkpointing": way == "recomputed"}
    optimizer = torch.optim.SGD(trained, lr=0.1)
    one = evenstep.train.Trainer(model, optimizer, layout="packed", max_tokens_per_gpu=60, **settings)
    loss = one.forward_backward(tiny.mixed_rows()).loss
    expected_loss, expected = tiny.own_step(own, tiny.mixed_rows())
    assert loss == pytest.approx(expected_loss, abs=1e-12)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert any("visual" in name for name in found)
    apart = sum(float((gradient - expected[name]).square().sum()) for name, gradient in found.items()) ** 0.5
    assert apart <= 1e-12 * sum(float(each.square().sum()) for each in expected.values()) ** 0.5


def test_dropout_in_a_part_of_the_model_is_refused() -> None:
    model = tiny.tiny_vision_model()
    model.config.text_config.attention_dropout = 0.1
    with pytest.raises(ConfigError, match="attention_dropout"):
        trainer(model, activation_checkpointing=True)


@pytest.mark.parametrize(
    "layout, multiple, budget",
    [("padded", 1, 400), ("padded", 16, 160), ("packed", 1, 400), ("packed", 16, 160), ("auto", 16, 160)],
)
def test_what_is_computed_keeps_to_the_budget(layout: str, multiple: int, budget: int) -> None:
    # a long text beside rows that are short in tokens and have many patches
    rows = [tiny.row_of(f"i{i}", 1, tiny.picture(i, height=12, width=20), 2) for i in range(4)]
    rows.append(tiny.row_of("t", *[3, 4, 5, 6, 7] * 15))
    one = trainer(layout=layout, max_tokens_per_gpu=budget, pad_to_multiple=multiple)
    window = one.prepare(rows)
    assert not window.plan.overlong
    for cell in window.plan.cells[0]:
        found = collate_module.collate(
            [window.rows[i] for i in cell],
            [0.0] * len(cell),
            layout=window.plan.layout,
            multiple=multiple,
            num_shape_rows=1,
            dtype=torch.float64,
            device=torch.device("cpu"),
            width=window.plan.padded_width,
            vision=window.vision,
        )
        assert found.images is not None
        assert found.input_ids_BT.numel() + len(found.images.pixels_QD) <= budget, cell


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_images_in_the_wrong_place_are_found(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(media: Any, *args: Any, **settings: Any) -> Any:
        return make_images([(image, index[::-1].copy()) for image, index in media], *args, **settings)

    make_images = vision_module.make_images
    model = tiny.tiny_vision_model()
    verify_layout(model, layout, trained=dict(model.named_parameters()))
    monkeypatch.setattr(collate_module, "make_images", shifted)
    with pytest.raises(PlanError, match="they differ by"):
        verify_layout(model, layout)
