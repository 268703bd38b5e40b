"""Adapters and recomputed activations with images, on real ranks. What is locked here:

1. With adapters on all linear layers (the vision tower's included), on the decoder's alone, with activation
   checkpointing, and with both: loss and gradient of what trains, and log-probs, equal the model's own forward row by row
   in float64, on 1 and 2 ranks, padded and packed, replicated and sharded, also where no row has an image.
2. ``all-linear`` adapts the tower; names that only the decoder has leave it frozen, without a gradient and with its bits.
3. With the adapters off, rows with images have the base model's log-probs.
4. What is exported gives the adapted model's log-probs of rows with images: the merged folder without peft, and the
   adapter on top of the base model, as it is and merged by peft.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_vision as tiny
import torch
from ranks import once, run_ranks
from step_cases import whole, whole_weights

import evenstep.train
from evenstep import Row
from evenstep.train.checkpoint import export, export_adapter
from evenstep.train.lora import adapters_off, add_lora
from evenstep.train.models import PROCESSOR, load_model, load_vision

peft = pytest.importorskip("peft")

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from make_vision_policy import make_tokenizer

# a block of the tower returns a view, which nobody changes in place
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

LORA: dict[str, Any] = {"rank": 2, "alpha": 4.0, "seed": 3}
DECODER = ["q_proj", "v_proj", "o_proj"]  # names that no layer of a tower has
WAYS = ("adapters", "decoder", "recomputed", "both")
Case = tuple[str, str, bool, str, str]  # family, layout, sharded, way, rows
QUICK: tuple[Case, ...] = (
    ("qwen2_vl", "padded", False, "both", "mixed"),
    ("qwen2_5_vl", "packed", True, "both", "mixed"),
    ("qwen2_vl", "packed", True, "decoder", "mixed"),
    ("qwen2_5_vl", "padded", True, "recomputed", "mixed"),
    ("qwen2_vl", "packed", True, "adapters", "text"),
)
EVERY: tuple[Case, ...] = tuple(
    (family, layout, is_sharded, way, kind)
    for family in tiny.FAMILIES
    for layout in ("padded", "packed", "fixed")
    for is_sharded in (False, True)
    for way in WAYS
    for kind in ("mixed", "text")
)
Outcome = dict[str, Any]


def rows_of(kind: str) -> list[Row]:
    rows = tiny.mixed_rows()
    return rows if kind == "mixed" else [row for row in rows if not row.media]


def trained(model: Any) -> dict[str, Any]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def model_of(family: str, way: str, *, dtype: torch.dtype = torch.float64) -> Any:
    """The tiny model, with adapters away from zero unless it is only recomputed."""
    model = tiny.tiny_vision_model(family, dtype=dtype)
    if way == "recomputed":
        return model
    model = add_lora(model, **LORA, **({"target_modules": DECODER} if way == "decoder" else {}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in sorted(trained(model).items()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return model


def one_step(family: str, layout: str, is_sharded: bool, way: str, kind: str) -> Outcome:
    with tiny.true_float64():
        model = model_of(family, way)
        if is_sharded:
            evenstep.train.shard(model)
        before = whole_weights(model)
        optimizer = torch.optim.SGD(trained(model).values(), lr=0.1)
        settings: dict[str, Any] = {} if layout == "fixed" else {"max_tokens_per_gpu": 48}
        settings["activation_checkpointing"] = way in ("recomputed", "both")
        trainer = evenstep.train.Trainer(model, optimizer, layout=layout, **settings)
        rows = rows_of(kind)
        base = None
        if way != "recomputed":
            with adapters_off(model):
                base = trainer.gather(trainer.score(rows))
        result = trainer.forward_backward(rows)
        gradient = {name: whole(torch.zeros_like(p) if p.grad is None else p.grad) for name, p in trained(model).items()}
        logprobs = trainer.gather(result.logprobs)
        assert trainer.optim_step().stepped
        after = whole_weights(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    return {"loss": result.loss, "gradient": gradient, "logprobs": logprobs, "base": base, "changed": changed}


def steps_on_a_rank(cases: Sequence[Case]) -> list[Outcome]:
    return [one_step(*case) for case in cases]


@once
def launched(num_ranks: int, cases: tuple[Case, ...]) -> list[list[Outcome]]:
    return run_ranks(steps_on_a_rank, num_ranks, cases, timeout_s=600.0, group_timeout_s=60.0)


@once
def reference(family: str, way: str, kind: str) -> tuple[float, dict[str, torch.Tensor]]:
    with tiny.true_float64():
        return tiny.own_step(model_of(family, "adapters" if way == "both" else way), rows_of(kind))


def own_logprobs(model: Any, row: Row) -> torch.Tensor:
    """[T] of the model's own forward, 0 where nothing is trained."""
    with torch.no_grad():
        found_T = torch.cat([torch.zeros(1, dtype=torch.float64), tiny.own_logprobs(model, row).double()])
    return found_T * torch.from_numpy(row.loss_mask.copy())


def require_equal_steps(num_ranks: int, cases: tuple[Case, ...]) -> None:
    for rank, outcomes in enumerate(launched(num_ranks, cases)):
        for case, found in zip(cases, outcomes, strict=True):
            family, _, _, way, kind = case
            expected_loss, expected = reference(family, way, kind)
            assert found["loss"] == pytest.approx(expected_loss, abs=1e-12), (case, rank)
            gradient = found["gradient"]
            apart = sum(float((each - expected[name]).square().sum()) for name, each in gradient.items()) ** 0.5
            size = sum(float(expected[name].square().sum()) for name in gradient) ** 0.5
            assert 0 < size
            assert apart <= 1e-12 * size, (case, rank)
            of_tower = {name: float(each.abs().sum()) for name, each in gradient.items() if "visual" in name}
            assert bool(of_tower) == (way != "decoder"), case
            assert (sum(of_tower.values()) > 0) == (way != "decoder" and kind == "mixed"), case
            assert found["changed"] <= set(gradient), (case, rank)
            with tiny.true_float64():
                ours, base = model_of(family, way), tiny.tiny_vision_model(family)
                for row in rows_of(kind):
                    assert torch.allclose(found["logprobs"][row.row_id], own_logprobs(ours, row), rtol=0, atol=1e-12)
                    if found["base"] is not None:
                        of_base = own_logprobs(base, row)
                        assert torch.allclose(found["base"][row.row_id], of_base, rtol=0, atol=1e-12), (case, rank)
                        assert not torch.allclose(found["logprobs"][row.row_id], of_base, rtol=0, atol=1e-6), case


def test_steps_are_those_of_one_row_at_a_time_on_one_rank() -> None:
    require_equal_steps(1, QUICK[:2])


def test_steps_are_those_of_one_row_at_a_time_on_two_ranks() -> None:
    require_equal_steps(2, QUICK)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_steps_in_every_layout(num_ranks: int) -> None:
    require_equal_steps(num_ranks, EVERY)


# ------------------------------------------------------------------------------------------------ exports


def exported(folder: Path, family: str) -> dict[Any, torch.Tensor]:
    """Runs on every rank: export the adapted model, sharded; gives its own log-probs before."""
    with tiny.true_float64():
        tiny.tiny_vision_model(family).save_pretrained(folder / f"base{torch.distributed.get_rank()}")
        model = model_of(family, "adapters")
        expected = {row.row_id: own_logprobs(model, row) for row in tiny.mixed_rows()}
        evenstep.train.shard(model)
        before = whole_weights(model)
        export(folder / "merged", model, make_tokenizer(), beside=(folder / PROCESSOR,))
        export_adapter(folder / "adapter", model)
        after = whole_weights(model)
        assert all(torch.equal(before[name], after[name]) for name in before)
    return expected


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # asked by peft
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_exports_have_the_log_probs_of_rows_with_images(tmp_path: Path, family: str) -> None:
    (tmp_path / PROCESSOR).write_text('{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}')
    expected = run_ranks(exported, 2, tmp_path, family)[0]

    def apart(model: Any) -> float:
        found = {row.row_id: own_logprobs(model, row) for row in tiny.mixed_rows()}
        return max(float((found[name] - expected[name]).abs().max()) for name in expected)

    def base() -> Any:
        model = tiny.tiny_vision_model(family)
        saved = type(model).from_pretrained(tmp_path / "base0", dtype=torch.float64)
        model.load_state_dict(saved.state_dict())  # buffers that are not saved stay in true float64
        return model

    with tiny.true_float64():
        merged = tiny.tiny_vision_model(family, seed=1)
        merged.load_state_dict(load_model(str(tmp_path / "merged"), dtype=torch.float64)[0].state_dict())
        assert apart(merged) < 1e-12
        adapted = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter")
        assert apart(adapted) < 1e-12
        assert apart(adapted.merge_and_unload()) < 1e-12
        assert apart(base()) > 1e-3
    assert load_vision(str(tmp_path / "merged"))[0] is not None
    names = set(peft.load_peft_weights(tmp_path / "adapter", device="cpu"))
    assert any("visual" in name for name in names)
    assert any("language_model" in name for name in names)
    assert all("lora_" in name for name in names)
