"""An engine in this process: batched sampling with a KV cache from a transformers causal LM.

Shape letters: B rows in the batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from evenstep.errors import EngineError, RowError
from evenstep.experts import UNKNOWN, RoutedExperts
from evenstep.media import check_media, rope_positions
from evenstep.rollout.engine import Completion, FinishReason, Request
from evenstep.train.moe import Routing, recorded_routing
from evenstep.train.vision import Images, images_placed, make_images, spec_of

__all__ = ["InProcessEngine", "cache_argument"]

# Model types that would not look at the cache they are given, or not take it.
OWN_CACHE_MODEL_TYPES = frozenset({"minimax", "recurrent_gemma", "rwkv", "xlstm"})


class InProcessEngine:
    """Samples from a causal LM whose weights this process also trains.

    Every output token ``t`` of a request is drawn by inverse CDF: with u_t the t-th number of a counter-based
    generator keyed by the request's seed, it is the first token whose cumulative probability (float64, after
    temperature) exceeds u_t. So a request's tokens depend on its seed and on the other rows of its batch only through
    rounding, and not at all on workers. ``logprobs`` are those of the distribution sampled from; with temperature 0
    (greedy) those at temperature 1.

    Args:
        model: a transformers causal LM; it is put in ``eval()`` while generating and then back.
        eos_token_ids: ids that end an output (they are part of it).
        max_context_tokens: most tokens of a prompt and its output together; an output that would go beyond is cut
            there with ``finish_reason="length"``.
        weight_version: stamped on every completion; whoever changes the weights sets the attribute, where another
            thread may generate within ``between_batches()``.
        routers: the modules that choose experts, in the order of the layers: what they chose for each token is recorded
            in ``routed_experts``. Of the last output token it is unknown: nothing was predicted from it.

    Raises:
        EngineError: no eos id, ``max_context_tokens`` below 2, a model type with a cache of its own, or one whose scan
            limits time steps that a single token's is without.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: Collection[int],
        max_context_tokens: int,
        weight_version: int = 0,
        routers: Sequence[nn.Module] = (),
    ) -> None:
        if not eos_token_ids:
            raise EngineError(
                "an engine needs at least one id that ends an output, found none; give eos_token_ids (the tokenizer's "
                "eos id and the id that its chat template puts at the end of a turn)"
            )
        if max_context_tokens < 2:
            raise EngineError(
                f"max_context_tokens must be at least 2 (a prompt and an output), found {max_context_tokens}"
            )
        if model.config.model_type in OWN_CACHE_MODEL_TYPES:
            raise EngineError(
                f"an engine in this process hands the model a cache of keys, values and states, and models of type "
                f"{model.config.model_type!r} keep one of their own; generate on servers, or train another model"
            )
        limit = _limit_of_scans(model)
        if limit is not None:
            raise EngineError(
                f"an engine in this process takes one token after the other, and {type(model).__name__} keeps its time "
                f"steps within {limit} only where it scans many at once: it would not sample from what training "
                f"scores; set time_step_limit (or time_step_min) in its config.json so that there is none, or "
                f"train another model"
            )
        self._model = model
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_context_tokens = max_context_tokens
        self.weight_version = weight_version
        self._is_closed = False
        self._lock = threading.Lock()  # held by a batch, and by whoever changes the weights
        self._cache_argument = cache_argument(model)
        self._routers = tuple(routers)
        self._vision = spec_of(model)

    @property
    def max_context_tokens(self) -> int:
        return self._max_context_tokens

    @contextmanager
    def between_batches(self) -> Iterator[None]:
        """A time in which nothing is generated, so that weights and their version may change together.

        It begins when the batch that runs now has ended. A batch waits for nobody, so neither does this for long.
        """
        with self._lock:
            yield

    def close(self) -> None:
        """Generate no more; a batch that runs in another thread ends with an error after its next token."""
        self._is_closed = True

    async def generate(self, request: Request) -> Completion:
        """Serve one request as a batch of one row."""
        return self.generate_batch([request])[0]

    def generate_batch(self, requests: Sequence[Request]) -> list[Completion]:
        """Serve requests together; completions come back in the order of the requests.

        Raises:
            EngineError: an empty or over-long prompt, sampling settings whose log-probs would not be the trainer's
                (top-p, top-k), or images that are not the model's.
        """
        if not requests:
            return []
        max_new_tokens = [self._max_new_tokens(index, request) for index, request in enumerate(requests)]
        with self._lock, torch.no_grad(), _evaluation_mode(self._model):
            return self._generate(requests, max_new_tokens)

    def _max_new_tokens(self, index: int, request: Request) -> int:
        num_prompt_tokens = len(request.prompt_ids)
        sampling = request.sampling
        where = f"request {index} (rollout key {request.rollout_key})"
        if num_prompt_tokens == 0:
            raise EngineError(f"{where}: a prompt needs at least one token, found none; give the model some context")
        if num_prompt_tokens >= self._max_context_tokens:
            raise EngineError(
                f"{where}: prompt and output must fit {self._max_context_tokens} tokens, found a prompt of "
                f"{num_prompt_tokens}; compact the context earlier, or raise max_context_tokens"
            )
        if sampling.top_p < 1.0 or sampling.top_k != 0 or sampling.temperature < 0.0:
            raise EngineError(
                f"{where}: this engine samples from the whole distribution, found temperature {sampling.temperature}, "
                f"top_p {sampling.top_p}, top_k {sampling.top_k}; use temperature ≥ 0, top_p 1 and top_k 0"
            )
        if request.media:
            self._check_images(request, where)
        room = self._max_context_tokens - num_prompt_tokens
        if sampling.max_tokens is None:
            return room
        if sampling.max_tokens < 1:
            raise EngineError(f"{where}: max_tokens must be at least 1, found {sampling.max_tokens}")
        return min(sampling.max_tokens, room)

    def _check_images(self, request: Request, where: str) -> None:
        if self._vision is None:
            raise EngineError(f"{where}: the model sees no images, found {len(request.media)}; use a vision model")
        ids_T = np.asarray(request.prompt_ids)
        try:
            check_media(request.media, ids_T, where)
            # an engine cannot know what was sampled before, so no placeholder is taken for one that lost its image
            self._vision.check(request.media, ids_T, np.ones(ids_T.size, dtype=np.bool_), where)
        except RowError as error:
            raise EngineError(str(error)) from None

    def _images(self, requests: Sequence[Request], width: int) -> Images | None:
        """Those of left-padded prompts; None where there are none."""
        if self._vision is None or not any(request.media for request in requests):
            return None
        places = [
            (image, (row + 1) * width - len(request.prompt_ids) + np.arange(image.start, image.stop))
            for row, request in enumerate(requests)
            for image in request.media
        ]
        parameter = next(self._model.parameters())
        return make_images(places, self._vision, dtype=parameter.dtype, device=parameter.device)

    def _generate(self, requests: Sequence[Request], max_new_tokens: list[int]) -> list[Completion]:
        device = self._model.device
        num_rows = len(requests)
        output_ids: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        reasons: list[FinishReason] = ["length"] * num_rows
        experts: list[list[np.ndarray]] = [[] for _ in requests]  # of each request, parts [T, L, X]
        uniforms = _uniforms(requests, max_new_tokens)
        temperatures_B = torch.tensor([request.sampling.temperature for request in requests], dtype=torch.float64)
        temperatures_B = temperatures_B.to(device)

        rows = list(range(num_rows))  # the request behind each row still in the batch
        is_done = [False] * num_rows
        ids_BT, mask_BT, positions_BT = _left_padded([request.prompt_ids for request in requests], device)
        images, next_B1 = self._images(requests, ids_BT.shape[1]), positions_BT[:, -1:] + 1
        if images is not None:
            assert self._vision is not None
            positions_BT = _positions_among_images(requests, positions_BT, self._vision.merge_size)
            next_B1 = positions_BT.amax(dim=(0, 2))[:, None] + 1
        cache = DynamicCache(config=self._model.config)
        has_states_alone = bool(cache.layers) and all(cache.is_linear)
        for step in range(max(max_new_tokens)):
            if self._is_closed:
                raise EngineError("the engine was closed while it generated; what is finished is on disk")
            # layers with a state look at the mask of the tokens they are given, and a sampled one is no padding
            mask = None if step and has_states_alone else mask_BT
            with recorded_routing(self._routers) as routing, images_placed(self._model, images if step == 0 else None):
                logits_BV = self._forward(ids_BT, mask, positions_BT, cache)
            if self._routers:
                chosen_BTLX = _experts_of(routing, len(rows))
                for i, row in enumerate(rows):
                    if not is_done[row]:
                        experts[row].append(chosen_BTLX[i, -len(requests[row].prompt_ids) if step == 0 else -1 :])
            u_B = torch.tensor([uniforms[row][min(step, max_new_tokens[row] - 1)] for row in rows], dtype=torch.float64)
            tokens_B, logprobs_B = _sample(logits_BV, temperatures_B[rows], u_B.to(device))
            for row, token, logprob in zip(rows, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
                if is_done[row]:
                    continue
                output_ids[row].append(token)
                logprobs[row].append(logprob)
                if token in self._eos_token_ids:
                    reasons[row] = "stop"
                is_done[row] = reasons[row] == "stop" or len(output_ids[row]) == max_new_tokens[row]
            live = [index for index, row in enumerate(rows) if not is_done[row]]
            if not live:
                break
            positions_BT, next_B1 = next_B1, next_B1 + 1
            ids_BT = tokens_B[:, None]
            if 2 * len(live) <= len(rows):  # finished rows are carried until half are: selecting copies the cache
                index = torch.tensor(live, device=device)
                # what selects in every kind of layer, also in those with a state
                cache.reorder_cache(index)  # type: ignore[arg-type]
                ids_BT, mask_BT = ids_BT[index], mask_BT[index]
                positions_BT, next_B1 = positions_BT[index], next_B1[index]
                rows = [rows[i] for i in live]
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(rows), 1)], dim=1)
        return [
            Completion(
                output_ids=tuple(output_ids[row]),
                logprobs=tuple(logprobs[row]),
                finish_reason=reasons[row],
                weight_version=self.weight_version,
                routed_experts=_joined(experts[row]),
            )
            for row in range(num_rows)
        ]

    def _forward(
        self, ids_BT: torch.Tensor, mask_BT: torch.Tensor | None, positions_BT: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        arguments: dict[str, Any] = {self._cache_argument: cache, "use_cache": True, "logits_to_keep": 1}
        output = self._model(input_ids=ids_BT, attention_mask=mask_BT, position_ids=positions_BT, **arguments)
        return output.logits[:, -1]


def _experts_of(routing: Sequence[Routing], num_rows: int) -> np.ndarray:
    """[B, T, L, X] int16: what the routers chose for the tokens of one forward pass."""
    chosen_NLX = torch.stack([one.experts_TX for one in routing], dim=1).to(torch.int16).cpu().numpy()
    return chosen_NLX.reshape(num_rows, -1, *chosen_NLX.shape[1:])


def _joined(parts: Sequence[np.ndarray]) -> RoutedExperts | None:
    """Experts of prompt and output; those of the last output token are unknown."""
    if not parts:
        return None
    last_TLX = np.full((1, *parts[0].shape[1:]), UNKNOWN, dtype=np.int16)
    return RoutedExperts.of(np.concatenate([*parts, last_TLX]))


def _limit_of_scans(model: nn.Module) -> tuple[float, float] | None:
    """The limit of time steps that transformers' state-space mixers know in a scan and not in their step by token."""
    for module in model.modules():
        limit = getattr(module, "time_step_limit", None)
        if limit is not None and (limit[0] > 0 or limit[1] < float("inf")):
            return limit[0], limit[1]
    return None


def cache_argument(model: PreTrainedModel) -> str:
    """What a model's forward calls its cache: transformers renamed it, and models of both kinds exist."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@contextmanager
def _evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    """Dropout off while generating; the trainer's mode is put back."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _uniforms(requests: Sequence[Request], max_new_tokens: Sequence[int]) -> list[np.ndarray]:
    """One number in [0, 1) per possible output token of each request; a request without a seed draws a fresh one."""
    return [
        np.random.Generator(np.random.Philox(key=request.sampling.seed)).random(count)
        if request.sampling.temperature > 0
        else np.zeros(count)
        for request, count in zip(requests, max_new_tokens, strict=True)
    ]


def _left_padded(
    prompts: Sequence[tuple[int, ...]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[B, T] ids, attention mask and positions; padding is on the left so that every row's next token is in one column.

    What stands in the padding does not matter (the mask hides it), so it is id 0.
    """
    width = max(len(prompt) for prompt in prompts)
    ids_BT = np.zeros((len(prompts), width), dtype=np.int64)
    mask_BT = np.zeros((len(prompts), width), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids_BT[row, width - len(prompt) :] = prompt
        mask_BT[row, width - len(prompt) :] = 1
    positions_BT = np.maximum(mask_BT.cumsum(axis=1) - 1, 0)
    ids, mask, positions = (torch.from_numpy(array).to(device) for array in (ids_BT, mask_BT, positions_BT))
    return ids, mask, positions


def _positions_among_images(requests: Sequence[Request], positions_BT: torch.Tensor, merge_size: int) -> torch.Tensor:
    """[3, B, T] Positions of left-padded prompts in time, height and width."""
    positions_3BT = positions_BT.expand(3, -1, -1).clone()
    for row, request in enumerate(requests):
        num_tokens = len(request.prompt_ids)
        found_3T = torch.from_numpy(rope_positions(num_tokens, request.media, merge_size))
        positions_3BT[:, row, -num_tokens:] = found_3T.to(positions_BT.device)
    return positions_3BT


def _sample(
    logits_BV: torch.Tensor, temperatures_B: torch.Tensor, u_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B] tokens and [B] log-probs, in float64; rows with temperature 0 take the largest logit."""
    is_greedy_B = temperatures_B == 0
    scaled_BV = logits_BV.double() / torch.where(is_greedy_B, 1.0, temperatures_B)[:, None]
    logprobs_BV = torch.log_softmax(scaled_BV, dim=-1)
    cumulative_BV = logprobs_BV.exp().cumsum(dim=-1)
    # Scaled by the row's own total, so that rounding never leaves a gap above the last token.
    drawn_B = torch.searchsorted(cumulative_BV, u_B[:, None] * cumulative_BV[:, -1:], right=True)[:, 0]
    tokens_B = torch.where(is_greedy_B, logits_BV.argmax(dim=-1), drawn_B.clamp(max=logits_BV.shape[-1] - 1))
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
