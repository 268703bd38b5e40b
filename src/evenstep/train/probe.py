"""Whether a server samples from the policy: one long fixed row, at its weights and at the trainer's, and what is wrong.

Shape letters: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from evenstep.errors import EngineError
from evenstep.rollout.in_process import cache_argument
from evenstep.rollout.server import Probe, probe_length
from evenstep.train.scorer import Scorer
from evenstep.types import Row

__all__ = ["check_probes", "probe_prompt"]

BLOCKS = (128, 64, 32, 16)  # sizes of cache blocks
FOUND = 0.2  # an explanation leaves at most this share of the difference


def probe_prompt(*, vocab_size: int, most: int, seed: int) -> tuple[int, ...]:
    """The ids that every server is asked to go on from; as many as fit beside the output into ``most`` tokens.

    >>> len(probe_prompt(vocab_size=49, most=512, seed=0)), len(probe_prompt(vocab_size=49, most=64, seed=0))
    (160, 48)
    """
    draw = np.random.Generator(np.random.Philox(key=seed))
    return tuple(draw.integers(0, vocab_size, probe_length(most)).tolist())


def check_probes(
    scorer: Scorer,
    probes: Sequence[Probe],
    *,
    tolerance: float,
    dtype: str,
    folder: Path | None,
    previous: Path | None,
) -> float:
    """Compare servers with the trainer's own forward at its present weights; the largest difference, in nats.

    Every rank calls it with the same probes.

    Args:
        scorer: of the policy.
        probes: one of each server.
        tolerance: most nats by which a token's log-prob may differ.
        dtype: what the servers compute in.
        folder: weights that the servers were given; None where there is no need to explain.
        previous: weights that they had before; None where these were the first.

    Raises:
        EngineError: a server differs; says what it probably is. Raised on all ranks.
    """
    rows = [_row(probe) for probe in probes]
    found = scorer.gather(scorer.score(rows))
    worst = 0.0
    for row, probe in zip(rows, probes, strict=True):
        ours = found[row.row_id].double().numpy()[row.loss_mask]
        difference = float(np.abs(ours - np.asarray(probe.logprobs)).max())
        worst = max(worst, difference)
        if not difference <= tolerance:
            reason = "it probably has other weights"
            if folder is not None:
                reason = _explanation(probe, folder, previous, scorer.options.temperature, dtype, difference)
            raise EngineError(
                f"the server at {probe.url} must sample from the policy: its log-probs of a probe of "
                f"{len(probe.prompt_ids)} prompt tokens may differ from the trainer's by engine.probe_tolerance = "
                f"{tolerance:g}, found {difference:.3g}; {reason}"
            )
    return worst


def _row(probe: Probe) -> Row:
    ids = [*probe.prompt_ids, *probe.output_ids]
    mask = [False] * len(probe.prompt_ids) + [True] * len(probe.output_ids)
    return Row(
        row_id=probe.url,
        rollout_id=probe.url,
        group_id="probe",
        token_ids=ids,
        loss_mask=mask,
        routed_experts=probe.routed_experts,
    )


def _explanation(
    probe: Probe, folder: Path, previous: Path | None, temperature: float, dtype: str, difference: float
) -> str:
    """The known fault whose log-probs are the server's, found by making each of them here."""
    theirs_T = np.asarray(probe.logprobs)
    new = _load(folder)
    guesses: list[tuple[str, Tensor]] = []
    if temperature != 1.0:
        guesses.append(
            (
                f"its log-probs are those at temperature 1, and rollout.temperature is {temperature:g}: start it with "
                f"--logprobs-mode processed_logprobs",
                _logprobs(new, probe, 1.0),
            )
        )
    if previous is not None:
        old = _load(previous)
        guesses.append(
            (
                "it has a stale head: its output head is still that of the weights before, its other weights are new. "
                "vLLM on the CPU keeps the head of a model whose head is its embedding: set engine.untie_embeddings = "
                "true and start the server from a folder with a head of its own (docs/engines.md)",
                _logprobs(_with_head(folder, old), probe, temperature),
            )
        )
        guesses.append(
            (
                "it still has the weights before: the update did not reach it; does it see engine's folder of weights "
                "under the same path?",
                _logprobs(old, probe, temperature),
            )
        )
        num_cached = {(len(probe.prompt_ids) - 1) // block * block for block in BLOCKS}
        guesses += [
            (
                f"it has a stale cache: keys and values of the first {num} prompt tokens are of the weights before; it "
                f"does not forget cached prefixes when it is told to, so start it with --no-enable-prefix-caching",
                _logprobs(new, probe, temperature, cached=(old, num)),
            )
            for num in sorted(num_cached, reverse=True)
            if num > 0
        ]
    left = [(float(np.abs(logprobs_T.numpy() - theirs_T).max()), text) for text, logprobs_T in guesses]
    if left and min(left)[0] <= FOUND * difference:
        rest, text = min(left)
        return f"{text} (with that fault made here, {rest:.2g} is left)"
    if dtype != "float32":
        return (
            f"it computes in {dtype}, which differs by up to tenths of a nat: set engine.probe_tolerance to what you "
            f"accept and train.importance_cap to correct it, or set engine.dtype = 'float32'"
        )
    exact = float(np.abs(_logprobs(new, probe, temperature).numpy() - theirs_T).max())
    if exact <= FOUND * difference:
        return (
            "it has the right weights, and the trainer computes otherwise than in float32: look at "
            "train.compute_dtype, or widen engine.probe_tolerance"
        )
    return (
        "it probably serves another model, computes in half precision, or has code for this model that leaves "
        "something out (a bias, for example): compare its --model and --dtype with model.path and engine.dtype"
    )


def _load(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval()


def _with_head(folder: Path, old: PreTrainedModel) -> PreTrainedModel:
    """The model of a folder with another one's output head."""
    model = _load(folder)
    head, other = model.get_output_embeddings(), old.get_output_embeddings()
    assert head is not None
    assert other is not None
    # a new parameter: the old one may be the embedding as well
    head.weight = torch.nn.Parameter(other.weight.detach().clone())  # type: ignore[union-attr]
    return model


@torch.no_grad()
def _logprobs(
    model: PreTrainedModel, probe: Probe, temperature: float, *, cached: tuple[PreTrainedModel, int] | None = None
) -> Tensor:
    """[T_output] Log-probs of a probe's output, its first tokens' keys and values perhaps from another model."""
    ids_T = torch.tensor([*probe.prompt_ids, *probe.output_ids])
    num_cached, cache = 0, None
    if cached is not None:
        other, num_cached = cached
        cache = other(input_ids=ids_T[None, :num_cached], use_cache=True).past_key_values
    arguments: dict[str, Any] = {cache_argument(model): cache}
    logits_TV = model(input_ids=ids_T[None, num_cached:], use_cache=True, **arguments).logits[0].double()
    logprobs_TV = (logits_TV / temperature).log_softmax(-1)[:-1]
    logprobs_T = logprobs_TV.gather(-1, ids_T[num_cached + 1 :, None])[:, 0]
    return logprobs_T[-len(probe.output_ids) :]
