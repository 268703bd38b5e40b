"""What vLLM and SGLang answer over HTTP, as one small protocol: token ids in; ids, log-probs and a reason out.

Nothing here goes through text. An answer that is not exactly what was asked for is refused: trained on, it would be a
wrong step and not a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

from evenstep.errors import EngineError
from evenstep.experts import RoutedExperts
from evenstep.rollout.engine import FinishReason
from evenstep.rollout.returned_experts import returned_experts
from evenstep.rollout.server_connection import Connection, UnavailableError, shortened
from evenstep.types import Sampling

__all__ = ["APIS", "RETURN_EXPERTS", "Answer", "ServerApi", "ServerFacts"]

SAMPLED_MODES = ("processed_logprobs",)  # log-probs of the distribution sampled from
RAW_MODES = ("raw_logprobs",)  # the same at temperature 1 alone
TOKENIZER_TEXT = "The 3 quick foxes jump: 12 + 345 = 357."
RESUME_S = 30.0
IDS_PATH, COMPLETIONS_PATH = "/inference/v1/generate", "/v1/completions"  # of vLLM


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

    name: str

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


class VllmApi:
    """vLLM: its route for ids where that is open, else the completions API with ids; the routes of its development mode
    for weights."""

    name = "vllm"

    async def facts(self, server: Connection) -> ServerFacts:
        models = _field(server, await server.get("/v1/models"), "data", list, "GET /v1/models")
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
                await server.post("/v1/completions", body, timeout_s=60.0)
            except EngineError as error:
                if "vocabulary" in str(error):
                    return False
                raise
            return True

        await _check_vocabulary(takes, server.url, vocab_size)

    async def tokenize(self, server: Connection, facts: ServerFacts, text: str) -> list[int] | None:
        body = {"model": facts.model, "prompt": text, "add_special_tokens": False}
        return await _tokens(server, body)

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
            **_distribution(sampling, stop_token_ids),
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
        choices = _field(server, found, "choices", list, f"POST {path}")
        if len(choices) != 1 or not isinstance(choices[0], dict):
            raise EngineError(f"the server at {server.url} must answer with one choice, found {len(choices)}")
        choice = cast(dict[str, Any], choices[0])
        _refuse_aborted(choice.get("finish_reason"))  # first: it may have nothing else of an answer
        if "token_ids" not in choice or choice["token_ids"] is None:
            raise EngineError(
                f"the server at {server.url} must return token ids, found a choice with {', '.join(sorted(choice))}; "
                f"use vLLM 0.11 or newer, which knows return_token_ids, and no proxy that drops it"
            )
        given = found.get("prompt_token_ids") if facts.stamps_answers else choice.get("prompt_token_ids")
        if given is not None and list(given) != list(prompt_ids):
            raise EngineError(
                f"the server at {server.url} must complete the ids that it was given, found a prompt of {len(given)} "
                f"ids for {len(prompt_ids)}, first different at {_first_difference(given, prompt_ids)}; it truncates "
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
        answer = _checked(
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
        return str(_field(server, await server.get("/weight_info"), "weight_version", object, "GET /weight_info"))

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


class SglangApi:
    """SGLang: its native generate route, and weights from disk.

    ``experts_shape``: layers with experts and experts per token of the policy, where calls return their choice.
    """

    name = "sglang"

    def __init__(self, experts_shape: tuple[int, int] | None = None) -> None:
        self._experts_shape = experts_shape

    async def facts(self, server: Connection) -> ServerFacts:
        model: Any = await server.get("/get_model_info")
        info: Any = await server.get("/get_server_info")
        length = info.get("context_length") or info.get("max_total_num_tokens")
        dtype = info.get("dtype")
        return ServerFacts(
            model=str(_field(server, model, "model_path", str, "GET /get_model_info")),
            max_context_tokens=length if isinstance(length, int) else None,
            dtype=None if dtype in (None, "auto") else {"half": "float16"}.get(str(dtype), str(dtype)),
            logprobs_mode=None,
        )

    async def check_ids(self, server: Connection, facts: ServerFacts, *, vocab_size: int) -> None:
        info: Any = await server.get("/get_model_info")
        found = info.get("vocab_size")
        if isinstance(found, int) and found != vocab_size:
            raise _other_vocabulary(server.url, f"one of {found}", vocab_size)

    async def tokenize(self, server: Connection, facts: ServerFacts, text: str) -> list[int] | None:
        return await _tokens(server, {"prompt": text, "add_special_tokens": False})

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
            **_distribution(sampling, stop_token_ids),
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
        meta: Any = _field(server, found, "meta_info", dict, "POST /generate")
        reason: Any = meta.get("finish_reason")
        reason = reason.get("type") if isinstance(reason, dict) else reason
        _refuse_aborted(reason)  # first: it may have nothing else of an answer
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
        answer = _checked(
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
        return str(_field(server, info, "weight_version", object, "GET /get_model_info"))

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


APIS: Mapping[str, Callable[[], ServerApi]] = {"vllm": VllmApi, "sglang": SglangApi}
RETURN_EXPERTS: Mapping[str, Callable[[tuple[int, int]], ServerApi]] = {"sglang": SglangApi}


def _distribution(sampling: Sampling, stop_token_ids: Sequence[int]) -> dict[str, Any]:
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


def _refuse_aborted(reason: Any) -> None:
    if reason == "abort":
        raise UnavailableError("the call was aborted there")


def _checked(
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


async def _check_vocabulary(takes: Callable[[int], Any], url: str, vocab_size: int) -> None:
    if not await takes(vocab_size - 1):
        raise _other_vocabulary(url, f"one that has no id {vocab_size - 1}", vocab_size)
    if await takes(vocab_size):
        raise _other_vocabulary(url, f"one that has the id {vocab_size}", vocab_size)


def _other_vocabulary(url: str, found: str, vocab_size: int) -> EngineError:
    return EngineError(
        f"the server at {url} must have the vocabulary of model.path, {vocab_size} ids, found {found}: it serves "
        f"another model; start it with the files of model.path"
    )


async def _tokens(server: Connection, body: Mapping[str, Any]) -> list[int] | None:
    try:
        found = await server.post("/tokenize", body, timeout_s=30.0)
    except EngineError:
        return None  # started without a tokenizer, or too old for this route
    tokens: Any = found.get("tokens") if isinstance(found, dict) else None
    return list(tokens) if isinstance(tokens, list) else None


def _field(server: Connection, found: Any, name: str, kind: type, what: str) -> Any:
    if not isinstance(found, dict) or not isinstance(found.get(name), kind) or found.get(name) is None:
        raise EngineError(
            f"the server at {server.url} must answer {what} with {name!r}, found {shortened(str(found))}; is it the "
            f"kind of server that engine.kind names, and new enough (vLLM 0.32, SGLang 0.5)?"
        )
    return found[name]


def _first_difference(given: Sequence[int], asked: Sequence[int]) -> int:
    pairs = zip(given, asked, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(given), len(asked)))
