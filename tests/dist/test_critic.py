"""A critic's step on gloo ranks is the step of one row at a time in one process.

1. In float64, for layouts and budgets × 1 to 3 ranks × replicated and FSDP2, and pairwise over normalisers, clips, old
   values or none, garbage in masked slots and fillers, order, padding multiples, gradient norms, families, activation
   checkpointing and windows of one row, of one trained row and without any: loss, whole gradient, values by row from
   training and from scoring, metrics and the weights after an SGD step equal the oracle to 1e-12; ranks agree.
2. In these windows a clip acts on some tokens and not on others, also where the value left the clip range.
3. Wrong formulas give another loss and gradient: the value read at the token itself, the smaller of the two errors, a
   clip around the return, no clip, and the factor ½ left out.
4. A policy's loss or another option of it on a critic, a critic's on a policy, several labels, one value per row and a
   DistributedDataParallel wrapper are refused by name.
5. Missing returns or old values are refused on every rank before anything runs, and the next window is exact.
6. A critic whose head is still 0 is verified by its hidden states: rows that see each other are found.
7. A fully_shard that reduces in half precision is refused; with FSDP2 each weight's gradient is float32.
8. Returns that do not vary have no explained variance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import (
    BloomConfig,
    BloomForTokenClassification,
    Qwen3ForSequenceClassification,
)

import evenstep.train
import oracle
from critic_cases import (
    FACTORS,
    VALUE_CLIP,
    ValueCase,
    ValueOutcome,
    build_case,
    run_value_cases,
    tiny_critic,
    value_rows,
)
from evenstep.errors import ConfigError, EvenstepError, PlanError
from evenstep.train.verify import verify_layout
from ranks import once, run_ranks
from step_cases import whole
from step_matrix import covering, random_points
from tiny_models import tiny_model, true_float64

POINTS = covering(FACTORS, ("world_size", "shape", "is_sharded"))
METRICS = ("value_mean", "return_mean", "value_error", "value_clip_fraction", "explained_variance")
TOLERANCE = 1e-12

pytestmark = pytest.mark.timeout(400)  # the first test of a rank count waits for its launch


def point_id(point: dict[str, Any]) -> str:
    return "-".join(str(value) for value in point.values())


@once
def outcomes(world_size: int) -> dict[str, list[ValueOutcome]]:
    """Case name -> its outcome on every rank: one launch per rank count."""
    cases = [build_case(point) for point in POINTS if point["world_size"] == world_size]
    by_rank = run_ranks(run_value_cases, world_size, cases, timeout_s=380, group_timeout_s=60)
    return {case.name: [found[i] for found in by_rank] for i, case in enumerate(cases)}


def as_names(values: dict[Any, Tensor]) -> dict[str, Tensor]:
    return {str(row_id): found for row_id, found in values.items()}


def assert_exact(case: ValueCase, by_rank: Sequence[ValueOutcome]) -> None:
    expected, first = case.oracle(), by_rank[0]
    for found in by_rank:
        assert (found.loss, found.metrics) == (first.loss, first.metrics)
        assert all(torch.equal(part, first.gradient[name]) for name, part in found.gradient.items())
        assert all(torch.equal(part, first.after[name]) for name, part in found.after.items())
    assert first.loss == pytest.approx(expected.loss, rel=TOLERANCE, abs=TOLERANCE)
    assert oracle.relative_error(first.gradient, expected.gradient) <= TOLERANCE
    assert {row.row_id: (row.num_tokens,) for row in case.rows} == {k: tuple(v.shape) for k, v in first.values.items()}
    for values in (first.values, first.scored):
        assert oracle.relative_error(as_names(values), as_names(expected.values)) <= TOLERANCE
    assert sum(found.num_own_rows for found in by_rank) == len(case.rows)
    assert all(found.num_logprobs == 0 for found in by_rank)
    for name in METRICS:
        assert first.metrics[name] == (
            None if expected.metrics[name] is None else pytest.approx(expected.metrics[name], rel=1e-11, abs=TOLERANCE)
        ), name
    assert not {"entropy", "clip_fraction", "ratio_max_deviation", "kl"} & first.metrics.keys()
    assert first.grad_norm == pytest.approx(oracle.gradient_norm(expected.gradient), rel=TOLERANCE, abs=TOLERANCE)
    assert first.stepped == any(row.loss_mask.any() for row in case.rows)
    assert (first.skip_reason is None) == first.stepped
    after = oracle.sgd_step(first.before, expected.gradient, lr=0.1, max_norm=case.trainer["max_grad_norm"])
    assert oracle.relative_error(first.after, after) <= TOLERANCE


@pytest.mark.parametrize("point", POINTS, ids=point_id)
def test_equals_the_oracle(point: dict[str, Any]) -> None:
    case = build_case(point)
    assert_exact(case, outcomes(point["world_size"])[case.name])


def test_in_one_process() -> None:
    point = next(p for p in POINTS if (p["world_size"], p["contents"], p["is_sharded"]) == (1, "all", False))
    case = build_case(point | {"value_clip": VALUE_CLIP, "has_old": True})
    assert_exact(case, run_value_cases([case]))


def test_the_windows_tell_formulas_apart() -> None:
    for point in POINTS:
        if point["contents"] == "all" and point["value_clip"] is not None:
            case = build_case(point)
            found = outcomes(point["world_size"])[case.name][0]
            assert 0.1 < found.metrics["value_clip_fraction"] < 0.9
            own = oracle_values(case)
            far = [
                abs(own[row.row_id][t] - row.old_values[t]) > VALUE_CLIP
                for row in case.reference_rows
                for t in row.loss_mask.nonzero()[0]
                if row.old_values is not None
            ]
            assert found.metrics["value_clip_fraction"] < sum(far) / len(far) < 1  # left the range, and came nearer
    contents = {(p["world_size"], p["contents"]) for p in POINTS}
    assert contents == {(w, c) for w in FACTORS["world_size"] for c in FACTORS["contents"]}


def oracle_values(case: ValueCase) -> dict[Any, Tensor]:
    return case.oracle().values


def smaller_error(value: Tensor, old: float, target: float, clip: float | None) -> tuple[Tensor, bool]:
    assert clip is not None
    bounded = old + torch.clamp(value - old, -clip, clip)
    return torch.minimum((value - target) ** 2, (bounded - target) ** 2) / 2, False


def clip_around_the_return(value: Tensor, old: float, target: float, clip: float | None) -> tuple[Tensor, bool]:
    return oracle.value_loss(value, target, target, clip)


def no_clip(value: Tensor, old: float, target: float, clip: float | None) -> tuple[Tensor, bool]:
    return oracle.value_loss(value, old, target, None)


def without_half(value: Tensor, old: float, target: float, clip: float | None) -> tuple[Tensor, bool]:
    loss, is_clipped = oracle.value_loss(value, old, target, clip)
    return 2 * loss, is_clipped


@pytest.mark.parametrize(
    "wrong",
    [
        {"read_at": 0},
        {"token_loss": smaller_error},
        {"token_loss": clip_around_the_return},
        {"token_loss": no_clip},
        {"token_loss": without_half},
    ],
    ids=["read at the token", "smaller error", "around the return", "no clip", "no half"],
)
def test_wrong_formulas_differ(wrong: dict[str, Any]) -> None:
    point = next(p for p in POINTS if p["contents"] == "all" and p["value_clip"] is not None)
    case = build_case(point)
    found, other = outcomes(point["world_size"])[case.name][0], case.oracle(**wrong)
    assert abs(found.loss - other.loss) > 1e-2 * abs(found.loss)
    assert oracle.relative_error(found.gradient, other.gradient) > 1e-2


# ------------------------------------------------------------------------------------------------ refusals


def trainer_of(model: Any, **options: Any) -> evenstep.train.Trainer:
    return evenstep.train.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo"])
def test_a_policys_loss_on_a_critic(loss: str) -> None:
    with pytest.raises(ConfigError, match=rf"loss '{loss}' trains a policy, and Qwen3ForTokenClassification has no"):
        trainer_of(tiny_critic(), loss=loss)


@pytest.mark.parametrize(
    "options",
    [{"kl_coef": 0.1}, {"entropy_coef": 0.1}, {"importance_cap": 2.0}, {"sequence_mask": (0.5, 2)}, {"dual_clip": 3.0}],
    ids=lambda options: next(iter(options)),
)
def test_a_policys_options_on_a_critic(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} belong to a policy's loss"):
        trainer_of(tiny_critic(), loss="value_clip", **options)


def test_a_critics_loss_on_a_policy() -> None:
    with pytest.raises(ConfigError, match="loss 'value_clip' trains a critic, and the model is a causal LM"):
        trainer_of(tiny_model(), loss="value_clip")
    with pytest.raises(ConfigError, match=r"value_clip belongs to a critic's loss, found 0\.2"):
        trainer_of(tiny_model(), value_clip=0.2)


def test_other_outputs_than_one_value_per_token() -> None:
    with pytest.raises(ConfigError, match="one value per token, found Qwen3ForTokenClassification with 2 labels"):
        trainer_of(tiny_critic(num_labels=2), loss="value_clip")
    config = tiny_critic().config
    config.pad_token_id = 0
    per_row = Qwen3ForSequenceClassification(config)
    with pytest.raises(ConfigError, match=r"one value per token, found Qwen3ForSequenceClassification with outputs of"):
        trainer_of(per_row, loss="value_clip")


def wrapped() -> tuple[str, str]:
    found = []
    for model, loss in ((tiny_critic(), "value_clip"), (tiny_model(), "ppo_clip")):
        wrapper: Any = torch.nn.parallel.DistributedDataParallel(model)
        with pytest.raises(ConfigError) as error:
            trainer_of(wrapper, loss=loss)
        found.append(str(error.value))
    return found[0], found[1]


def test_a_wrapper_that_averages() -> None:
    for messages in run_ranks(wrapped, 2):
        assert all("not a DistributedDataParallel wrapper" in text and "pass model.module" in text for text in messages)


def missing_fields(is_sharded: bool) -> tuple[dict[str, tuple[str, str]], float]:
    """{what is missing on which ranks: (error, message)}, then the error of the gradient of a whole window."""
    rows, found = list(value_rows()), {}
    for name in ("returns", "old_values"):
        without = [dataclasses.replace(row, **{name: None}) for row in rows]
        half = [*rows[:5], *without[5:]]
        for where, window in (
            ("everywhere", without),
            ("half", half),
            ("rank 1", without if dist.get_rank() else rows),
        ):
            with true_float64():
                model, trainer = built(is_sharded)
                try:
                    trainer.forward_backward(window)
                except EvenstepError as error:
                    found[f"{name} {where}"] = type(error).__name__, str(error)
    with true_float64():
        trainer.forward_backward(rows)
        gradient = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        settings = {"value_clip": VALUE_CLIP}
        expected = oracle.oracle_value_step(tiny_critic(attention="eager"), rows, **settings).gradient
    return found, oracle.relative_error(gradient, expected)


def built(is_sharded: bool) -> tuple[Any, evenstep.train.Trainer]:
    model = tiny_critic()
    if is_sharded:
        evenstep.train.shard(model)
    options = {"layout": "packed", "max_tokens_per_gpu": 30, "loss": "value_clip", "value_clip": VALUE_CLIP}
    return model, trainer_of(model, **options)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_missing_fields(is_sharded: bool) -> None:
    for rank, (found, error) in enumerate(run_ranks(missing_fields, 2, is_sharded)):
        assert len(found) == 6
        for name, why in (("returns", "a critic's loss"), ("old_values", f"value_clip = {VALUE_CLIP}")):
            kind, message = found[f"{name} everywhere"]
            assert kind == "RowError"
            assert f"{why} needs {name} on every row" in message
            assert found[f"{name} half"][0] == "RowError"
            assert found[f"{name} rank 1"][0] == ("RowError" if rank == 1 else "DistributedError")
        assert error <= TOLERANCE


def bloom_critic(head: float) -> Any:
    """Its attention has no way to be told where a row ends."""
    torch.manual_seed(0)
    model = BloomForTokenClassification(
        BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4, num_labels=1, hidden_dropout=0.0)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
        model.classifier.weight.fill_(head)
        model.classifier.bias.fill_(head)
    return model


@pytest.mark.parametrize("head", [0.0, 0.3])
def test_rows_that_see_each_other_are_found(head: float) -> None:
    verify_layout(bloom_critic(head), "padded")
    with pytest.raises(PlanError, match=r"'packed' must give each row .* BloomForTokenClassification they differ by"):
        verify_layout(bloom_critic(head), "packed")


class LookingAhead(type(tiny_critic())):  # type: ignore[misc]
    """Every token sees the mean of all embeddings of its row, padding included."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        embedded = self.model.embed_tokens(input_ids)
        return super().forward(inputs_embeds=embedded + embedded.mean(dim=1, keepdim=True), **kwargs)


@pytest.mark.parametrize("layout", ["padded", "packed", "tree", "fixed"])
def test_a_critic_that_looks_ahead_is_found(layout: str) -> None:
    model = tiny_critic(dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.zero_()
        model.score.bias.zero_()
    verify_layout(model, layout)
    ahead = LookingAhead(model.config)
    ahead.load_state_dict(model.state_dict())
    with pytest.raises(PlanError, match="LookingAhead they differ by"):
        verify_layout(ahead, layout)


def half_precision() -> tuple[list[str], set[torch.dtype]]:
    messages = []
    for options in ({"param_dtype": torch.bfloat16}, {"reduce_dtype": torch.float16}):
        model = tiny_critic(dtype=torch.float32)
        for part in (*model.model.layers, model):
            fully_shard(part, mp_policy=MixedPrecisionPolicy(**options))
        with pytest.raises(ConfigError) as error:
            trainer_of(model, loss="value_clip")
        messages.append(str(error.value))
    model = tiny_critic(dtype=torch.float32)
    evenstep.train.shard(model)
    trainer = trainer_of(model, loss="value_clip", compute_dtype="bfloat16")
    trainer.forward_backward(list(value_rows()))
    return messages, {p.grad.dtype for p in model.parameters() if p.grad is not None}


def test_half_precision_sums_are_refused() -> None:
    for messages, dtypes in run_ranks(half_precision, 2):
        assert all("must add up in float32" in text and "compute_dtype='bfloat16'" in text for text in messages)
        assert dtypes == {torch.float32}


def test_returns_that_do_not_vary() -> None:
    flat = [dataclasses.replace(row, returns=[0.7] * row.num_tokens) for row in value_rows()]
    with true_float64():
        found = trainer_of(tiny_critic(), loss="value_clip").forward_backward(flat).metrics
        expected = oracle.oracle_value_step(tiny_critic(attention="eager"), flat).metrics
    assert found["explained_variance"] is None
    assert expected["explained_variance"] is None
    assert found["value_error"] == pytest.approx(expected["value_error"], rel=TOLERANCE)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_random_points(world_size: int) -> None:
    points = [point | {"world_size": world_size} for point in random_points(FACTORS, 60, seed=world_size)]
    cases = [build_case(point) for point in points]
    by_rank = run_ranks(run_value_cases, world_size, cases, timeout_s=500, group_timeout_s=60)
    for i, case in enumerate(cases):
        assert_exact(case, [found[i] for found in by_rank])
