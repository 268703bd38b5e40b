"""What servers of an engine must be and may take, what is known of each, and what they are compared with."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from math import inf, isfinite

from evenstep.errors import EngineError
from evenstep.experts import RoutedExperts
from evenstep.rollout.server_api import TOKENIZER_TEXT, ServerApi, ServerFacts
from evenstep.rollout.server_connection import Connection

__all__ = ["Expected", "Probe", "Server", "ServerOptions", "compare_probes", "inspect"]

SAMPLED_MODES = ("processed_logprobs",)  # of vLLM: log-probs of the distribution sampled from
RAW_MODES = ("raw_logprobs",)  # the same at temperature 1 alone
MAX_CHECKS = 4  # of a server's stamp at a time: with one, calls would wait for the answer to an earlier question too


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a server must be, to be the policy's engine."""

    max_context_tokens: int
    vocab_size: int
    stop_token_ids: frozenset[int]
    temperature: float  # that rollouts are sampled at
    dtype: str | None  # None: any
    probe_tolerance: float = 1e-3  # nats
    tokenizer_ids: tuple[int, ...] | None = None  # the policy's ids of TOKENIZER_TEXT; None is not compared


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where servers are, and how long they may take."""

    kind: str
    urls: tuple[str, ...]
    expected: Expected
    max_concurrent: int  # calls of this process at once
    request_timeout_s: float = 600.0
    update_timeout_s: float = 600.0
    reconnect_limit_s: float = 300.0  # how long an unreachable server is waited for
    api_key: str | None = None
    # layers with experts and experts per token of the policy, where calls return the experts that they chose
    experts_shape: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a server sampled after a long fixed prompt."""

    url: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    routed_experts: RoutedExperts | None = None  # of all these tokens, where they are asked for


@dataclass(slots=True)
class Server:
    """One of the servers, as its engine knows it."""

    connection: Connection
    facts: ServerFacts | None = None
    stamp: str = ""
    num_in_flight: int = 0
    is_up: bool = False
    problem: str | None = None  # why it is given up
    recovery: asyncio.Task[None] | None = None
    probe: Probe | None = None  # accepted at the present weights
    checks: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CHECKS))
    next_check: asyncio.Task[str] | None = None  # of the stamp, not asked yet


async def inspect(server: Server, api: ServerApi, expected: Expected) -> None:
    """Ask a server what it is, and refuse another than the one that is needed.

    Raises:
        UnavailableError: it does not answer.
        EngineError: it is not what the policy needs.
    """
    connection = server.connection
    await connection.check_health()
    facts = await api.facts(connection)
    _check_facts(connection.url, facts, expected)
    await api.check_ids(connection, facts, vocab_size=expected.vocab_size)
    if expected.tokenizer_ids is not None:
        found = await api.tokenize(connection, facts, TOKENIZER_TEXT)
        if found is not None and tuple(found) != expected.tokenizer_ids:
            raise EngineError(
                f"the server at {connection.url} must have the tokenizer of model.path, found that it makes "
                f"{len(found)} tokens of {TOKENIZER_TEXT!r}, {found[:8]} …, and model.path "
                f"{len(expected.tokenizer_ids)}, {list(expected.tokenizer_ids[:8])} …; start it with the files of "
                f"model.path"
            )
    server.facts = facts


def _check_facts(url: str, facts: ServerFacts, expected: Expected) -> None:
    most = facts.max_context_tokens
    if most is not None and most < expected.max_context_tokens:
        raise EngineError(
            f"the server at {url} must take model.max_context_tokens = {expected.max_context_tokens} tokens, found a "
            f"context of {most}, where it clamps outputs without an error; start it with --max-model-len "
            f"{expected.max_context_tokens}, or lower model.max_context_tokens"
        )
    mode = facts.logprobs_mode
    is_right = mode is None or mode in SAMPLED_MODES or (mode in RAW_MODES and expected.temperature == 1.0)
    if not is_right:
        raise EngineError(
            f"the server at {url} must give log-probs of the distribution that it samples from, at rollout.temperature "
            f"= {expected.temperature:g}, found --logprobs-mode {mode}; start it with --logprobs-mode "
            f"processed_logprobs"
        )
    if facts.dtype is not None and expected.dtype is not None and facts.dtype != expected.dtype:
        raise EngineError(
            f"the server at {url} must compute in engine.dtype = {expected.dtype!r}, found {facts.dtype!r}; start it "
            f"with --dtype {expected.dtype}, or set engine.dtype (and a wider engine.probe_tolerance)"
        )


def compare_probes(before: Probe, after: Probe, *, tolerance: float) -> None:
    """A server that came back must sample what it sampled before with the same weights and seed.

    Raises:
        EngineError: it does not.
    """
    ids = zip(before.output_ids, after.output_ids, strict=True)
    # from the first different id on, the log-probs are of different contexts
    num_equal = next((at for at, (a, b) in enumerate(ids) if a != b), len(before.output_ids))
    pairs = zip(before.logprobs[:num_equal], after.logprobs, strict=False)
    # a NaN is no number that agrees, and max() may pass it over
    worst = max((abs(a - b) if isfinite(b) else inf for a, b in pairs), default=inf)
    if not worst <= tolerance:
        raise EngineError(
            f"the server at {after.url} was started again and must answer the probe as before with the same weights, "
            f"found {num_equal} equal ids of {len(before.output_ids)} and log-probs that differ by {worst:.3g}; start "
            f"it as it was started at first"
        )
