"""How a server is asked, as one small protocol: token ids in; ids, log-probs and a reason out.

Nothing here goes through text. An answer that is not exactly what was asked for is refused: trained on, it would be a
wrong step and not a wrong answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from evenstep.errors import EngineError
from evenstep.experts import RoutedExperts
from evenstep.rollout.engine import FinishReason
from evenstep.rollout.server_connection import Connection, UnavailableError, shortened
from evenstep.types import Sampling

__all__ = [
    "TOKENIZER_TEXT",
    "Answer",
    "ServerApi",
    "ServerFacts",
    "checked_answer",
    "distribution",
    "field_of",
    "other_vocabulary",
    "refuse_aborted",
    "tokens_of",
]

TOKENIZER_TEXT = "The 3 quick foxes jump: 12 + 345 = 357."


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server says of itself; None where it does not say."""

    model: str  # the name that it serves the model by
    max_context_tokens: int | None
    dtype: str | None  # "float32", "bfloat16", ...
    logprobs_mode: str | None  # vLLM's name for it
    stamps_answers: bool = False  # an answer can say which weights sampled it


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a server sampled, checked against the request."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    routed_experts: RoutedExperts | None = None  # of prompt and output, where they were asked for
    stamp: str | None = None  # of the weights that sampled it; None: the server does not say


class ServerApi(Protocol):
    """How one kind of server is asked."""

    async def facts(self, server: Connection) -> ServerFacts: ...

    async def check_ids(self, server: Connection, facts: ServerFacts, *, vocab_size: int) -> None:
        """Refuse a server whose vocabulary has another size."""
        ...

    async def tokenize(self, server: Connection, facts: ServerFacts, text: str) -> list[int] | None:
        """The server's ids of a text; None where it has no tokenizer to ask."""
        ...

    async def complete(
        self,
        server: Connection,
        facts: ServerFacts,
        *,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        timeout_s: float,
    ) -> Answer: ...

    async def stamp(self, server: Connection) -> str:
        """What the last weight update left there, or what the server calls the weights that it started with."""
        ...

    async def wake(self, server: Connection) -> None:
        """Let a server go on that a run left waiting, killed while it gave it weights."""
        ...

    async def mark(self, server: Connection, stamp: str) -> str:
        """Name the weights that a server has, which tells it from one that was started again; its stamp after that."""
        ...

    async def load(self, server: Connection, folder: Path, stamp: str, *, timeout_s: float) -> None:
        """Wait for calls in flight, load the weights of a folder, forget cached prefixes, leave the stamp."""
        ...


def distribution(sampling: Sampling, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """What both kinds of server call by the same names: the distribution to sample from, and where to stop."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        # a model's own generation_config.json may ask for others
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(stop_token_ids),
        "ignore_eos": True,  # the ids to stop at are those above, whatever the server's files call the eos
    }


def refuse_aborted(reason: Any) -> None:
    """A call that the server gave up may be sent again."""
    if reason == "abort":
        raise UnavailableError("the call was aborted there")


def checked_answer(
    server: Connection,
    *,
    ids: Any,
    logprobs: Any,
    reason: Any,
    max_tokens: int,
    num_prompt_tokens: int,
    stop_token_ids: Sequence[int],
    most: int | None,
) -> Answer:
    """What came back, as it was asked for.

    Raises:
        EngineError: log-probs are missing, or the output ended where it was not asked to.
    """
    num_tokens = len(ids)
    if logprobs is None or len(logprobs) != num_tokens or any(value is None for value in logprobs):
        found = "none" if not logprobs else f"{sum(value is not None for value in logprobs)}"
        raise EngineError(
            f"the server at {server.url} must give a log-prob for each of {num_tokens} sampled tokens, found {found}; "
            f"switch log-probs on there (vLLM: --max-logprobs at least 1, and no --disable-logprobs)"
        )
    if reason not in ("stop", "length"):
        raise EngineError(
            f"the server at {server.url} must end a call with 'stop' or 'length', found {reason!r}; switch off what "
            f"ends calls in another way"
        )
    if num_tokens > max_tokens or (reason == "length" and num_tokens < max_tokens):
        limit = "" if most is None else f"; its context is {most} tokens"
        raise EngineError(
            f"the server at {server.url} must sample the {max_tokens} tokens it is asked for when no stop id comes, "
            f"found {num_tokens} and finish reason 'length' after a prompt of {num_prompt_tokens}{limit}: it clamps "
            f"lengths without an error. Start it with a --max-model-len of at least "
            f"{num_prompt_tokens + max_tokens}, or lower model.max_context_tokens"
        )
    if reason == "stop" and (not num_tokens or ids[-1] not in set(stop_token_ids)):
        last = f"id {ids[-1]}" if num_tokens else "no token"
        raise EngineError(
            f"the server at {server.url} must stop at ids {sorted(stop_token_ids)} only, found a stop after {last}; "
            f"start it with --generation-config vllm, and without stop strings of its own"
        )
    return Answer(
        output_ids=tuple(ids),
        logprobs=tuple(logprobs),
        finish_reason="stop" if reason == "stop" else "length",
    )


def other_vocabulary(url: str, found: str, vocab_size: int) -> EngineError:
    """Says that a server has other ids than the policy."""
    return EngineError(
        f"the server at {url} must have the vocabulary of model.path, {vocab_size} ids, found {found}: it serves "
        f"another model; start it with the files of model.path"
    )


async def tokens_of(server: Connection, body: Mapping[str, Any]) -> list[int] | None:
    """What the server's tokenizer makes of a text; None where it has none to ask."""
    try:
        found = await server.post("/tokenize", body, timeout_s=30.0)
    except EngineError:
        return None  # started without a tokenizer, or too old for this route
    tokens: Any = found.get("tokens") if isinstance(found, dict) else None
    return list(tokens) if isinstance(tokens, list) else None


def field_of(server: Connection, found: Any, name: str, kind: type, what: str) -> Any:
    """A field that an answer must have, or an EngineError."""
    if not isinstance(found, dict) or not isinstance(found.get(name), kind) or found.get(name) is None:
        raise EngineError(
            f"the server at {server.url} must answer {what} with {name!r}, found {shortened(str(found))}; is it the "
            f"kind of server that engine.kind names, and new enough (vLLM 0.32, SGLang 0.5)?"
        )
    return found[name]
