"""The data everything else speaks about: calls, rollouts, groups, segments, rows, collections, windows.

Shape letters, used as suffixes for arrays and ragged lists all over the project:

====  =======================================    ====  =============================
P     groups                                     W     ranks (data-parallel)
G     rollouts in a group                        B     rows in a micro-batch
S     segments                                   T     tokens
R     rows of a window                           V     vocabulary
K     micro-batches per rank
====  =======================================    ====  =============================

Index convention: ``logprob[t]``, ``mask[t]``, ``advantage[t]`` and ``weight[t]`` all speak of token ``t`` given the
tokens before it, so ``mask[0]`` is always 0.

>>> call = Call(order=0, prompt_ids=(5, 6), output_ids=(7, 2), logprobs=(-0.5, -0.1))
>>> rollout = Rollout(rollout_id="p0/0", group_id="p0", prompt_id="p0", reward=1.0, calls=(call,))
>>> rollout.num_sampled_tokens
2
>>> row = Row(row_id="a", rollout_id="p0/0", group_id="p0", token_ids=[5, 6, 7, 2], loss_mask=[0, 0, 1, 1],
...           advantage=0.5)
>>> row.num_tokens, row.num_trained_tokens
(4, 2)
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from evenstep.errors import RowError
from evenstep.experts import RoutedExperts
from evenstep.media import Media, check_media

__all__ = [
    "BREAK_REASONS",
    "PER_TOKEN_FIELDS",
    "STATUSES",
    "Call",
    "Collection",
    "Group",
    "Rollout",
    "Row",
    "Sampling",
    "Segment",
    "Window",
]

BreakReason = Literal["compaction", "template", "subagent"]
Status = Literal["ok", "truncated", "failed"]
BREAK_REASONS: tuple[BreakReason, ...] = ("compaction", "template", "subagent")
STATUSES: tuple[Status, ...] = ("ok", "truncated", "failed")
MAX_TOKEN_IDS = 2**63  # what 64-bit integers hold
# optional fields of a Row with one value per token
PER_TOKEN_FIELDS = ("old_logprobs", "ref_logprobs", "engine_logprobs", "old_values", "returns")

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


# sampling setting -> values under which tokens are drawn from all of the model's distribution at their temperature
WHOLE_DISTRIBUTION: Mapping[str, tuple[Any, ...]] = {
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
}
# the same of settings that vLLM and SGLang have and `evenstep serve` has not: each masks tokens
_MASKING: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("min_tokens", "min_new_tokens"), (None, 0)),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "bad_words_token_ids"), (None, [], ())),
    **dict.fromkeys(("guided_decoding", "structured_outputs", "json_schema", "regex", "ebnf"), (None,)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of a call were drawn; ``temperature == 0`` is greedy.

    >>> Sampling(temperature=0.7).other_distribution, Sampling(top_p=0.9).other_distribution
    (None, 'top_p = 0.9')
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_tokens: int | None = None  # most tokens of the call's output
    seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])  # unknown fields of the file, kept as they were

    @property
    def other_distribution(self) -> str | None:
        """What makes log-probs others than the model's own at this temperature; None: nothing does."""
        if self.temperature == 0:
            return "temperature = 0"
        settings = {**self.extra, "top_p": self.top_p, "top_k": self.top_k}
        whole_of = {**WHOLE_DISTRIBUTION, **_MASKING}
        cut = (name for name, whole in whole_of.items() if settings.get(name) not in whole)
        return next((f"{name} = {settings[name]}" for name in cut), None)


def _kept(values: Any) -> tuple[Any, ...]:
    """The values as they are now: a list may be one that its owner goes on filling."""
    if isinstance(values, tuple):
        return values  # pyright: ignore[reportUnknownVariableType]
    if hasattr(values, "__array__"):
        values = np.asarray(values).tolist()  # in Python's own numbers
    return tuple(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One model call inside a rollout: exact ids in, exact ids and log-probs out.

    Lists and arrays are accepted and kept as tuples.
    """

    order: int  # position among the rollout's calls, unique in the rollout
    prompt_ids: tuple[int, ...]  # [T_prompt] everything the model was given
    output_ids: tuple[int, ...]  # [T_output] what it sampled, the eos id included when it was sampled
    logprobs: tuple[float, ...]  # [T_output] of the distribution sampled from, after temperature
    parent: int | None = None  # order of the call this one continues; None: found by its ids
    weight_version: int = 0  # optimizer steps behind the weights that sampled this call
    sampling: Sampling = field(default_factory=Sampling)
    break_reason: BreakReason | None = None  # why prompt_ids may not extend the history so far
    finish_reason: str | None = None  # "stop", "length", ... as the engine said it
    is_rejected: bool = False  # the agent threw this output away (resampled, filtered): never trained
    media: tuple[Media, ...] = ()  # images of the prompt, in the order of their tokens
    # of the last tokens of prompt and output together, as many as it speaks of; None: of none
    routed_experts: RoutedExperts | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        for name in ("prompt_ids", "output_ids", "logprobs", "media"):
            object.__setattr__(self, name, _kept(self.__getattribute__(name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One agent episode: one reward, one status, and later one advantage."""

    rollout_id: str
    group_id: str  # one occurrence of a prompt; never derived from the prompt's text
    prompt_id: str
    calls: tuple[Call, ...] = ()
    reward: float | None = None  # None only for a failed rollout
    status: Status = "ok"
    status_reason: str | None = None  # why it was truncated or failed
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the environment's JSON about the episode
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # truncated and left out by choice; decided when a collection closes, and not stored
    is_masked: bool = field(default=False, metadata={"is_stored": False})

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", _kept(self.calls))

    @property
    def sampled_calls(self) -> tuple[Call, ...]:
        """Calls that the agent did not reject."""
        return tuple(call for call in self.calls if not call.is_rejected)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy sampled and the agent did not reject."""
        return sum(len(call.output_ids) for call in self.sampled_calls)

    @property
    def is_voter(self) -> bool:
        """Whether its reward is in the baseline, which is also whether its tokens are trained."""
        return self.status != "failed" and not self.is_masked

    @property
    def weight_version(self) -> int | None:
        """Oldest weights that sampled a call of this rollout; None without calls."""
        return min((call.weight_version for call in self.calls), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One occurrence of a prompt and its rollouts."""

    group_id: str
    prompt_id: str
    rollouts: tuple[Rollout, ...]  # [G]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """Exactly ``num_prompts * num_generations`` rollouts, gathered, credited and closed together."""

    collection: int  # index in the run, from 0
    groups: tuple[Group, ...]  # [P]

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        return tuple(rollout for group in self.groups for rollout in group.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The rollouts of one optimizer step: whole groups of one collection, in one epoch."""

    window: int  # index in the run, from 0
    collection: int
    epoch: int  # which pass over the collection, from 0
    groups: tuple[Group, ...]

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        return tuple(rollout for group in self.groups for rollout in group.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A maximal append-only chain of calls: the tokens of one row and which of them are trained in it.

    Derived from calls, never stored. Each call belongs to one segment; where calls fork, the others hold its tokens as
    context.
    """

    index: int  # position among the rollout's segments, from 0
    token_ids: tuple[int, ...]  # [T]
    loss_mask: tuple[int, ...]  # [T] 1 where the token was sampled and is trained here
    logprobs: tuple[float, ...]  # [T] the engine's, 0.0 where loss_mask is 0
    break_reason: BreakReason | None  # why this segment began; None for the first
    call_orders: tuple[int, ...]  # the calls that belong to it
    media: tuple[Media, ...] = ()  # images among its tokens, in their order
    routed_experts: RoutedExperts | None = None  # [T] of the first call that knew; None: no call knew any

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_trained_tokens(self) -> int:
        return sum(self.loss_mask)


def _per_token(name: str, row_id: Hashable, values: Any, num_tokens: int) -> Float64Array:
    try:
        array = np.asarray(values, dtype=np.float64).copy()  # the caller may fill the same buffer again
    except (TypeError, ValueError, RuntimeError) as error:  # the last: a tensor with a gradient
        raise RowError(f"row {row_id!r}: {name} must hold one number per token ({error})") from error
    if array.shape != (num_tokens,):
        raise RowError(
            f"row {row_id!r}: {name} must have one value per token ({num_tokens}), found shape {array.shape}; "
            f"give one value for each of token_ids (index 0 is never used)"
        )
    array.setflags(write=False)
    return array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """What a model's forward sees: a segment's tokens with the mask of the trained ones.

    Lists and arrays are accepted and kept as read-only NumPy copies. Values at positions with ``loss_mask == 0`` are
    never read: NaN, infinities and padding are harmless there.

    Raises:
        RowError: an empty row, unequal lengths, ``loss_mask[0] != 0``, a mask that is not 0/1, token ids below 0 or
            from 2⁶³ on, a non-finite value at a trained token, images out of order, overlapping, or not on
            placeholders, or experts that no router can have chosen.
    """

    row_id: Hashable
    rollout_id: Hashable
    group_id: Hashable
    token_ids: Int64Array  # [T]
    loss_mask: BoolArray  # [T]; [0] is always 0
    advantage: Float64Array | float = 0.0  # one value, or [T]
    old_logprobs: Float64Array | None = None  # [T]; log-probs the ratio is taken against
    ref_logprobs: Float64Array | None = None  # [T]; reference policy
    engine_logprobs: Float64Array | None = None  # [T]; as sampled
    old_values: Float64Array | None = None  # [T]; a critic's, before the first update
    returns: Float64Array | None = None  # [T]; what a critic is trained towards
    media: tuple[Media, ...] = ()  # images among its tokens, in their order; none where they were compacted away
    routed_experts: RoutedExperts | None = None  # [T]; as the engine chose them

    def __init__(
        self,
        *,
        row_id: Hashable,
        rollout_id: Hashable,
        group_id: Hashable,
        token_ids: Sequence[int] | Int64Array,
        loss_mask: Sequence[int] | Sequence[bool] | BoolArray,
        advantage: float | Sequence[float] | Float64Array = 0.0,
        old_logprobs: Sequence[float] | Float64Array | None = None,
        ref_logprobs: Sequence[float] | Float64Array | None = None,
        engine_logprobs: Sequence[float] | Float64Array | None = None,
        old_values: Sequence[float] | Float64Array | None = None,
        returns: Sequence[float] | Float64Array | None = None,
        media: Sequence[Media] = (),
        routed_experts: RoutedExperts | Sequence[Any] | npt.NDArray[np.integer[Any]] | None = None,
    ) -> None:
        ids = np.asarray(token_ids)
        if ids.ndim != 1 or ids.size == 0:
            raise RowError(
                f"row {row_id!r}: token_ids must be a non-empty list of ids, found shape {ids.shape}; "
                f"a rollout without tokens has no row (name it in `voters` if it votes)"
            )
        if ids.dtype.kind not in "iu":
            raise RowError(f"row {row_id!r}: token_ids must be integers ≥ 0, found {ids.dtype} values like {ids[0]!r}")
        if int(ids.min()) < 0:
            raise RowError(f"row {row_id!r}: token_ids must be integers ≥ 0, found {ids.min()}")
        if int(ids.max()) >= MAX_TOKEN_IDS:
            raise RowError(
                f"row {row_id!r}: token_ids must be below {MAX_TOKEN_IDS}, found {ids.max()}; −1 of an unsigned type "
                f"is padding: leave it out"
            )
        num_tokens = ids.size
        mask = np.asarray(loss_mask)
        if mask.dtype.kind not in "biuf":
            raise RowError(f"row {row_id!r}: loss_mask must hold 0 and 1, found dtype {mask.dtype}")
        if mask.shape != ids.shape:
            raise RowError(
                f"row {row_id!r}: loss_mask must have one value per token ({num_tokens}), found shape {mask.shape}"
            )
        is_trained = mask == 1
        if not np.array_equal(is_trained, mask != 0):
            raise RowError(f"row {row_id!r}: loss_mask must hold only 0 and 1, found {sorted(set(mask.tolist()))[:8]}")
        if is_trained[0]:
            raise RowError(
                f"row {row_id!r}: loss_mask[0] must be 0, found 1; no token comes before the first one, so it cannot "
                f"be trained: put at least one context token in front"
            )
        ids = ids.astype(np.int64)
        for array in (ids, is_trained):
            array.setflags(write=False)
        if np.asarray(advantage).dtype.kind not in "iufb":
            raise RowError(f"row {row_id!r}: advantage must be a number or one per token, found {advantage!r}")
        if np.ndim(advantage) == 0:
            parsed_advantage: Float64Array | float = float(advantage)  # type: ignore[arg-type]
        else:
            parsed_advantage = _per_token("advantage", row_id, advantage, num_tokens)
        fields: dict[str, Any] = {"row_id": row_id, "rollout_id": rollout_id, "group_id": group_id}
        fields |= {"token_ids": ids, "loss_mask": is_trained, "advantage": parsed_advantage}
        for name, values in (
            ("old_logprobs", old_logprobs),
            ("ref_logprobs", ref_logprobs),
            ("engine_logprobs", engine_logprobs),
            ("old_values", old_values),
            ("returns", returns),
        ):
            fields[name] = None if values is None else _per_token(name, row_id, values, num_tokens)
        for name in ("advantage", *PER_TOKEN_FIELDS):
            values = fields[name]
            if values is None:
                continue
            trained = np.broadcast_to(np.asarray(values), ids.shape)[is_trained]
            if not np.isfinite(trained).all():
                where = int(np.flatnonzero(is_trained)[~np.isfinite(trained)][0])
                raise RowError(
                    f"row {row_id!r}: {name} must be finite at every trained token, found "
                    f"{trained[~np.isfinite(trained)][0]} at token {where}; fix its source, or set loss_mask to 0 there"
                )
        fields["media"] = tuple(media)
        check_media(fields["media"], ids, f"row {row_id!r}")
        for image in fields["media"]:
            if is_trained[image.start : image.stop].any():
                raise RowError(
                    f"row {row_id!r}: placeholders of an image are never sampled, found loss_mask 1 among tokens "
                    f"{image.start} to {image.stop - 1}; set it to 0 there"
                )
        if routed_experts is not None:
            if not isinstance(routed_experts, RoutedExperts):
                try:
                    routed_experts = RoutedExperts.of(routed_experts)
                except RowError as error:
                    raise RowError(f"row {row_id!r}: {error}") from None
            if routed_experts.num_tokens != num_tokens:
                raise RowError(
                    f"row {row_id!r}: routed_experts must have one entry per token ({num_tokens}), found shape "
                    f"{routed_experts.shape}; give -1 for a token whose experts are unknown, such as the last one"
                )
        fields["routed_experts"] = routed_experts
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.size)

    @property
    def num_trained_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def num_patches(self) -> int:
        """Patches of its images: what a vision tower computes for it beside its tokens."""
        return sum(image.num_patches for image in self.media)

    @property
    def advantages_T(self) -> Float64Array:
        """[T] The advantage at trained tokens, 0.0 elsewhere: fan-out through this row's own mask."""
        return np.where(self.loss_mask, self.advantage, 0.0)
