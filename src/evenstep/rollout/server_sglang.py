"""How SGLang is asked over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenstep.errors import EngineError
from evenstep.rollout.returned_experts import returned_experts
from evenstep.rollout.server_api import (
    Answer,
    ServerFacts,
    checked_answer,
    distribution,
    field_of,
    other_vocabulary,
    refuse_aborted,
    tokens_of,
)
from evenstep.rollout.server_connection import Connection, shortened
from evenstep.types import Sampling

__all__ = ["SglangApi"]


class SglangApi:
    """SGLang: its native generate route, and weights from disk.

    ``experts_shape``: layers with experts and experts per token of the policy, where calls return their choice.
    """

    def __init__(self, experts_shape: tuple[int, int] | None = None) -> None:
        self._experts_shape = experts_shape

    async def facts(self, server: Connection) -> ServerFacts:
        model: Any = await server.get("/get_model_info")
        info: Any = await server.get("/get_server_info")
        length = info.get("context_length") or info.get("max_total_num_tokens")
        dtype = info.get("dtype")
        return ServerFacts(
            model=str(field_of(server, model, "model_path", str, "GET /get_model_info")),
            max_context_tokens=length if isinstance(length, int) else None,
            dtype=None if dtype in (None, "auto") else {"half": "float16"}.get(str(dtype), str(dtype)),
            logprobs_mode=None,
        )

    async def check_ids(self, server: Connection, facts: ServerFacts, *, vocab_size: int) -> None:
        info: Any = await server.get("/get_model_info")
        found = info.get("vocab_size")
        if isinstance(found, int) and found != vocab_size:
            raise other_vocabulary(server.url, f"one of {found}", vocab_size)

    async def tokenize(self, server: Connection, facts: ServerFacts, text: str) -> list[int] | None:
        return await tokens_of(server, {"prompt": text, "add_special_tokens": False})

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
    ) -> Answer:
        parameters = {
            **distribution(sampling, stop_token_ids),
            "max_new_tokens": max_tokens,
            "sampling_seed": sampling.seed,
        }
        body = {
            "input_ids": list(prompt_ids),
            "sampling_params": {name: value for name, value in parameters.items() if value is not None},
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
        }
        shape = self._experts_shape
        if shape is not None:
            body["return_routed_experts"] = True
        found: Any = await server.post("/generate", body, timeout_s=timeout_s)
        meta: Any = field_of(server, found, "meta_info", dict, "POST /generate")
        reason: Any = meta.get("finish_reason")
        reason = reason.get("type") if isinstance(reason, dict) else reason
        refuse_aborted(reason)  # first: it may have nothing else of an answer
        if "output_ids" not in found:
            raise EngineError(
                f"the server at {server.url} must return token ids, found an answer with {', '.join(sorted(found))}; "
                f"use SGLang 0.5 or newer"
            )
        count = meta.get("prompt_tokens")
        if isinstance(count, int) and count != len(prompt_ids):
            raise EngineError(
                f"the server at {server.url} must complete the {len(prompt_ids)} ids that it was given, found a prompt "
                f"of {count}; start it without --allow-auto-truncate"
            )
        triples: Any = meta.get("output_token_logprobs")
        ids = list(found["output_ids"])
        if triples and [triple[1] for triple in triples] != ids:
            raise EngineError(f"the server at {server.url} must give log-probs of its output ids, found other ids")
        answer = checked_answer(
            server,
            ids=ids,
            logprobs=None if triples is None else [triple[0] for triple in triples],
            reason=reason,
            max_tokens=max_tokens,
            num_prompt_tokens=len(prompt_ids),
            stop_token_ids=stop_token_ids,
            most=facts.max_context_tokens,
        )
        if shape is None:
            return answer
        experts = returned_experts(meta.get("routed_experts"), server.url, len(prompt_ids) + len(ids), shape)
        return replace(answer, routed_experts=experts)

    async def stamp(self, server: Connection) -> str:
        info = await server.get("/get_model_info")
        return str(field_of(server, info, "weight_version", object, "GET /get_model_info"))

    async def wake(self, server: Connection) -> None:
        pass  # loads in one request, which ends by itself

    async def mark(self, server: Connection, stamp: str) -> str:
        return await self.stamp(server)  # it names weights with an update alone

    async def load(self, server: Connection, folder: Path, stamp: str, *, timeout_s: float) -> None:
        # it waits for running requests by itself before it writes
        body = {"model_path": str(folder), "flush_cache": True, "abort_all_requests": False, "weight_version": stamp}
        found = await server.post("/update_weights_from_disk", body, timeout_s=timeout_s)
        if not isinstance(found, dict) or found.get("success") is not True:
            raise EngineError(
                f"the server at {server.url} must load the weights in {folder}, found {shortened(str(found))}; does it "
                f"see the folder under the same path?"
            )
