"""Your own loop on your own rows, in one process or on several ranks:

    python examples/own_loop.py
    torchrun --nproc-per-node 2 examples/own_loop.py [--shard]

A random model of a few thousand parameters learns to prefer one token over another; every rank makes the same rows, and
the step is the same on any number of ranks.
"""

import os
import sys

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import evenstep
from evenstep.train import Trainer, shard


def make_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=16, max_position_embeddings=64, **sizes, **heads))


def make_rows(step: int) -> list[evenstep.Row]:
    """Eight rollouts in two groups; each answers 7 (better than its group) or 9 (worse), some in two segments."""
    rows = []
    for rollout in range(8):
        token, advantage = (7, 0.5) if (rollout + step) % 2 else (9, -0.5)
        for segment in range(1 + rollout % 2):
            context = [1, 2, 3][: 1 + segment] * (1 + rollout % 3)
            rows.append(
                evenstep.Row(
                    row_id=f"{rollout}/{segment}",
                    rollout_id=f"{rollout}",
                    group_id=f"{rollout // 4}",
                    token_ids=[*context, token],
                    loss_mask=[0] * len(context) + [1],
                    advantage=advantage,
                )
            )
    return rows


def main() -> None:
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    model = make_model()
    if "--shard" in sys.argv:
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    trainer = Trainer(model, optimizer, layout="packed", max_tokens_per_gpu=16, max_grad_norm=1.0)
    for step in range(5):
        result = trainer.forward_backward(make_rows(step))
        logprobs = trainer.gather(result.logprobs)  # of every row, on every rank
        outcome = trainer.optim_step()
        if os.environ.get("RANK", "0") == "0":
            liked = [logprobs[row.row_id][-1].exp().item() for row in make_rows(step) if row.advantages_T[-1] > 0]
            print(
                f"step {step}: loss {result.loss:+.4f}, grad norm {outcome.grad_norm:.4f}, "
                f"{result.metrics['num_rows']} rows in {result.metrics['num_microbatches']} micro-batches a rank, "
                f"p(liked token) {sum(liked) / len(liked):.4f}"
            )
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
