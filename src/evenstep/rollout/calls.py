"""One model call: an engine is asked, its answer is checked, and a `Call` keeps both exactly."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np

from evenstep.errors import EngineError, EvenstepError
from evenstep.experts import UNKNOWN, RoutedExperts
from evenstep.files.lines import MAX_LOGPROB
from evenstep.media import Media
from evenstep.rollout.engine import Completion, Engine, Request, RolloutKey
from evenstep.types import BreakReason, Call, Sampling

__all__ = ["checked_completion", "is_asked_to_stop", "num_common", "recorded_call"]

MIN_LOGPROB = math.log(5e-324)  # of the smallest number above 0


async def recorded_call(
    engine: Engine,
    *,
    order: int,
    prompt_ids: tuple[int, ...],
    sampling: Sampling,
    rollout_id: str,
    rollout_key: RolloutKey,
    vocab_size: int | None,
    parent: int | None,
    break_reason: BreakReason | None,
    group_id: str = "",
    before: Call | None = None,
    media: tuple[Media, ...] = (),
) -> Call:
    """Make one call, whose output has at most ``sampling.max_tokens`` tokens of a vocabulary of ``vocab_size``.

    ``before`` is the call of order ``parent``, where it is at hand: experts that it has are not kept twice.

    Raises:
        EngineError: the engine failed, whatever it raised, or answered with what no engine may.
    """
    where = f"rollout {rollout_id}, call {order}"
    request = Request(prompt_ids=prompt_ids, sampling=sampling, rollout_key=rollout_key, group_id=group_id, media=media)
    try:
        found = await engine.generate(request)
    except EvenstepError:
        raise
    except (Exception, asyncio.CancelledError) as error:  # an engine's failure must never pass for the environment's
        if is_asked_to_stop(error):
            raise
        raise EngineError(
            f"{where}: the engine failed with {type(error).__name__}: "
            f"{error}; what is finished is on disk, go on with --resume once the cause is gone"
        ) from error
    completion = checked_completion(found, where, max_tokens=sampling.max_tokens, vocab_size=vocab_size)
    num_tokens = len(prompt_ids) + len(completion.output_ids)
    experts = _checked_experts(completion, where, num_tokens)
    return Call(
        order=order,
        prompt_ids=prompt_ids,
        output_ids=completion.output_ids,
        logprobs=completion.logprobs,
        parent=parent,
        weight_version=completion.weight_version,
        sampling=sampling,
        break_reason=break_reason,
        finish_reason=completion.finish_reason,
        routed_experts=None if experts is None else _news(experts, num_tokens, prompt_ids, before),
        media=media,
    )


def _checked_experts(completion: Completion, where: str, num_tokens: int) -> RoutedExperts | None:
    experts: Any = completion.routed_experts
    if experts is None:
        return None
    if isinstance(experts, RoutedExperts) and experts.num_tokens <= num_tokens:
        return _whole(experts, num_tokens)
    found = f"those of {experts.num_tokens}" if isinstance(experts, RoutedExperts) else type(experts).__name__
    raise EngineError(
        f"{where}: an engine must answer with RoutedExperts of its last tokens, at most {num_tokens}, or None, found "
        f"{found}; give none for tokens of other requests"
    )


def _whole(experts: RoutedExperts, num_tokens: int) -> RoutedExperts:
    """The same for all tokens: a call that has fewer is one whose parents know the others."""
    num_missing = num_tokens - experts.num_tokens
    if num_missing == 0:
        return experts
    unknown_TLX = np.full((num_missing, *experts.shape[1:]), UNKNOWN, dtype=np.int16)
    return RoutedExperts.of(np.concatenate([unknown_TLX, experts.experts_TLX]))


def _news(experts: RoutedExperts, num_tokens: int, prompt_ids: tuple[int, ...], before: Call | None) -> RoutedExperts:
    """The experts from the first token on that the calls before did not know: as a rule the last one that was sampled.

    A prompt holds all that came before it, and so does its forward; kept whole, a rollout's experts would grow with the
    square of its calls.
    """
    known = None if before is None else before.routed_experts
    if before is None or known is None:
        return experts
    view = before.prompt_ids + before.output_ids
    is_whole = known.num_tokens == len(view) or before.parent is not None
    if not is_whole or prompt_ids[: len(view)] != view:
        return experts
    is_known_T = known.is_known_T
    num_known = known.num_tokens if is_known_T.all() else int(is_known_T.argmin())
    first = len(view) - known.num_tokens + num_known
    return experts.part(max(experts.num_tokens - (num_tokens - first), 0), experts.num_tokens)


def is_asked_to_stop(error: BaseException) -> bool:
    """Whether this is the cancellation of the present task, and not one that foreign code let escape."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many ids two lists share, from the first on.

    >>> num_common([5, 6, 7], [5, 6, 8, 9])
    2
    """
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def checked_completion(found: Any, where: str, *, max_tokens: int | None, vocab_size: int | None) -> Completion:
    """What an engine answered, in plain integers and floats.

    Raises:
        EngineError: it is not what every engine promises; trained on, it would be a wrong step and not a wrong answer.
    """

    def refuse(promise: str, what: str, fix: str) -> EngineError:
        return EngineError(f"{where}: an engine must answer with {promise}, found {what}; {fix}")

    if not isinstance(found, Completion):
        raise refuse("a Completion", type(found).__name__, "return one from the engine's generate()")
    ids_T = _array(found.output_ids)
    if ids_T is None or ids_T.ndim != 1 or (ids_T.size and ids_T.dtype.kind not in "iu"):
        raise refuse("a list of token ids", f"{found.output_ids!r:.60}", "ask the server for ids, never for text")
    if max_tokens is not None and ids_T.size > max_tokens:
        raise refuse(f"at most the {max_tokens} tokens it was asked for", f"{ids_T.size}", "pass max_tokens on to it")
    if ids_T.size and ids_T.min() < 0:
        raise refuse("ids that are at least 0", f"id {ids_T.min()}", "look for a padding id in its output")
    if ids_T.size and vocab_size is not None and ids_T.max() >= vocab_size:
        raise refuse(
            f"ids of the trained model's vocabulary, below {vocab_size}",
            f"id {ids_T.max()}",
            "it serves another model: start it with the files of model.path",
        )
    given: Any = found.logprobs
    logprobs_T = _array([] if given is None else given)
    has_none = given is None or (logprobs_T is not None and ids_T.size > 0 and logprobs_T.size == 0)
    if logprobs_T is None or has_none or logprobs_T.dtype.kind not in "iuf":
        raise refuse(
            "a log-prob for each token",
            "none" if has_none else f"{given!r:.60}",
            "switch on the log-probs of sampled tokens in its server, and give them as a list of numbers",
        )
    if logprobs_T.shape != ids_T.shape:
        raise refuse(
            "one log-prob for each token",
            f"{logprobs_T.size} for {ids_T.size} tokens",
            "take both from the same choice of the same response, without the prompt's",
        )
    is_wrong_T = ~np.isfinite(logprobs_T) | (logprobs_T > MAX_LOGPROB)
    if is_wrong_T.any():
        at = int(np.flatnonzero(is_wrong_T)[0])
        raise refuse(
            "log-probs that are finite and at most 0",
            f"{logprobs_T[at]} at output token {at}",
            "give natural logarithms of the probabilities that it sampled from",
        )
    if (logprobs_T < MIN_LOGPROB).any():
        at = int(np.flatnonzero(logprobs_T < MIN_LOGPROB)[0])
        raise refuse(
            "log-probs of tokens that can have been sampled",
            f"{logprobs_T[at]}, a probability of 0, at output token {at}",
            "it stands for -inf in vLLM's answers: look for what masks the logits that log-probs are taken of",
        )
    if found.finish_reason not in ("stop", "length"):
        raise refuse("finish_reason 'stop' or 'length'", f"{found.finish_reason!r}", "do not pass on aborted requests")
    version: Any = found.weight_version
    if not isinstance(version, Integral) or isinstance(version, bool) or version < 0:
        raise refuse(
            "the optimizer steps behind its weights as weight_version, an integer ≥ 0",
            f"{version!r:.60}",
            "count them where the engine is given weights",
        )
    return replace(
        found,
        output_ids=tuple(ids_T.tolist()),
        logprobs=tuple(logprobs_T.astype(np.float64).tolist()),
        weight_version=int(version),
    )


def _array(values: Any) -> np.ndarray | None:
    """The values; None where they are no array, such as lists of unequal lengths or tensors with a gradient."""
    try:
        return np.asarray(values)
    except Exception:  # noqa: BLE001 -- whatever a type makes of this, it is the engine's answer that is wrong
        return None
