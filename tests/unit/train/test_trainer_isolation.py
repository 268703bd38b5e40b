"""Rows that share a micro-batch do not see each other, and the model never sees more than the budget.

1. Changing every token of the neighbours (before and after, shorter and longer) does not move a row's log-probs by a
   bit in packed, padded and fixed layout, and neither does adding garbage to masked fields. In layout tree it does not
   by more than rounding: other neighbours make another trie, and a token's products may be summed in another order.
2. The gradient of a window in which only one row carries an advantage does not depend on its neighbours' tokens.
3. A row's log-probs in company equal those it has alone to 1e-12, and positions start at 0 for each row.
4. The test has teeth: packed without document boundaries, the same change moves the log-probs by more than 0.01.
5. What the model is given never exceeds the budget, except a row that is longer by itself, which stands alone; every
   forward has a backward.
6. An id that equals the padding id, or the end id, at any place changes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch

import oracle
from evenstep.types import Row
from step_cases import StepCase, build, run_case, whole
from tiny_models import VOCAB, tiny_model, true_float64
from tiny_rows import make_rows, with_garbage, with_old_logprobs, with_shared_beginnings

LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {"layout": "packed", "max_tokens_per_gpu": 60},
    "packed-4": {"layout": "packed", "max_tokens_per_gpu": 60, "pad_to_multiple": 4},
    "tree": {"layout": "tree", "max_tokens_per_gpu": 60},
    "tree-8": {"layout": "tree", "max_tokens_per_gpu": 60, "pad_to_multiple": 8},
    "padded": {"layout": "padded", "max_tokens_per_gpu": 60},
    "padded-8": {"layout": "padded", "max_tokens_per_gpu": 96, "pad_to_multiple": 8},
    "fixed": {"layout": "fixed", "micro_batch_rows": 4},
}
FAMILIES = ("qwen3", "llama")


@functools.cache
def _window() -> list[Row]:
    with true_float64():
        return with_old_logprobs(with_shared_beginnings(make_rows(max_tokens=17)), tiny_model())


def window() -> list[Row]:
    return list(_window())


def neighbours_changed(rows: list[Row], kept: int, seed: int = 1) -> list[Row]:
    """All rows but one get other tokens; lengths, masks and everything else stay."""
    random = np.random.default_rng(seed)
    return [
        row
        if i == kept
        else dataclasses.replace(row, token_ids=(row.token_ids + random.integers(1, VOCAB, row.num_tokens)) % VOCAB)
        for i, row in enumerate(rows)
    ]


def beginnings(rows: list[Row], cell: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Every distinct beginning of the cell's rows: what a trie has a place for."""
    return {tuple(rows[i].token_ids[: t + 1].tolist()) for i in cell for t in range(rows[i].num_tokens)}


def case(rows: list[Row], layout: str, family: str) -> StepCase:
    return StepCase(name="isolation", rows=rows, model={"family": family}, trainer=LAYOUTS[layout])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_change_the_neighbours(layout: str, family: str) -> None:
    rows = window()
    before = run_case(case(rows, layout, family))
    assert any(len(cell) > 1 for cell in before.cells[0])
    for kept in (0, 4, 9):
        after = run_case(case(with_garbage(neighbours_changed(rows, kept)), layout, family))
        row_id = rows[kept].row_id
        if layout.startswith("tree"):
            assert torch.allclose(after.logprobs[row_id], before.logprobs[row_id], rtol=0, atol=1e-13)
        else:
            assert after.cells == before.cells
            assert torch.equal(after.logprobs[row_id], before.logprobs[row_id])
        others = [row.row_id for i, row in enumerate(rows) if i != kept]
        assert not any(torch.equal(after.logprobs[other], before.logprobs[other]) for other in others)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_does_not_depend_on_neighbours(layout: str, family: str) -> None:
    kept = 4
    rows = [row if i == kept else dataclasses.replace(row, advantage=0.0) for i, row in enumerate(window())]
    before = run_case(case(rows, layout, family))
    after = run_case(case(neighbours_changed(rows, kept), layout, family))
    assert oracle.gradient_norm(before.gradient) > 1e-3
    assert oracle.relative_error(after.gradient, before.gradient) < 1e-13


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_company_equals_alone(layout: str, family: str) -> None:
    rows = window()
    together = run_case(case(rows, layout, family)).logprobs
    for row in rows[::3]:
        alone = run_case(case([row], layout, family)).logprobs[row.row_id]
        with true_float64():
            expected = oracle.oracle_step(tiny_model(family, attention="eager"), [row]).logprobs[row.row_id]
        assert torch.allclose(together[row.row_id], alone, rtol=0, atol=1e-12)
        assert torch.allclose(alone, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_start_at_0_for_each_row(layout: str) -> None:
    """Rotary embeddings see only differences of positions, so log-probs cannot show this; other models would."""
    rows, seen = window(), []
    with true_float64():
        model, trainer = build(case(rows, layout, "qwen3"))

        def see(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append(kwargs["position_ids"] if "position_ids" in kwargs else args[1])

        model.model.rotary_emb.register_forward_pre_hook(see, with_kwargs=True)
        cells = trainer.forward_backward(rows).plan.cells[0]
    for positions, cell in zip(seen, cells, strict=True):
        flat = positions[0].tolist()
        multiple = LAYOUTS[layout].get("pad_to_multiple", 1)
        shares = [-(-rows[i].num_tokens // multiple) * multiple for i in cell]
        if layout.startswith("packed"):
            assert flat == [t for share in shares for t in range(share)]
        elif layout.startswith("tree"):
            found, tail = flat[: len(beginnings(rows, cell))], flat[len(beginnings(rows, cell)) :]
            assert sorted(found) == sorted(len(begin) - 1 for begin in beginnings(rows, cell))
            assert tail == list(range(-len(found) % multiple))
        else:
            assert flat == list(range(max(shares)))


def test_without_boundaries_the_neighbours_show() -> None:
    rows = window()[:3]
    kept = 2
    moved = []
    for neighbours in (rows, neighbours_changed(rows, kept)):
        with true_float64(), torch.no_grad():
            ids = torch.from_numpy(np.concatenate([row.token_ids for row in neighbours]))[None]
            logits = tiny_model()(input_ids=ids, use_cache=False).logits[0, -rows[kept].num_tokens :]
        moved.append(torch.log_softmax(logits, dim=-1))
    assert float((moved[0] - moved[1]).abs().max()) > 0.01


@pytest.mark.parametrize("budget", [8, 17, 40, 100])
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_the_model_sees_no_more_than_the_budget(layout: str, multiple: int, budget: int) -> None:
    rows = window()
    settings = {"layout": layout, "max_tokens_per_gpu": budget, "pad_to_multiple": multiple}
    shapes: list[tuple[int, int]] = []
    backwards: list[int] = []

    def see(_: Any, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        shapes.append((args[0].shape[0], args[0].shape[1]))
        out.register_hook(lambda grad: backwards.append(grad.numel()))

    with true_float64():
        model, trainer = build(StepCase(name="budget", rows=rows, trainer=settings))
        model.get_input_embeddings().register_forward_hook(see)
        result = trainer.forward_backward(rows)
    assert len(shapes) == len(backwards) == len(result.plan.cells[0])
    widths = {i: -(-row.num_tokens // multiple) * multiple for i, row in enumerate(rows)}
    for shape, cell in zip(shapes, result.plan.cells[0], strict=True):
        if layout == "tree":
            assert shape == (1, -(-len(beginnings(rows, cell)) // multiple) * multiple)
        elif layout == "packed":
            assert shape == (1, sum(widths[i] for i in cell))
        else:
            assert shape == (len(cell), max(widths[i] for i in cell))
        assert shape[0] * shape[1] <= budget or len(cell) == 1
    footprints = [b * t for b, t in shapes]
    assert footprints[0] == max(footprints)


@pytest.mark.parametrize("pad_id", [0, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_and_end_ids_are_plain_tokens(layout: str, pad_id: int) -> None:
    """Rows made of the padding id inside and at their end, trained and not, on a model that calls it pad and end."""
    random = np.random.default_rng(0)
    rows = [
        dataclasses.replace(row, token_ids=np.where(random.random(row.num_tokens) < 0.6, pad_id, row.token_ids))
        for row in make_rows()
    ]
    rows = [dataclasses.replace(row, token_ids=[*row.token_ids[:-2], pad_id, pad_id]) for row in rows]
    with true_float64():
        model, trainer = build(StepCase(name="pad", rows=rows, trainer=LAYOUTS[layout]))
        for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
            setattr(model.config, name, pad_id)
            setattr(model.generation_config, name, pad_id)
        result = trainer.forward_backward(rows)
        gradient = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        expected = oracle.oracle_step(tiny_model(attention="eager"), rows)
    assert oracle.relative_error(gradient, expected.gradient) < 1e-12
    assert result.metrics["num_trained_tokens"] == sum(row.num_trained_tokens for row in rows)
    for row in rows:
        assert torch.allclose(result.logprobs[row.row_id], expected.logprobs[row.row_id], rtol=0, atol=1e-12)
