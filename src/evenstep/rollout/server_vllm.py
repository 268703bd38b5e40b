"""How vLLM is asked over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from evenstep.errors import EngineError
from evenstep.rollout.calls import num_common
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
from evenstep.rollout.server_connection import Connection, UnavailableError
from evenstep.types import Sampling

__all__ = ["IDS_PATH", "VllmApi"]

RESUME_S = 30.0
IDS_PATH, COMPLETIONS_PATH = "/inference/v1/generate", "/v1/completions"


class VllmApi:
    """vLLM: its route for ids where that is open, else the completions API with ids; the routes of its development mode
    for weights."""

    async def facts(self, server: Connection) -> ServerFacts:
        models = field_of(server, await server.get("/v1/models"), "data", list, "GET /v1/models")
        if not models:
            raise EngineError(f"the server at {server.url} must serve a model, found an empty GET /v1/models")
        first = cast(dict[str, Any], models[0])
        if not await server.has("/server_info?config_format=json"):
            raise EngineError(
                f"the vLLM server at {server.url} must have the routes for weight updates, found no /server_info; "
                f"start it with the environment variable VLLM_SERVER_DEV_MODE=1"
            )
        info: Any = await server.get("/server_info?config_format=json")
        model: Any = info.get("vllm_config", {}).get("model_config", {}) if isinstance(info, dict) else {}
        length = first.get("max_model_len")
        return ServerFacts(
            model=str(first.get("id")),
            max_context_tokens=length if isinstance(length, int) else None,
            dtype=str(model["dtype"]).removeprefix("torch.") if "dtype" in model else None,
            logprobs_mode=model.get("logprobs_mode"),
            stamps_answers=await server.takes_posts(IDS_PATH),
        )

    async def check_ids(self, server: Connection, facts: ServerFacts, *, vocab_size: int) -> None:
        async def takes(token: int) -> bool:
            body = {"model": facts.model, "prompt": [token], "max_tokens": 1, "temperature": 0.0}
            try:
                await server.post(COMPLETIONS_PATH, body, timeout_s=60.0)
            except EngineError as error:
                if "vocabulary" in str(error):
                    return False
                raise
            return True

        if not await takes(vocab_size - 1):
            raise other_vocabulary(server.url, f"one that has no id {vocab_size - 1}", vocab_size)
        if await takes(vocab_size):
            raise other_vocabulary(server.url, f"one that has the id {vocab_size}", vocab_size)

    async def tokenize(self, server: Connection, facts: ServerFacts, text: str) -> list[int] | None:
        body = {"model": facts.model, "prompt": text, "add_special_tokens": False}
        return await tokens_of(server, body)

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
            "max_tokens": max_tokens,
            "seed": sampling.seed,
            "logprobs": 0,
        }
        if facts.stamps_answers:
            path = IDS_PATH
            sent = {"token_ids": list(prompt_ids), "sampling_params": {**parameters, "detokenize": False}}
        else:
            path, sent = COMPLETIONS_PATH, {"prompt": list(prompt_ids), **parameters}
        body = {"model": facts.model, "return_token_ids": True, **sent}
        found = await server.post(path, body, timeout_s=timeout_s)
        choices = field_of(server, found, "choices", list, f"POST {path}")
        if len(choices) != 1 or not isinstance(choices[0], dict):
            raise EngineError(f"the server at {server.url} must answer with one choice, found {len(choices)}")
        choice = cast(dict[str, Any], choices[0])
        refuse_aborted(choice.get("finish_reason"))  # first: it may have nothing else of an answer
        if "token_ids" not in choice or choice["token_ids"] is None:
            raise EngineError(
                f"the server at {server.url} must return token ids, found a choice with {', '.join(sorted(choice))}; "
                f"use vLLM 0.11 or newer, which knows return_token_ids, and no proxy that drops it"
            )
        given = found.get("prompt_token_ids") if facts.stamps_answers else choice.get("prompt_token_ids")
        if given is not None and list(given) != list(prompt_ids):
            raise EngineError(
                f"the server at {server.url} must complete the ids that it was given, found a prompt of {len(given)} "
                f"ids for {len(prompt_ids)}, first different at {num_common(given, prompt_ids)}; it truncates "
                f"or re-tokenises: leave truncate_prompt_tokens and prompt templates out"
            )
        logprobs: Any = (choice.get("logprobs") or {}).get("content" if facts.stamps_answers else "token_logprobs")
        if facts.stamps_answers and logprobs is not None:
            if [one["token_id"] for one in logprobs] != choice["token_ids"]:
                raise EngineError(f"the server at {server.url} must give log-probs of its output ids, found other ids")
            logprobs = [one["logprob"] for one in logprobs]
        stamps = {span["version"] for span in choice.get("weight_versions") or ()}
        if len(stamps) > 1:
            raise UnavailableError(f"its weights changed in the middle of a call: {', '.join(sorted(stamps))}")
        answer = checked_answer(
            server,
            ids=choice["token_ids"],
            logprobs=logprobs,
            reason=choice.get("finish_reason"),
            max_tokens=max_tokens,
            num_prompt_tokens=len(prompt_ids),
            stop_token_ids=stop_token_ids,
            most=facts.max_context_tokens,
        )
        return replace(answer, stamp=stamps.pop() if stamps else None)

    async def stamp(self, server: Connection) -> str:
        return str(field_of(server, await server.get("/weight_info"), "weight_version", object, "GET /weight_info"))

    async def wake(self, server: Connection) -> None:
        with suppress(EngineError):  # no such route: whoever asks for weights says so
            await server.post("/resume", timeout_s=RESUME_S)

    async def mark(self, server: Connection, stamp: str) -> str:
        await server.post("/update_weight_version", {"new_version": stamp}, timeout_s=30.0)
        return stamp

    async def load(self, server: Connection, folder: Path, stamp: str, *, timeout_s: float) -> None:
        await server.post("/pause?mode=wait", timeout_s=timeout_s)
        try:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            await server.post("/collective_rpc", body, timeout_s=timeout_s)
            # else a prompt of more than one cache block is answered from keys and values of the old weights
            reset = await server.post("/reset_prefix_cache", timeout_s=timeout_s)
            if isinstance(reset, dict) and reset.get("success") is False:
                raise EngineError(
                    f"the server at {server.url} must forget the prefixes that it cached with other weights, found "
                    f"that it did not; end whatever else uses it"
                )
            await server.post("/update_weight_version", {"new_version": stamp}, timeout_s=timeout_s)
        finally:
            await server.post("/resume", timeout_s=min(timeout_s, RESUME_S))  # also where the run is being ended
