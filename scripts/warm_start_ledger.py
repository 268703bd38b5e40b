"""Make the tiny policy of the ledger demo from scratch: tokenizer, drills, demonstrations, a short supervised run.

    python scripts/warm_start_ledger.py [--out DIR]
    python scripts/warm_start_ledger.py --extra-steps 40 --out DIR    # control: the shipped policy, trained further

Two supervised phases: drills (copy a fragment seen before) teach the two layers to look things up; demonstrations of
ledger episodes teach the task. The demonstrations are of a sloppy note-taker: it reads, looks up and answers well, but
its notes often keep the entry that it read last instead of the one that was asked for. That is the habit which
reinforcement learning has to break. Everything is seeded and runs on one thread: the same library versions on the same
kind of machine give the same weights. Takes a few minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import string
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from evenstep.rollout.agent import AgentOptions
from evenstep.rollout.chat import ChatRenderer
from evenstep.rollout.collector import generate_rollouts, slots_of
from evenstep.rollout.compaction import Summary
from evenstep.rollout.engine import Completion, Request
from evenstep.rollout.environment import TaskSource
from evenstep.rollout.ledger import LedgerOptions
from evenstep.rollout.segments import segments_of

DATA = Path(__file__).resolve().parent.parent / "src" / "evenstep" / "data" / "ledger"
SEED = 0
MAX_CONTEXT_TOKENS = 64  # of the agent; the model itself has room for more
SPECIAL_TOKENS = ("<|pad|>", "<|unk|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHARACTERS = string.ascii_lowercase + string.digits + " \n.:>?-"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Example = tuple[Sequence[int], Sequence[int]]  # token ids, and 1 where the token is learned


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How often a note keeps the asked entry, by where the note-taker has it from."""

    last_page: float = 0.85
    earlier_page: float = 0.3
    earlier_note: float = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One supervised phase: linear warm-up, then linear decay over the last half."""

    num_steps: int
    rows_per_step: int
    lr: float
    seed: int


DRILLS = Phase(num_steps=2600, rows_per_step=32, lr=4e-3, seed=SEED)
DEMONSTRATIONS = Phase(num_steps=400, rows_per_step=48, lr=2e-3, seed=SEED + 1)
NUM_DEMONSTRATIONS = 5000


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character and one per role: 49 in all."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        eos_token="<|end|>",
        extra_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """86,016 random parameters; few slow rotary frequencies, because no context is longer than a page of text."""
    torch.manual_seed(SEED)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            attention_bias=True,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def drill(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Example:
    """Random characters, then fragments of them: all but a fragment's first character can be looked up."""
    vocabulary = tokenizer.get_vocab()
    characters = [vocabulary[character] for character in CHARACTERS]
    text = [rng.choice(characters) for _ in range(rng.randint(4, 20))]
    ids = [vocabulary["<|user|>"], *text, vocabulary["<|assistant|>"]]
    mask = [0] * len(ids)
    while sum(mask) < 18:
        start = rng.randrange(len(text) - 1)
        fragment = text[start : start + rng.randint(2, 6)]
        ids += fragment
        mask += [0] + [1] * (len(fragment) - 1)
    return ids, mask


class Demonstrator:
    """An engine that plays the ledger by reading its prompt, so that demonstrations come from the agent loop itself."""

    weight_version = 0
    max_context_tokens = MAX_CONTEXT_TOKENS

    def __init__(self, tokenizer: PreTrainedTokenizerFast, habits: Habits) -> None:
        self._tokenizer = tokenizer
        self._habits = habits

    async def generate(self, request: Request) -> Completion:
        text = self._answer(self._tokenizer.decode(list(request.prompt_ids)), random.Random(request.sampling.seed))
        output_ids = tuple(self._tokenizer.encode(text + "<|end|>", add_special_tokens=False))
        return Completion(
            output_ids=output_ids, logprobs=(0.0,) * len(output_ids), finish_reason="stop", weight_version=0
        )

    def _answer(self, prompt: str, rng: random.Random) -> str:
        messages = [part.removeprefix("<|user|>") for part in prompt.split("<|end|>") if part.startswith("<|user|>")]
        task, *lines = messages[0].split("\n")
        account = task[-1]
        note = lines[0].removeprefix("note ") if lines[0].startswith("note ") else ""
        *observations, last = [lines[-1], *messages[1:]]
        pages = [observation.split() for observation in observations]
        if last == f"{account}?":
            known = [entry for page in [[note], *pages] for entry in page if entry.startswith(account)]
            return known[-1] if known else account + rng.choice(string.digits)
        if last != "note":
            return ">"
        return self._note(account, note, pages, rng)

    def _note(self, account: str, note: str, pages: list[list[str]], rng: random.Random) -> str:
        habits = self._habits
        sources = [(habits.last_page, pages[-1])]
        sources += [(habits.earlier_page, page) for page in pages[:-1]]
        sources.append((habits.earlier_note, [note]))
        for probability, entries in sources:
            for entry in entries:
                if entry.startswith(account) and rng.random() < probability:
                    return entry
        return pages[-1][-1]


def demonstrations(tokenizer: PreTrainedTokenizerFast, *, num_rollouts: int, seed: int) -> list[Example]:
    """Segments of scripted episodes on tasks of the split that is kept for the warm start."""
    rollouts = asyncio.run(
        generate_rollouts(
            slots_of(collection=0, num_prompts=num_rollouts, num_generations=1),
            tasks=TaskSource(name="ledger", options=LedgerOptions(), seed=seed, split="warmstart"),
            engine=Demonstrator(tokenizer, Habits()),
            renderer=ChatRenderer(tokenizer),
            compaction=Summary(),
            options=AgentOptions(max_context_tokens=MAX_CONTEXT_TOKENS),
            run_seed=seed,
            batch_rollouts=100,
        )
    )
    print(f"demonstrations: {num_rollouts} rollouts, mean reward {np.mean([r.reward for r in rollouts]):.3f}")
    return [(segment.token_ids, segment.loss_mask) for rollout in rollouts for segment in segments_of(rollout)]


def learning_rate(phase: Phase, step: int) -> float:
    num_warmup_steps = min(50, phase.num_steps // 8)
    return phase.lr * min(1.0, (step + 1) / num_warmup_steps, 2 * (phase.num_steps - step) / phase.num_steps)


def supervise(name: str, model: Qwen3ForCausalLM, phase: Phase, rows_of_step: Callable[[int], list[Example]]) -> None:
    """AdamW on the mean negative log-likelihood of the learned tokens of each step's rows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=phase.lr, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    started, total = time.perf_counter(), 0.0
    for step in range(phase.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(phase, step)
        loss = mean_loss(model, rows_of_step(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
        if (step + 1) % 100 == 0 or step + 1 == phase.num_steps:
            print(f"{name} {step + 1}: loss {total / (step % 100 + 1):.4f}, {time.perf_counter() - started:.0f} s")
            total = 0.0


def mean_loss(model: Qwen3ForCausalLM, rows: list[Example]) -> torch.Tensor:
    """Rows are padded on the right, where causal attention never looks back at the padding."""
    width = max(len(ids) for ids, _ in rows)
    ids_BT = torch.zeros(len(rows), width, dtype=torch.long)
    mask_BT = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (ids, mask) in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        mask_BT[row, : len(mask)] = torch.tensor(mask, dtype=torch.bool)
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    learned_BT = mask_BT[:, 1:]
    return torch.nn.functional.cross_entropy(logits_BTV[:, :-1][learned_BT], ids_BT[:, 1:][learned_BT])


def drawn_rows(examples: list[Example], phase: Phase) -> Callable[[int], list[Example]]:
    rng = random.Random(phase.seed)
    return lambda step: [rng.choice(examples) for _ in range(phase.rows_per_step)]


def drilled_rows(tokenizer: PreTrainedTokenizerFast, phase: Phase) -> Callable[[int], list[Example]]:
    rng = random.Random(phase.seed)
    return lambda step: [drill(tokenizer, rng) for _ in range(phase.rows_per_step)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--extra-steps", type=int, default=0, help="train the shipped policy further")
    parser.add_argument("--extra-lr", type=float, default=5e-4)
    parser.add_argument("--extra-seed", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.extra_steps:
        tokenizer = AutoTokenizer.from_pretrained(DATA)
        model = Qwen3ForCausalLM.from_pretrained(DATA)
        # As many rows as the demo trains in one step, and demonstrations that the warm start has not seen.
        seed = arguments.extra_seed
        phase = Phase(num_steps=arguments.extra_steps, rows_per_step=384, lr=arguments.extra_lr, seed=seed)
        examples = demonstrations(tokenizer, num_rollouts=NUM_DEMONSTRATIONS, seed=seed)
    else:
        tokenizer = make_tokenizer()
        model = make_model(tokenizer)
        supervise("drills", model, DRILLS, drilled_rows(tokenizer, DRILLS))
        phase = DEMONSTRATIONS
        examples = demonstrations(tokenizer, num_rollouts=NUM_DEMONSTRATIONS, seed=SEED)
    supervise("demonstrations", model, phase, drawn_rows(examples, phase))
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    (arguments.out / "generation_config.json").unlink(missing_ok=True)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in {arguments.out}")


if __name__ == "__main__":
    main()
