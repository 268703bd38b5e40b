"""Training on bfloat16 compute moves float32 master weights as float32 compute does, also when every step is tiny.

1. 200 AdamW steps at learning rate 1e-6, rotating over 20 fixed windows: the total update on bfloat16 compute and the
   one on float32 compute have a cosine of at least 0.99, and lengths within 1 %.
2. The wrong way differs: master weights rounded to bfloat16 after each step lose nearly all of the update (cosine below
   0.1).

``pytest -m long -s tests/unit/train/test_bf16.py`` prints the figures.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import evenstep.train
from evenstep.types import Row
from tiny_models import VOCAB, tiny_model

NUM_STEPS = 200
NUM_WINDOWS = 20
LR = 1e-6
PROMPT_TOKENS = 4


def make_windows(seed: int) -> list[list[Row]]:
    """Windows of 2 groups × 4 rollouts: random ids, and rewards normalised over the group."""
    random = np.random.default_rng(seed)
    windows = []
    for _ in range(NUM_WINDOWS):
        rows = []
        for g in range(2):
            rewards = random.random(4)
            advantages = (rewards - rewards.mean()) / rewards.std(ddof=1)
            prompt = random.integers(0, VOCAB, PROMPT_TOKENS)
            for r, advantage in enumerate(advantages.tolist()):
                num_sampled = int(random.integers(4, 17))
                rows.append(
                    Row(
                        row_id=(g, r),
                        rollout_id=(g, r),
                        group_id=g,
                        token_ids=np.concatenate([prompt, random.integers(0, VOCAB, num_sampled)]),
                        loss_mask=[0] * PROMPT_TOKENS + [1] * num_sampled,
                        advantage=advantage,
                    )
                )
        windows.append(rows)
    return windows


def round_weights(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def weights(model: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.detach().double().reshape(-1) for parameter in model.parameters()])


def total_update(seed: int, compute_dtype: str, *, is_rounded: bool = False) -> Tensor:
    """Final minus first weights; the first ones are bfloat16 numbers, as in most released checkpoints."""
    model = tiny_model(dtype=torch.float32, seed=seed, scale=0.15)
    round_weights(model)
    first = weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    options = {"layout": "packed", "max_tokens_per_gpu": 80, "compute_dtype": compute_dtype}
    trainer = evenstep.train.Trainer(model, optimizer, **options)
    windows = make_windows(seed)
    for step in range(NUM_STEPS):
        trainer.forward_backward(windows[step % NUM_WINDOWS])
        assert trainer.optim_step().stepped
        if is_rounded:
            round_weights(model)
    return weights(model) - first


def cosine(a: Tensor, b: Tensor) -> float:
    norms = float(a.norm() * b.norm())
    return float(a @ b) / norms if norms else 0.0


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tiny_steps_on_bfloat16_compute(seed: int) -> None:
    expected = total_update(seed, "float32")
    found = total_update(seed, "bfloat16")
    rounded = total_update(seed, "bfloat16", is_rounded=True)
    ratio = float(found.norm() / expected.norm())
    print(
        f"seed {seed}: cosine {cosine(found, expected):.6f}, lengths {ratio:.4f}, "
        f"relative difference {float((found - expected).norm() / expected.norm()):.4f}; weights rounded to bfloat16: "
        f"cosine {cosine(rounded, expected):.4f}, lengths {float(rounded.norm() / expected.norm()):.4f}"
    )
    assert expected.abs().max() > 50 * LR  # the steps went somewhere
    assert cosine(found, expected) >= 0.99
    assert abs(ratio - 1) < 0.01
    assert cosine(rounded, expected) < 0.1
