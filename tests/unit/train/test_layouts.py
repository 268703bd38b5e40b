"""Every layout gives each model the log-probs, values and gradients of one row at a time.

1. Qwen3, Llama (tied and untied), Gemma 2 (windows, capped scores), Gemma 3 (windows), gpt-oss (windows, sinks,
   experts) and two more models with experts: scoring, training and reference passes of padded, packed and tree, in
   float64 with the casts inside the models patched away to 1e-12, in float32 to 1e-6 of a float32 one-row run and 5e-6
   of float64. Rows are longer than the windows; parts of them begin alike.
2. The same through blocks alone, and with activation checkpointing.
3. KL, entropy, GSPO by rollout with its look-ahead pass, sequence masks and importance weights on a trie; a critic's
   values and loss; balance of experts, a shared token counted once for each row through it.
4. Random rows (segments, branches, duplicates, rows that begin others, rows of one token, rollouts without rows) under
   random budgets and multiples: layout tree is exact, and computes as many tokens as its plan says.
5. A bucket ladder pads behind the last row, and changes nothing else.
6. Where a backend cannot do it, asking for it is refused with the reason; the automatic choice never is, also on a
   GPU. FlashAttention is given the ends of the rows.
7. Long: FlexAttention without gradients gives what fused calls give, on a CPU. GPU: with gradients too.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import oracle
from critic_cases import SHAPES as CRITIC_SHAPES
from critic_cases import ValueCase, run_value_case, tiny_critic, value_rows
from evenstep.errors import ConfigError
from evenstep.train import Scorer, Trainer, attention
from evenstep.train.attention import NODES_KWARG, by_flash, by_node, choose_backend
from evenstep.train.trie import Node
from evenstep.types import Row
from moe_oracle import oracle_balance
from step_cases import CaseOutcome, StepCase, build, run_case, score
from tiny_models import EXPERTS_PER_TOKEN, FAMILIES, VOCAB, tiny_model, true_float64
from tiny_rows import LOGPROB_FIELDS, make_rows, with_old_logprobs, with_shared_beginnings

LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"layout": "padded", "max_tokens_per_gpu": 60},
    "packed": {"layout": "packed", "max_tokens_per_gpu": 40},
    "tree": {"layout": "tree", "max_tokens_per_gpu": 30},
    "tree, one cell": {"layout": "tree", "pad_to_multiple": 8},
}
MODELS = [*((family, False) for family in FAMILIES), ("llama", True), ("qwen3", True)]


@functools.cache
def window(family: str, is_tied: bool = False, scale: float = 0.4) -> tuple[Row, ...]:
    """Groups that begin alike, a row that another begins with, and one that is there twice."""
    rows = with_shared_beginnings(make_rows(((1, 3), (2, 1)), max_tokens=17), num_tokens=8)
    first, longest = rows[0], max(rows, key=lambda row: row.num_tokens)
    twin = dataclasses.replace(longest, row_id="twin", rollout_id="twin", group_id="twins", advantage=-0.3)
    begin = dataclasses.replace(
        longest,
        row_id="begin",
        rollout_id="begin",
        group_id="twins",
        token_ids=longest.token_ids[:6],
        loss_mask=[0, 1, 0, 1, 1, 1],
    )
    single = dataclasses.replace(first, row_id="single", token_ids=first.token_ids[:1], loss_mask=[0])
    with true_float64():
        model = tiny_model(family, is_tied=is_tied, scale=scale)
        return tuple(with_old_logprobs([*rows, twin, begin, single], model, names=LOGPROB_FIELDS))


def case_of(family: str, layout: str, is_tied: bool = False, **settings: Any) -> StepCase:
    dtype = settings.pop("dtype", torch.float64)
    # Gemma 3 multiplies its embeddings by 4: at 0.15 its own padded forward is 1.05e-6 from its one-row forward
    scale = 0.4 if dtype == torch.float64 else 0.1 if family == "gemma3" else 0.15
    return StepCase(
        name=f"{family} {layout}",
        rows=window(family, is_tied, scale),
        model={"family": family, "is_tied": is_tied, "dtype": dtype, "scale": scale},
        trainer=LAYOUTS[layout] | {"kl_coef": 0.1} | settings,
    )


@functools.cache
def reference(family: str, is_tied: bool, dtype: torch.dtype, reference_dtype: torch.dtype) -> oracle.OracleStep:
    case = case_of(family, "padded", is_tied, dtype=dtype)
    return dataclasses.replace(case, model=case.model | {"attention": "eager"}).oracle(reference_dtype)


def assert_equal(found: CaseOutcome, expected: oracle.OracleStep, tolerance: float) -> None:
    assert oracle.relative_error(found.gradient, expected.gradient) <= tolerance
    assert oracle.relative_error(found.logprobs, expected.logprobs) <= tolerance
    assert found.loss == pytest.approx(expected.loss, rel=tolerance, abs=tolerance)
    for name, value in expected.metrics.items():
        assert found.metrics[name] == pytest.approx(value, rel=10 * tolerance, abs=10 * tolerance), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "is_tied"), MODELS)
def test_float64(family: str, is_tied: bool, layout: str) -> None:
    found = run_case(dataclasses.replace(case_of(family, layout, is_tied), forbids_float32=layout == "tree"))
    assert_equal(found, reference(family, is_tied, torch.float64, torch.float64), 1e-12)
    if layout == "tree":
        assert found.stats.padding_efficiency > 1.3  # of the rows' tokens, so many are computed once for several
        assert len(found.cells[0]) > 1


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_float32(family: str, layout: str) -> None:
    found = run_case(case_of(family, layout, dtype=torch.float32))
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 5e-6)):
        expected = reference(family, False, torch.float32, dtype)
        assert oracle.relative_error(found.gradient, expected.gradient) <= tolerance
        assert oracle.relative_error(found.logprobs, expected.logprobs) <= tolerance


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_passes_agree(family: str, layout: str) -> None:
    """Scoring and a frozen reference give what training gives: the ratio is exactly 1, and the reference's KL 0."""
    case = case_of(family, layout)
    with case.precision():
        _, trainer = build(case)
        prepared, _ = score(dataclasses.replace(case, scoring="reused plan"), trainer)
        result = trainer.forward_backward(prepared)
        frozen = Scorer(tiny_model(family).requires_grad_(False), **LAYOUTS[layout])
        found = frozen.score(case.rows)
    assert result.metrics["ratio_max_deviation"] == 0.0
    for row in case.rows:
        assert torch.equal(found[row.row_id], result.logprobs[row.row_id])


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("layout", ["packed", "tree"])
def test_blocks_and_checkpoints(layout: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_COPIES", 0)
    monkeypatch.setattr(attention, "_is_cheap_by_node", lambda nodes: False)
    found = run_case(case_of(family, layout, activation_checkpointing=True))
    assert_equal(found, reference(family, False, torch.float64, torch.float64), 1e-12)


TERMS: dict[str, dict[str, Any]] = {
    "gspo": {"loss": "gspo", "ratio_unit": "rollout"},
    "gspo by segment": {"loss": "gspo", "ratio_unit": "segment", "entropy_coef": 0.03},
    "cispo": {"loss": "cispo", "importance_cap": 1.1, "normaliser": "rollout"},
    "masked": {"sequence_mask": (0.9, 1.1), "entropy_coef": 0.03, "kl_estimator": "k2", "dual_clip": 1.5},
}


@pytest.mark.parametrize("terms", TERMS)
def test_losses_on_a_trie(terms: str) -> None:
    case = case_of("gemma3", "tree", **TERMS[terms])
    assert_equal(run_case(case), case.oracle(), 1e-12)


@pytest.mark.parametrize("shape", ["tree-11", "tree-30"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_critic_on_a_trie(family: str, shape: str) -> None:
    rows = value_rows(family)
    trainer = CRITIC_SHAPES[shape] | {"loss": "value_clip", "value_clip": 0.15}
    found = run_value_case(ValueCase(name="tree", rows=rows, reference_rows=rows, family=family, trainer=trainer))
    with true_float64():
        expected = oracle.oracle_value_step(tiny_critic(family, attention="eager"), rows, value_clip=0.15)
    assert oracle.relative_error(found.gradient, expected.gradient) <= 1e-12
    assert oracle.relative_error(found.values, expected.values) <= 1e-12
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_balance_counts_a_shared_token_for_each_row(family: str) -> None:
    case = dataclasses.replace(case_of(family, "tree, one cell", moe_balance_coef=0.7), has_dirty_fillers=True)
    found, expected = run_case(case), reference(family, False, torch.float64, torch.float64)
    with true_float64():
        balance = oracle_balance(tiny_model(family, attention="eager"), case.rows, EXPERTS_PER_TOKEN)
        once = oracle_balance(tiny_model(family, attention="eager"), case.rows[:-3], EXPERTS_PER_TOKEN)
    gradient = {name: part + 0.7 * balance.gradient[name] for name, part in expected.gradient.items()}
    assert oracle.relative_error(found.gradient, gradient) <= 1e-12
    assert found.metrics["moe_balance"] == pytest.approx(balance.loss, rel=1e-12)
    assert abs(balance.loss - once.loss) > 1e-4  # without the rows that only go through others' tokens


@st.composite
def random_windows(draw: st.DrawFn) -> list[Row]:
    """Rows of few ids in groups, rollouts and segments, most of which begin as an earlier one does."""
    token_lists: list[list[int]] = []
    rows: list[Row] = []
    for i in range(draw(st.integers(1, 8))):
        begin = draw(st.sampled_from(token_lists)) if token_lists and draw(st.integers(0, 3)) else []
        begin = begin[: draw(st.integers(0, len(begin)))]
        own = draw(st.lists(st.integers(0, 2), min_size=0 if begin else 1, max_size=7))
        token_lists.append([*begin, *own])
        rollout = draw(st.integers(0, 3))
        mask = draw(st.lists(st.integers(0, 1), min_size=len(token_lists[-1]), max_size=len(token_lists[-1])))
        rows.append(
            Row(
                row_id=i,
                rollout_id=rollout,
                group_id=rollout % 2,
                token_ids=token_lists[-1],
                loss_mask=[0, *mask[1:]],
                advantage=draw(st.sampled_from([-0.7, 0.35, 1.3])),
                old_logprobs=draw(st.lists(st.floats(-4, -0.1), min_size=len(mask), max_size=len(mask))),
            )
        )
    return rows


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=random_windows(),
    budget=st.sampled_from([2, 6, 15, None]),
    multiple=st.sampled_from([1, 3]),
    family=st.sampled_from(["qwen3", "gemma3"]),
)
def test_random_rows(rows: list[Row], budget: int | None, multiple: int, family: str) -> None:
    budget = budget if budget is None or multiple <= budget else multiple
    voters = {rollout: rollout % 2 for rollout in range(5)}  # some without rows
    case = StepCase(
        name="random",
        rows=rows,
        voters=voters,
        model={"family": family, "num_layers": 2},
        trainer={"layout": "tree", "max_tokens_per_gpu": budget, "pad_to_multiple": multiple, "normaliser": "rollout"},
        has_dirty_fillers=True,
    )
    computed: list[int] = []
    with case.precision():
        model, trainer = build(case)
        model.get_input_embeddings().register_forward_hook(lambda _, args, out: computed.append(args[0].numel()))
        result = trainer.forward_backward(rows, voters)
        gradient = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    expected = case.oracle()
    assert oracle.relative_error(gradient, expected.gradient) <= 1e-12
    assert oracle.relative_error(result.logprobs, expected.logprobs) <= 1e-12
    for size, cell in zip(computed, result.plan.cells[0], strict=True):
        beginnings = {tuple(rows[i].token_ids[: t + 1]) for i in cell for t in range(rows[i].num_tokens)}
        assert size == -(-len(beginnings) // multiple) * multiple


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_a_bucket_ladder_pads_behind_the_last_row(layout: str) -> None:
    widths: dict[float | None, set[int]] = {}
    for bucket in (None, 0.3):
        case = case_of("gemma3", layout, bucket=bucket)
        with case.precision():
            model, trainer = build(case)
            seen = widths.setdefault(bucket, set())
            model.get_input_embeddings().register_forward_hook(lambda _, args, out, to=seen: to.add(args[0].shape[1]))
            trainer.forward_backward(case.rows)
            gradient = {name: p.grad for name, p in model.named_parameters()}
            rungs = set(trainer.prepare(case.rows).plan.room.ladder(60).tolist()) if bucket else set()
        expected = reference("gemma3", False, torch.float64, torch.float64).gradient
        assert oracle.relative_error(gradient, expected) <= 1e-12
    assert widths[0.3] <= rungs
    assert not widths[None] <= rungs


def test_backends_are_chosen_or_refused() -> None:
    model = tiny_model(dtype=torch.float32)

    def choose(layout: str, requested: str, *, is_trained: bool = True, compute_dtype: str | None = None) -> str | None:
        return choose_backend(model, layout, requested, compute_dtype=compute_dtype, is_trained=is_trained)

    assert [choose(layout, "auto") for layout in ("fixed", "padded", "packed", "tree")] == [None, None, "sdpa", "sdpa"]
    assert choose("tree", "flex", is_trained=False) == "flex"
    with pytest.raises(ConfigError, match=r"attention = 'flex' has no backward pass on a CPU; leave it out"):
        choose("tree", "flex")
    with pytest.raises(ConfigError, match=r"attention = 'flash' needs a CUDA device and the package flash-attn"):
        choose("packed", "flash", compute_dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"found it with layout 'padded', where the model's own attention runs"):
        choose("padded", "sdpa")
    with pytest.raises(ConfigError, match="no backward pass on a CPU"):
        Trainer(model, torch.optim.SGD(model.parameters()), layout="packed", attention="flex")
    with pytest.raises(ConfigError, match="attention must be one of auto, sdpa, flex, flash, found 'eager'"):
        Trainer(model, torch.optim.SGD(model.parameters()), attention="eager")
    with pytest.raises(ConfigError, match="bucket must be a share between 0 and 1, found 2"):
        Trainer(model, torch.optim.SGD(model.parameters()), bucket=2)


class OnCuda:
    """As much of a model as the choice of a backend looks at, with parameters that say they are on a GPU."""

    def __init__(self, family: str, dtype: torch.dtype = torch.float32, **shape: Any) -> None:
        model = tiny_model(family, dtype=dtype, **shape)
        self.config = model.config
        with FakeTensorMode():
            self._parameters = {
                name: torch.nn.Parameter(torch.empty(p.shape, dtype=dtype, device="cuda"))
                for name, p in model.named_parameters()
            }

    def parameters(self) -> Any:
        return iter(self._parameters.values())

    def named_parameters(self) -> Any:
        return self._parameters.items()


@pytest.mark.parametrize("has_flash", [False, True])
def test_backends_on_a_gpu(monkeypatch: pytest.MonkeyPatch, has_flash: bool) -> None:
    monkeypatch.setattr(attention, "has_triton", lambda: True)
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: has_flash)

    def choose(model: Any, layout: str, requested: str = "auto", half: bool = True) -> str | None:
        return choose_backend(
            model, layout, requested, compute_dtype="bfloat16" if half else "float32", is_trained=True
        )

    plain, sinks = OnCuda("qwen3", head_dim=16), OnCuda("gpt_oss", head_dim=16)
    assert choose(plain, "packed") == ("flash" if has_flash else "flex")
    assert choose(plain, "packed", half=False) == choose(plain, "tree") == choose(sinks, "packed") == "flex"
    assert choose(plain, "padded") is None
    assert choose(OnCuda("qwen3", head_dim=4), "tree") == "sdpa"
    assert choose(OnCuda("qwen3", torch.float64, head_dim=16), "packed", half=False) == "sdpa"
    monkeypatch.setattr(attention, "has_triton", lambda: False)
    assert choose(plain, "tree") == "sdpa"
    with pytest.raises(ConfigError, match="'flex' is compiled by Triton, which is not installed"):
        choose(plain, "tree", "flex")
    if has_flash:
        for model, layout, half, words in (
            (plain, "tree", True, "knows rows and no tries, found layout 'tree'"),
            (plain, "packed", False, "computes in half precision, found compute_dtype 'float32'"),
            (sinks, "packed", True, r"has no attention sinks, found model\.layers\.0\.self_attn\.sinks"),
        ):
            with pytest.raises(ConfigError, match=words):
                choose(model, layout, "flash", half=half)


def test_flash_attention_is_told_where_rows_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain softmax in place of the kernel, which reads the lengths from the kernel's arguments."""
    real = inspect.signature(attention._flash_attention_forward)

    def kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = real.bind(*args, **kwargs).arguments
        assert given["attention_mask"] is None
        assert given["is_causal"]
        assert torch.equal(given["cu_seq_lens_q"], given["cu_seq_lens_k"])
        ends = given["cu_seq_lens_q"].tolist()
        assert max(b - a for a, b in itertools.pairwise(ends)) == given["max_length_q"] == given["max_length_k"]
        query, key, value = (given[f"{name}_states"] for name in ("query", "key", "value"))
        assert query.shape[1] == ends[-1] == given["query_length"]
        how = {
            "scaling": given["softmax_scale"],
            "sliding_window": given["sliding_window"],
            "softcap": given["softcap"],
        }
        tensors = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        parts = [
            by_node(None, *(t[:, :, a:b] for t in tensors), None, **how, **{NODES_KWARG: (Node(0, b - a, b - a, 0),)})  # type: ignore[arg-type]
            for a, b in itertools.pairwise(ends)
        ]
        return torch.cat([out for out, _ in parts], dim=1)

    monkeypatch.setattr(attention, "_flash_attention_forward", kernel)
    nodes = (Node(0, 5, 5, 0), Node(5, 12, 12, 0), Node(12, 14, 14, 0))
    tensors = [torch.randn(1, heads, 14, 6) for heads in (4, 2, 2)]
    for how in ({"scaling": 0.3, "sliding_window": 3, "softcap": 2.0}, {"scaling": None}):
        found, expected = (fn(None, *tensors, None, **how, **{NODES_KWARG: nodes})[0] for fn in (by_flash, by_node))  # type: ignore[arg-type]
        assert torch.allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("layout", ["packed", "tree"])
def test_flex_attention_without_gradients(layout: str) -> None:
    for family in ("qwen3", "gemma3", "gpt_oss"):
        model = tiny_model(family, dtype=torch.float32)
        found, expected = (
            Scorer(model, **LAYOUTS[layout], attention=backend).score(window(family)) for backend in ("flex", "sdpa")
        )
        for row_id, values in expected.items():
            assert torch.allclose(found[row_id], values, rtol=0, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["packed", "tree"])
def test_flex_attention_with_gradients(layout: str) -> None:
    """Heads of 16 dimensions, float32; sinks and windows included."""
    rows = [
        Row(
            row_id=i,
            rollout_id=i,
            group_id=0,
            token_ids=np.concatenate([np.arange(100) % VOCAB, np.random.default_rng(i).integers(0, VOCAB, 30 + i)]),
            loss_mask=np.arange(130 + i) >= 100,
            advantage=1.0 - i % 3,
        )
        for i in range(6)
    ]
    for family in ("qwen3", "gemma3", "gpt_oss"):
        gradients: list[dict[str, torch.Tensor]] = []
        for backend in ("flex", "sdpa"):
            model = tiny_model(family, dtype=torch.float32, scale=0.15, head_dim=16).cuda()
            trainer = Trainer(model, torch.optim.SGD(model.parameters()), layout=layout, attention=backend)
            trainer.forward_backward(rows)
            gradients.append({name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None})
        assert oracle.relative_error(*gradients) < 1e-5
