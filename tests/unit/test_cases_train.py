"""Known faults of this kind of system, each as a test of its whole kind, through the Trainer.

With detached log-probs the ratio is 1, so a token's loss is minus its advantage: the numbers of a case are given as
advantages, and the loss comes out exactly whatever the model says.

P1  token mean taken per micro-batch          P13 garbage at masked positions
P2  averaging over ranks not undone           P14 a rank without trained tokens skips
P3  group baseline over rows                  P15 no trained token in the window
P4  ranks run different numbers of cells      P17 what continues a row and what opens one
P5  more cells than a rank has rows           P19 metrics averaged over micro-batches
P6  budget checked against real tokens        P20 rollouts weighted by their rows
P7  another row's mask                        P21 divided once more
P8  results not in the caller's order         P26 denominator counts untrained tokens
P9  rollout mean divided by rows              P29 clipped before the final scale
P10 fillers take part                         P30 packed rows see each other
P11 optimizer steps follow rows               P32 pad id equal to end id
P12 shift by one                              P34 counts in a low-precision type
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import evenstep.train
import oracle
from evenstep.credit import rollout_advantages
from evenstep.errors import RowError
from evenstep.types import Rollout, Row
from ranks import once, run_ranks
from step_cases import CaseOutcome, StepCase, build, run_built, run_case, run_cases, whole
from tiny_models import VOCAB, bigram_model, tiny_model, true_float64
from tiny_rows import REWARDS, make_rows, with_garbage, with_old_logprobs

BUDGETS = (4, 12, 30, 1000)
BIGRAM = [[0.1, 0.7, 0.2], [0.15, 0.25, 0.6], [0.3, 0.3, 0.4]]


def row(name: str, losses: Sequence[float | None], rollout: str | None = None, group: str = "g", **fields: Any) -> Row:
    """A row whose token t has the given loss; None: not trained. A context token stands in front."""
    values = [None, *losses]
    fields.setdefault("token_ids", [(3 * t + len(name)) % VOCAB for t in range(len(values))])
    return Row(
        row_id=name,
        rollout_id=rollout or name,
        group_id=group,
        loss_mask=[int(value is not None) for value in values],
        advantage=[0.0 if value is None else -value for value in values],
        **fields,
    )


def step(rows: Sequence[Row], voters: Mapping[Any, Any] | None = None, **settings: Any) -> CaseOutcome:
    """One step in one process."""
    return run_case(StepCase(name="step", rows=rows, voters=voters, trainer=settings, keeps_weights=True))


def exact(rows: Sequence[Row], voters: Mapping[Any, Any] | None = None, **settings: Any) -> oracle.OracleStep:
    return StepCase(name="exact", rows=rows, voters=voters, trainer=settings).oracle()


def assert_same_step(found: CaseOutcome, expected: CaseOutcome | oracle.OracleStep) -> None:
    assert oracle.relative_error(found.gradient, expected.gradient) < 1e-12
    assert found.loss == pytest.approx(expected.loss, rel=1e-12, abs=1e-12)
    for name in ("entropy", "clip_fraction", "ratio_max_deviation"):
        assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-12, abs=1e-12)


@functools.cache
def window() -> list[Row]:
    with true_float64():
        return with_old_logprobs(make_rows(), tiny_model())


# P1 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "num_microbatches"), [(4, 2), (8, 1)])
def test_p1_numbers(budget: int, num_microbatches: int) -> None:
    found = step([row("a", [1, 1, 1]), row("b", [5])], max_tokens_per_gpu=budget)
    assert found.metrics["num_microbatches"] == num_microbatches
    assert found.loss == pytest.approx(2.0, rel=1e-14)


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_p1_every_split_gives_one_gradient(layout: str) -> None:
    rows = window()
    expected = exact(rows)
    counts = set()
    for budget in BUDGETS:
        found = step(rows, layout=layout, max_tokens_per_gpu=budget)
        counts.add(found.metrics["num_microbatches"])
        assert_same_step(found, expected)
    assert len(counts) >= 3


# P2, P4, P5, P14: on ranks ----------------------------------------------------------------------------------------


def lengths_to_rows(lengths: Sequence[int], is_trained: Sequence[bool] | None = None) -> list[Row]:
    generator = random.Random(sum(lengths))
    return [
        Row(
            row_id=i,
            rollout_id=i,
            group_id=i % 2,
            token_ids=[generator.randrange(VOCAB) for _ in range(length)],
            loss_mask=[0, *([int(is_trained is None or is_trained[i])] * (length - 1))],
            advantage=REWARDS[i % len(REWARDS)] - 0.5,
        )
        for i, length in enumerate(lengths)
    ]


P2_ROWS = [row("a", [1] * 6), row("b", [4] * 2)]
RankCase = tuple[list[Row], dict[str, Any]]
RANK_CASES: dict[int, dict[str, RankCase]] = {
    2: {
        "P2": (P2_ROWS, {"max_tokens_per_gpu": 7}),
        "P4": (lengths_to_rows([8, 8, 8, 2, 2, 2]), {"max_tokens_per_gpu": 8}),
        "P5": (lengths_to_rows([8, 8, 8, 2]), {"max_tokens_per_gpu": 8}),
        "P14": (lengths_to_rows([3, 3, 3, 3], [True, True, True, False]), {"max_tokens_per_gpu": 3}),
        "P14 all of a rank": (lengths_to_rows([3, 3, 9], [False, False, True]), {"max_tokens_per_gpu": 9}),
    },
    3: {
        "P2": (P2_ROWS, {"max_tokens_per_gpu": 7}),
        **{
            f"P5 {n} {layout}": (lengths_to_rows([4] * n), {"max_tokens_per_gpu": 4, "layout": layout})
            for n, layout in enumerate(["padded", "packed", "tree"] * 2, start=1)
        },
        **{
            f"P5 {n} fixed": (lengths_to_rows([4, 7, 3, 5, 6, 2][:n]), {"layout": "fixed", "micro_batch_rows": 2})
            for n in (1, 4, 6)
        },
    },
    4: {
        "P2": (P2_ROWS, {"max_tokens_per_gpu": 7}),
        "P5": (lengths_to_rows([4, 4, 4]), {"max_tokens_per_gpu": 4}),
        "P34": (lengths_to_rows([258, 2, 2, 2]), {"max_tokens_per_gpu": 300}),
    },
}
RANK_KINDS = [
    (world_size, name, kind)
    for world_size, cases in RANK_CASES.items()
    for i, name in enumerate(cases)
    for k, kind in enumerate(("replicated", "sharded"))
    if world_size != 3 or name == "P2" or i // 2 % 2 == k  # the sweep takes turns
]


def counted(case: StepCase) -> tuple[CaseOutcome, int, int]:
    """The outcome, and how many forwards and backwards went through the model on this rank; scoring runs as many."""
    with case.precision():
        model, trainer = build(case)
        forwards: list[int] = []
        backwards: list[int] = []

        def see(_: Any, __: Any, out: torch.Tensor) -> None:
            forwards.append(1)
            if out.requires_grad:
                out.register_hook(lambda _: backwards.append(1))

        model.get_input_embeddings().register_forward_hook(see)
        outcome = run_built(case, model, trainer)
        num_forwards, num_backwards = len(forwards), len(backwards)
        scored = trainer.gather(trainer.score(case.rows))  # the learning rate is 0: at the same weights
        assert (len(forwards), len(backwards)) == (2 * num_forwards, num_backwards)
        assert all(torch.equal(scored[row_id], values) for row_id, values in outcome.logprobs.items())
    return outcome, num_forwards, num_backwards


def run_counted(cases: Sequence[StepCase]) -> list[tuple[CaseOutcome, int, int]]:
    return [counted(case) for case in cases]


@once
def rank_outcomes(world_size: int) -> dict[str, tuple[StepCase, list[tuple[CaseOutcome, int, int]]]]:
    cases = []
    for size, name, kind in RANK_KINDS:
        if size == world_size:
            rows, settings = RANK_CASES[world_size][name]
            is_sharded = kind == "sharded"
            cases.append(
                StepCase(
                    name=f"{name} {kind}",
                    rows=rows,
                    trainer=settings,
                    is_sharded=is_sharded,
                    optimizer_args={"lr": 0.0},
                )
            )
    by_rank = run_ranks(run_counted, world_size, cases)
    return {case.name: (case, [found[i] for found in by_rank]) for i, case in enumerate(cases)}


@pytest.mark.parametrize(("world_size", "name", "kind"), RANK_KINDS)
def test_ranks_run_in_step(world_size: int, name: str, kind: str) -> None:
    """Equal counts of forwards and backwards on every rank, and the gradient of one process, whatever the rows."""
    case, by_rank = rank_outcomes(world_size)[f"{name} {kind}"]
    expected = case.oracle()
    num_cells = {len(cells) for cells in by_rank[0][0].cells}
    assert {(forwards, backwards) for _, forwards, backwards in by_rank} == {(k, k) for k in num_cells}
    for found, _, _ in by_rank:
        assert_same_step(found, expected)
        assert sorted(map(repr, found.logprobs)) == sorted(repr(r.row_id) for r in case.rows)
        assert found.metrics["num_trained_tokens"] == sum(r.num_trained_tokens for r in case.rows)
        if name.startswith("P5 ") and not name.endswith("fixed"):  # n rows of 4 tokens, budget 4, 3 ranks
            n = int(name.split()[1])
            assert found.metrics["num_microbatches"] == -(-n // 3)
            assert found.metrics["num_fillers"] == 3 * -(-n // 3) - n


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_p2_p4_p5_p14_numbers(kind: str) -> None:
    for world_size in (2, 3, 4):
        _, by_rank = rank_outcomes(world_size)[f"P2 {kind}"]
        for found, _, _ in by_rank:
            assert found.loss == pytest.approx(1.75, rel=1e-14)  # not 2.5 (mean of rank means), 0.875, 7.0
    _, by_rank = rank_outcomes(2)[f"P4 {kind}"]
    assert by_rank[0][0].metrics["num_microbatches"] == 2  # 8, 8 | 8, (2, 2, 2): rows may go to either rank
    _, by_rank = rank_outcomes(2)[f"P5 {kind}"]
    assert by_rank[0][0].metrics["num_microbatches"] == 2
    _, by_rank = rank_outcomes(4)[f"P5 {kind}"]
    assert [forwards for _, forwards, _ in by_rank] == [1, 1, 1, 1]
    assert by_rank[0][0].metrics["num_fillers"] == 1
    _, by_rank = rank_outcomes(2)[f"P14 {kind}"]
    assert [(forwards, backwards) for _, forwards, backwards in by_rank] == [(2, 2), (2, 2)]
    assert by_rank[0][0].metrics["num_trained_tokens"] == 6


# P3, P7 -----------------------------------------------------------------------------------------------------------


def credited(rewards: Mapping[tuple[str, str], float], segments: Mapping[str, int]) -> list[Row]:
    """Rows whose advantages come from rewards: the rollout's advantage, copied through each row's own mask."""
    rollouts = [
        Rollout(rollout_id=name, group_id=group, prompt_id="p", reward=reward)
        for (group, name), reward in rewards.items()
    ]
    advantages = rollout_advantages(rollouts)
    generator = random.Random(0)
    return [
        Row(
            row_id=f"{name}/{s}",
            rollout_id=name,
            group_id=group,
            token_ids=[generator.randrange(VOCAB) for _ in range(4)],
            loss_mask=[0, 1, 1, 0] if s % 2 == 0 else [0, 0, 0, 1],
            advantage=advantages[name],
        )
        for group, name in rewards
        for s in range(segments[name])
    ]


def test_p3_splitting_moves_no_advantage() -> None:
    rewards = {("g0", "r0"): 1.0, ("g0", "r1"): 0.0}
    rows = credited(rewards, {"r0": 3, "r1": 1})
    by_rollout = {r.rollout_id: r.advantage for r in rows}
    assert by_rollout == {"r0": pytest.approx(math.sqrt(0.5), abs=2e-6), "r1": pytest.approx(-math.sqrt(0.5), abs=2e-6)}
    found = step(rows, max_tokens_per_gpu=8)
    num_trained = {name: sum(r.num_trained_tokens for r in rows if r.rollout_id == name) for name in by_rollout}
    expected = -sum(num_trained[name] * by_rollout[name] for name in by_rollout) / sum(num_trained.values())
    assert found.loss == pytest.approx(expected, rel=1e-12)
    assert_same_step(found, exact(rows))


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_p7_each_row_its_own_mask(layout: str) -> None:
    masks = {"row0": [0, 1, 1, 0], "row1": [0, 0, 0, 1]}
    rows = [
        Row(row_id=name, rollout_id="A", group_id="g", token_ids=[5, 1, 2, 3], loss_mask=mask, advantage=2.0)
        for name, mask in masks.items()
    ]
    assert [r.advantages_T.tolist() for r in rows] == [[0, 2, 2, 0], [0, 0, 0, 2]]
    for budget in (4, 8):
        found = step(rows, layout=layout, max_tokens_per_gpu=budget)
        assert found.loss == pytest.approx(-2.0, rel=1e-14)
        assert_same_step(found, exact(rows))
        for r in rows:
            assert (found.logprobs[r.row_id] != 0).tolist() == r.loss_mask.tolist()
    one_of_three = [dataclasses.replace(rows[0], advantage=0.0), rows[1]]
    assert step(one_of_three, layout=layout).loss == pytest.approx(-2 / 3, rel=1e-14)


# P6 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "budget", "layout", "num_microbatches"),
    [
        ([90, 20, 20, 20], 150, "padded", 2),
        ([6, 6, 4, 4], 10, "padded", 3),
        ([6, 6, 4, 4], 10, "packed", 2),
        ([7] * 8, 8, "padded", 8),
    ],
)
def test_p6_budget_is_the_rectangle(lengths: list[int], budget: int, layout: str, num_microbatches: int) -> None:
    rows = lengths_to_rows(lengths)
    found = step(rows, layout=layout, max_tokens_per_gpu=budget)
    assert found.metrics["num_microbatches"] == num_microbatches
    for cell in found.cells[0]:
        widths = [lengths[i] for i in cell]
        footprint = sum(widths) if layout == "packed" else len(widths) * max(widths)
        assert footprint <= budget
    assert_same_step(found, exact(rows))


# P8 ---------------------------------------------------------------------------------------------------------------


def results_by_id(orders: Sequence[Sequence[int]]) -> list[dict[Any, torch.Tensor]]:
    rows = window()
    with true_float64():
        _, trainer = build(StepCase(name="P8", rows=rows, trainer={"max_tokens_per_gpu": 20}))
        found = []
        for order in orders:
            result = trainer.forward_backward([rows[i] for i in order])
            found.append(dict(trainer.gather(result.logprobs)))
            found.append(dict(trainer.gather(trainer.score([rows[i] for i in order]))))
            with torch.no_grad():
                trainer.optimizer.zero_grad()
            trainer.optimizer.param_groups[0]["lr"] = 0.0
            trainer.optim_step()
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_p8_results_belong_to_their_rows(world_size: int) -> None:
    rows = window()
    expected = exact(rows).logprobs
    orders = [list(range(13)), [*range(1, 13), 0], [(5 * i + 3) % 13 for i in range(13)]]
    by_rank = run_ranks(results_by_id, world_size, orders) if world_size > 1 else [results_by_id(orders)]
    for found in by_rank:
        assert len(found) == 6
        for logprobs in found:
            assert set(logprobs) == {r.row_id for r in rows}
            for r in rows:
                assert logprobs[r.row_id].shape == (r.num_tokens,)
                assert torch.allclose(logprobs[r.row_id], expected[r.row_id], rtol=0, atol=1e-12)


# P9, P20 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [3, 6, 12])
def test_p9_rollout_mean(budget: int) -> None:
    split = [row("a0", [1, 1], "A"), row("a1", [4], "A"), row("b", [5], "B")]
    merged = [row("a", [1, 1, None, None, 4], "A"), row("b", [5], "B")]
    for rows in (split, merged):
        for normaliser, expected in (("rollout", 3.5), ("token", 2.75)):
            found = step(rows, normaliser=normaliser, max_tokens_per_gpu=budget)
            assert found.loss == pytest.approx(expected, rel=1e-14)
            assert_same_step(found, exact(rows, normaliser=normaliser))
    by_row = step(split, normaliser="row", allow_row_splits=True, max_tokens_per_gpu=budget)
    assert by_row.loss == pytest.approx(10 / 3, rel=1e-14)
    constant = step(split, normaliser="constant", normaliser_constant=4.0, max_tokens_per_gpu=budget)
    assert constant.loss == pytest.approx(11 / 8, rel=1e-14)


def test_p20_rollouts_and_rows_are_told_apart() -> None:
    rows = [row("a0", [1], "r0"), *(row(f"b{s}", [0], "r1") for s in range(4))]
    for budget in (2, 10):
        found = step(rows, normaliser="rollout", max_tokens_per_gpu=budget)
        assert found.loss == pytest.approx(0.5, rel=1e-14)  # not 0.2: r0's loss is half of the mean
        assert (found.metrics["num_voters"], found.metrics["num_rows"]) == (2, 5)
        assert found.metrics["segments_per_rollout_mean"] == 2.5
        assert found.metrics["segments_per_rollout_max"] == 4


# P10 --------------------------------------------------------------------------------------------------------------


def test_p10_numbers() -> None:
    rows = [row("a", [1, 3], "A"), row("b", [8], "B")]
    filler = Row(
        row_id="filler",
        rollout_id="B",
        group_id="g",
        token_ids=rows[1].token_ids,
        loss_mask=[0] * rows[1].num_tokens,
        advantage=[1e30] * rows[1].num_tokens,
    )
    copies = [dataclasses.replace(filler, row_id=f"filler{i}") for i in range(2)]
    found = step([*rows, *copies], max_tokens_per_gpu=6)
    assert found.loss == pytest.approx(4.0, rel=1e-14)
    assert found.metrics["num_trained_tokens"] == 3
    assert_same_step(found, exact(rows))


@pytest.mark.parametrize("normaliser", ["token", "rollout", "prompt", "row"])
def test_p10_inert_rows_change_nothing(normaliser: str) -> None:
    rows = window()
    settings = {"normaliser": normaliser, "allow_row_splits": normaliser == "row"}
    alone = step(rows, max_tokens_per_gpu=30, **settings)
    for num_fillers in (1, 3):
        absurd = [
            dataclasses.replace(
                r, row_id=f"filler{i}", loss_mask=[0] * r.num_tokens, advantage=[math.nan] * r.num_tokens
            )
            for i, r in enumerate(rows[:num_fillers])
        ]
        found = step([*absurd, *rows], max_tokens_per_gpu=30, **settings)
        assert_same_step(found, alone)
        assert found.metrics["num_trained_tokens"] == alone.metrics["num_trained_tokens"]
        assert found.metrics["num_voters"] == alone.metrics["num_voters"]


@pytest.mark.parametrize("micro_batch_rows", [2, 3, 4, 5, 7, 16])
def test_p10_own_fillers_change_nothing(micro_batch_rows: int) -> None:
    rows = window()
    found = step(rows, layout="fixed", micro_batch_rows=micro_batch_rows)
    assert found.metrics["num_fillers"] == -13 % micro_batch_rows
    assert found.metrics["num_rows"] == 13
    assert "filler" not in str(sorted(map(repr, found.logprobs)))
    assert_same_step(found, exact(rows))


# P11 --------------------------------------------------------------------------------------------------------------


def test_p11_one_optimizer_step_a_window() -> None:
    few = [row("a", [1, 2]), row("b", [3])]
    many = [row(f"{name}{s}", [1, 2], name) for name in "ab" for s in range(4)]
    with true_float64():
        model = tiny_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda index: 1 - index / 10)
        trainer = evenstep.train.Trainer(model, optimizer, max_tokens_per_gpu=3)
        for rows in (few, many):
            result = trainer.forward_backward(rows)
            assert result.metrics["num_microbatches"] == len(rows)
            assert trainer.optim_step().stepped
            schedule.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}
    assert optimizer.param_groups[0]["lr"] == pytest.approx(8e-4)


# P12 --------------------------------------------------------------------------------------------------------------


def bigram_step(rows: Sequence[Row], **settings: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    with true_float64():
        model = bigram_model(BIGRAM)
        trainer = evenstep.train.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)
        result = trainer.forward_backward(rows)
        return result, {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
@pytest.mark.parametrize("multiple", [1, 4])
def test_p12_token_t_given_the_tokens_before(layout: str, multiple: int) -> None:
    generator = random.Random(0)
    rows = [Row(row_id="case", rollout_id=0, group_id=0, token_ids=[0, 1, 2], loss_mask=[0, 1, 1], advantage=1.0)]
    for i in range(9):
        ids = [generator.randrange(3) for _ in range(2 + i)]
        mask = [0, *(generator.randrange(2) for _ in ids[2:]), 1]
        rows.append(Row(row_id=i, rollout_id=i, group_id=i, token_ids=ids, loss_mask=mask, advantage=0.5))
    result, _ = bigram_step(rows, layout=layout, max_tokens_per_gpu=24, pad_to_multiple=multiple)
    assert result.logprobs["case"].tolist() == pytest.approx([0.0, -0.356675, -0.510826], abs=1e-6)
    for r in rows:
        expected = [0.0] * r.num_tokens
        for t in range(1, r.num_tokens):
            if r.loss_mask[t]:
                expected[t] = math.log(BIGRAM[r.token_ids[t - 1]][r.token_ids[t]])
        assert result.logprobs[r.row_id].tolist() == pytest.approx(expected, rel=1e-12)


def test_p12_a_trained_first_token_is_refused() -> None:
    with pytest.raises(RowError, match="loss_mask"):
        Row(row_id=0, rollout_id=0, group_id=0, token_ids=[0, 1], loss_mask=[1, 1])


# P13 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [math.nan, -math.inf, math.inf, -150.0, 1e30])
@pytest.mark.parametrize("advantage", [2.0, math.nan, math.inf])
def test_p13_numbers(old: float, advantage: float) -> None:
    """Token 1 is trained with ratio 1 and advantage 2; token 2 is masked and holds garbage."""
    dirty, clean = (
        Row(
            row_id="r",
            rollout_id="r",
            group_id="g",
            token_ids=[0, 1, 2],
            loss_mask=[0, 1, 0],
            advantage=[advantage_0, 2.0, advantage_2],
            old_logprobs=[old_0, math.log(0.7), old_2],
        )
        for advantage_0, advantage_2, old_0, old_2 in ((advantage, advantage, old, old), (0.0, 0.0, 0.0, 0.0))
    )
    for dtype in (torch.float64, torch.float32):
        case = StepCase(name="P13", rows=[dirty], model={"dtype": dtype})
        found, expected = run_case(case), run_case(dataclasses.replace(case, rows=[clean]))
        assert found.loss == expected.loss
        assert all(torch.equal(found.gradient[name], part) for name, part in expected.gradient.items())
        assert all(math.isfinite(value) for value in found.metrics.values() if value is not None)
    result, gradient = bigram_step([dirty])
    assert result.loss == pytest.approx(-2.0, rel=1e-12)
    # d loss / d logits of the one trained token is -2·(onehot - P), carried by the one-hot hidden state of token 0
    head = gradient["lm_head.weight"]
    assert head[:, 0].tolist() == pytest.approx([2 * 0.1, -2 * 0.3, 2 * 0.2], rel=1e-10)
    assert not head[:, 1:].any()


@pytest.mark.parametrize("layout", ["fixed", "padded", "packed", "tree"])
def test_p13_every_field_everywhere(layout: str) -> None:
    rows = [
        dataclasses.replace(r, ref_logprobs=[-1.0] * r.num_tokens, engine_logprobs=[-1.0] * r.num_tokens)
        for r in window()
    ]
    settings = {"layout": layout} | ({"micro_batch_rows": 3} if layout == "fixed" else {"max_tokens_per_gpu": 30})
    clean, dirty = step(rows, **settings), step(with_garbage(rows), **settings)
    assert dirty.cells == clean.cells
    assert dirty.loss == clean.loss
    assert dirty.metrics == clean.metrics
    assert all(torch.equal(dirty.gradient[name], part) for name, part in clean.gradient.items())


# P15 --------------------------------------------------------------------------------------------------------------


def test_p15_no_trained_token() -> None:
    rows = [row("a", [None, None]), row("b", [None])]
    found = step(rows, max_tokens_per_gpu=3)
    assert found.loss == 0.0
    assert not any(part.any() for part in found.gradient.values())
    assert found.stepped == (False,)
    assert found.skip_reasons[0]
    assert found.metrics["num_trained_tokens"] == 0
    assert all(math.isfinite(value) for value in found.metrics.values() if value is not None)
    beside = step([row("a", [None, None]), row("b", [1, 3])], max_tokens_per_gpu=3)
    assert beside.metrics["num_microbatches"] == 2
    assert beside.loss == pytest.approx(2.0, rel=1e-14)


@pytest.mark.parametrize("normaliser", ["token", "rollout", "prompt", "constant", "row"])
def test_p15_voters_without_tokens(normaliser: str) -> None:
    settings: dict[str, Any] = {"normaliser": normaliser}
    if normaliser == "constant":
        settings["normaliser_constant"] = 2.0
    rows = [row("a", [None], group="g"), row("b", [1.0, 3.0], group="h")]
    voters = {"a": "g", "b": "h", "c": "i", "d": "h"}
    found = step(rows, voters, **settings)
    by_hand = {"token": 2.0, "rollout": 2.0 / 4, "prompt": 2.0 / 3, "constant": 4.0 / 8, "row": 2.0}
    assert found.loss == pytest.approx(by_hand[normaliser], rel=1e-14)
    assert found.metrics["num_voters"] == 4
    assert_same_step(found, exact(rows, voters, **settings))


def adamw_by_hand(is_last_skipped: bool) -> list[float]:
    """One weight (a bias on every token's hidden state): 1 -> 1 - lr·wd - lr after a unit Adam step."""
    with true_float64():
        model = tiny_model()
        weight = model.model.norm.weight
        for parameter in model.parameters():
            parameter.requires_grad_(parameter is weight)
        with torch.no_grad():
            weight.fill_(1.0)
        optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.1, betas=(0.9, 0.999), eps=1e-12)
        trainer = evenstep.train.Trainer(model, optimizer)
        values = []
        for rows in ([row("a", [1, -2])], [row("a", [None, None] if is_last_skipped else [0, 0])]):
            trainer.forward_backward(rows)
            trainer.optim_step()
            values.append(whole(weight))
    moved = (values[0] - 0.99).abs()
    assert torch.allclose(moved, torch.full_like(moved, 0.1), atol=1e-6)  # 1·(1 - 0.01) ∓ 0.1: 0.89 or 1.09
    return [float((values[1] - values[0]).abs().max())]


@pytest.mark.parametrize("is_last_skipped", [True, False])
def test_p15_adamw_does_not_drift(is_last_skipped: bool) -> None:
    assert adamw_by_hand(is_last_skipped) == [0.0]


# P17 --------------------------------------------------------------------------------------------------------------


def test_p17_history_is_trained_once() -> None:
    """Three turns as one row, and the same turns with the third opened anew after compaction: 4 trained tokens each."""
    one_row = [
        Row(
            row_id="x",
            rollout_id="X",
            group_id="g",
            token_ids=[1, 2, 3, 4, 5, 6, 7, 8],
            loss_mask=[0, 0, 1, 1, 0, 1, 0, 1],
            advantage=-1.5,
        )
    ]
    compacted = [
        Row(
            row_id="y0",
            rollout_id="Y",
            group_id="g",
            token_ids=[1, 2, 3, 4, 5, 6],
            loss_mask=[0, 0, 1, 1, 0, 1],
            advantage=-1.5,
        ),
        Row(
            row_id="y1",
            rollout_id="Y",
            group_id="g",
            token_ids=[1, 2, 9, 7, 8],
            loss_mask=[0, 0, 0, 0, 1],
            advantage=-1.5,
        ),
    ]
    for normaliser in ("token", "rollout"):
        for rows in (one_row, compacted):
            found = step(rows, normaliser=normaliser, max_tokens_per_gpu=10)
            assert found.metrics["num_trained_tokens"] == 4
            assert found.loss == pytest.approx(1.5, rel=1e-14)
            assert_same_step(found, exact(rows, normaliser=normaliser))
    x, y = step(one_row).logprobs["x"], step(compacted).logprobs["y0"]
    assert torch.allclose(x[:6], y, rtol=0, atol=1e-12)


# P19 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [2, 10, 100])
def test_p19_entropy_is_a_token_mean(budget: int) -> None:
    rows = [
        Row(row_id="a", rollout_id="a", group_id="g", token_ids=[1, 0], loss_mask=[0, 1], advantage=0.3),
        Row(row_id="b", rollout_id="b", group_id="g", token_ids=[2, *[2] * 9], loss_mask=[0, *[1] * 9], advantage=0.1),
    ]
    result, _ = bigram_step(rows, max_tokens_per_gpu=budget)
    h1, h2 = (-sum(p * math.log(p) for p in BIGRAM[i]) for i in (1, 2))
    assert result.metrics["entropy"] == pytest.approx((h1 + 9 * h2) / 10, rel=1e-12)
    assert abs((h1 + h2) / 2 - (h1 + 9 * h2) / 10) > 0.01


@pytest.mark.parametrize("budget", [3, 11, 100])
def test_p19_clip_fraction_and_ratio(budget: int) -> None:
    """One clipped token alone in its micro-batch beside nine that are not: 1/10, not the mean of 1 and 0."""
    logprob = math.log(0.7)
    clipped = Row(
        row_id="a",
        rollout_id="a",
        group_id="g",
        token_ids=[0, 1],
        loss_mask=[0, 1],
        advantage=1.0,
        old_logprobs=[0.0, logprob - math.log(1.5)],
    )
    plain = Row(
        row_id="b",
        rollout_id="b",
        group_id="g",
        token_ids=[0, 1] * 9,
        loss_mask=[0, 1] * 9,
        advantage=1.0,
        old_logprobs=[0.0, logprob - math.log(1.1)] * 9,
    )
    result, _ = bigram_step([clipped, plain], max_tokens_per_gpu=budget)
    assert result.metrics["clip_fraction"] == pytest.approx(0.1, rel=1e-12)
    assert result.metrics["ratio_max_deviation"] == pytest.approx(0.5, rel=1e-9)
    assert result.loss == pytest.approx(-(1.2 + 9 * 1.1) / 10, rel=1e-9)


# P21, P29 ---------------------------------------------------------------------------------------------------------


def test_p21_weights_move_by_the_whole_step() -> None:
    rows = [row(name, [1, 1]) for name in "abcd"]
    found = step(rows, max_tokens_per_gpu=3)
    assert found.metrics["num_microbatches"] == 4
    assert found.loss == pytest.approx(1.0, rel=1e-14)
    weights = oracle.sgd_step(found.weights[0], exact(rows).gradient, lr=0.1)
    update, expected = (
        {name: after[name] - found.weights[0][name] for name in after} for after in (found.weights[1], weights)
    )
    assert oracle.relative_error(update, expected) < 1e-12


P29_SETTINGS = [
    {"layout": "padded", "max_tokens_per_gpu": 14},
    {"layout": "packed", "max_tokens_per_gpu": 40},
    {"layout": "tree", "max_tokens_per_gpu": 40},
]


def run_p29() -> list[CaseOutcome]:
    rows = window()
    return run_cases(
        [
            StepCase(
                name="P29",
                rows=rows,
                trainer={**settings, "max_grad_norm": 0.2},
                is_sharded=is_sharded,
                keeps_weights=True,
            )
            for settings in P29_SETTINGS
            for is_sharded in (False, True)
        ]
    )


def test_p29_one_clip_of_the_final_gradient() -> None:
    gradient = exact(window()).gradient
    norm = oracle.gradient_norm(gradient)
    assert norm > 0.5
    for by_case in run_ranks(run_p29, 3):
        assert len(by_case) == 2 * len(P29_SETTINGS)
        for found in by_case:
            assert found.grad_norms[0] == pytest.approx(norm, rel=1e-12)
            weights = oracle.sgd_step(found.weights[0], gradient, lr=0.1, max_norm=0.2)
            update, expected = (
                {name: after[name] - found.weights[0][name] for name in after} for after in (found.weights[1], weights)
            )
            assert oracle.relative_error(update, expected) < 1e-11
            assert oracle.gradient_norm(update) == pytest.approx(0.1 * 0.2, rel=1e-10)


# P26, P34 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [5, 100])
def test_p26_only_trained_tokens_count(budget: int) -> None:
    rows = [row("a", [1, 1, 1, 1]), row("b", [None] * 3)]
    assert step(rows, max_tokens_per_gpu=budget).loss == pytest.approx(1.0, rel=1e-14)
    tools = [row("a", [1, None, None, 1, None, None, None, 1, 1, None])]
    found = step(tools, max_tokens_per_gpu=budget)
    assert found.loss == pytest.approx(1.0, rel=1e-14)
    assert found.metrics["num_trained_tokens"] == 4


def test_p34_counts_are_exact() -> None:
    for kind in ("replicated", "sharded"):
        _, by_rank = rank_outcomes(4)[f"P34 {kind}"]
        for found, _, _ in by_rank:
            assert found.metrics["num_trained_tokens"] == 260
            assert isinstance(found.metrics["num_trained_tokens"], int)


def test_p34_seventy_thousand_tokens() -> None:
    """Half of the tokens have loss 1, half loss 3: the mean is 2 only if all 70,000 are counted."""
    rows = [row(f"{i}", [1.0, 3.0] * 500, token_ids=[t % 3 for t in range(1001)]) for i in range(70)]
    with true_float64():
        model = bigram_model(BIGRAM)
        trainer = evenstep.train.Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), max_tokens_per_gpu=10_010, layout="packed"
        )
        result = trainer.forward_backward(rows)
    assert result.metrics["num_trained_tokens"] == 70_000
    assert result.loss == pytest.approx(2.0, rel=1e-12)


# P30, P32: the whole kinds are in tests/unit/train/test_trainer_isolation.py ---------------------------------------


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_p30_pack_of_two(layout: str) -> None:
    def rows(first: int) -> list[Row]:
        ids = {"A": [first, 4], "B": [1, 3, 5]}
        return [
            Row(row_id=n, rollout_id=n, group_id="g", token_ids=t, loss_mask=[0, *[1] * (len(t) - 1)], advantage=1.0)
            for n, t in ids.items()
        ]

    found = [step(rows(first), layout=layout, max_tokens_per_gpu=6) for first in (4, 9)]
    assert [len(f.cells[0]) for f in found] == [1, 1]
    assert torch.equal(found[0].logprobs["B"], found[1].logprobs["B"])
    assert not torch.equal(found[0].logprobs["A"], found[1].logprobs["A"])
    alone = step(rows(4)[1:], layout=layout)
    assert torch.allclose(found[0].logprobs["B"], alone.logprobs["B"], rtol=0, atol=1e-13)


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_p32_end_tokens_are_trained(layout: str) -> None:
    ids = {"one turn": ([5, 6, 2], [0, 1, 1]), "turns": ([5, 6, 2, 7, 8, 2], [0, 1, 1, 0, 1, 1])}
    rows = [
        Row(row_id=name, rollout_id=name, group_id="g", token_ids=t, loss_mask=m, advantage=0.7)
        for name, (t, m) in ids.items()
    ]
    with true_float64():
        model = tiny_model()
        model.config.pad_token_id = model.config.eos_token_id = 2
        trainer = evenstep.train.Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), layout=layout, pad_to_multiple=4
        )
        result = trainer.forward_backward(rows)
        gradient = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    assert result.metrics["num_trained_tokens"] == 6
    assert (result.logprobs["one turn"] != 0).tolist() == [False, True, True]
    assert (result.logprobs["turns"] != 0).tolist() == [False, True, True, False, True, True]
    assert oracle.relative_error(gradient, exact(rows).gradient) < 1e-12


def test_ranks_are_real() -> None:
    assert run_ranks(rank_of, 2) == [0, 1]


def rank_of() -> int:
    return dist.get_rank()


def test_window_is_worth_testing() -> None:
    """The rows of this file clip some tokens and not others, and their advantages have both signs."""
    rows = window()
    assert 0.1 < exact(rows).metrics["clip_fraction"] < 0.8
    assert len({np.sign(r.advantage) for r in rows}) == 2
