"""The HTTP side of the capture server: routes, who may use them, and errors that say what to do."""

# Annotations are read at run time and name local functions, so they must not be texts.

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, FastAPI, Header, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from evenstep import __version__
from evenstep.serve.answers import chat_events, chat_response, completion_events, completion_response
from evenstep.serve.captured import CapturedRollout
from evenstep.serve.gate import Caller, Gate
from evenstep.serve.history import Answer
from evenstep.serve.log import LOGGER, log_event
from evenstep.serve.refusals import RefusedError
from evenstep.serve.registry import Registry, is_name
from evenstep.serve.schemas import (
    BreakBody,
    ChatBody,
    CompletionBody,
    NewRolloutBody,
    RejectBody,
    RewardBody,
)
from evenstep.types import BreakReason
from evenstep.validation import dotted, promise

__all__ = ["MAX_BODY_BYTES", "make_app"]

MAX_BODY_BYTES = 4 * 2**20
BreakHeader = Annotated[BreakReason | None, Header(alias="x-evenstep-break")]
# only for the description: the gate has looked at the key before a route is found
_KEY = HTTPBearer(auto_error=False, description="a rollout's key; the administrator's makes rollouts")


def make_app(registry: Registry, *, max_body_bytes: int = MAX_BODY_BYTES, logs_prompts: bool = False) -> Any:
    """An ASGI application that serves the rollouts of a registry.

    Args:
        registry: the rollouts.
        max_body_bytes: a larger request is 413.
        logs_prompts: logs have the text of prompts and answers.
    """
    app = FastAPI(
        title="evenstep serve",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan(registry),
        dependencies=[Depends(_KEY)],
    )
    app.add_exception_handler(RefusedError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)

    def by_key(request: Request) -> CapturedRollout:
        caller: Caller = request.state.caller
        if registry.is_open:
            if caller.key is None or not is_name(caller.key):
                raise RefusedError(
                    404,
                    "which rollout? name it in the path, /r/<rollout>/v1, or by the API key",
                    code="unknown_rollout",
                )
            return registry.named(caller.key, begins=request.method == "POST")
        if caller.owned is None:
            raise RefusedError(
                403, "this key makes rollouts (POST /rollouts); use the key of one", code="not_a_rollout_key"
            )
        return caller.owned[1]

    def by_path(request: Request, rollout: Annotated[str, Path()]) -> CapturedRollout:
        if registry.is_open:
            return registry.named(rollout, begins=request.method == "POST")
        owned = cast(Caller, request.state.caller).owned
        if owned is None or owned[0] != rollout:  # one's own alone: of others not even whether they are there
            raise RefusedError(404, "there is no such rollout", code="unknown_rollout")
        return owned[1]

    # agents know /v1 alone; a path names the rollout where keys do not
    app.include_router(_model_routes(registry, by_key, logs_prompts=logs_prompts), prefix="/v1")
    app.include_router(_model_routes(registry, by_path, logs_prompts=logs_prompts), prefix="/r/{rollout}/v1")
    app.include_router(_rollout_routes(registry, by_key), prefix="/v1")
    app.include_router(_rollout_routes(registry, by_path), prefix="/r/{rollout}/v1")
    app.include_router(_rollout_routes(registry, by_path), prefix="/r/{rollout}")
    app.include_router(_server_routes(registry))
    return Gate(app, registry, max_body_bytes=max_body_bytes)


def _lifespan(registry: Registry) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async def sweep() -> None:
            while True:
                await asyncio.sleep(min(1.0, registry.capture.limits.timeout_s / 4))
                with suppress(RefusedError):  # it is logged, and tried again
                    await registry.end_overdue()

        sweeper = asyncio.create_task(sweep())
        try:
            yield
        finally:
            sweeper.cancel()
            await asyncio.gather(sweeper, return_exceptions=True)
            with suppress(RefusedError):  # it is logged, and whoever stops the server asks what is not written
                await registry.end_all("the server was stopped")

    return lifespan


# ------------------------------------------------------------------------------------------------ routes


def _model_routes(registry: Registry, rollout_of: Callable[..., CapturedRollout], *, logs_prompts: bool) -> APIRouter:
    router = APIRouter()
    capture = registry.capture

    async def answered(rollout: CapturedRollout, call: Awaitable[list[Answer]]) -> list[Answer]:
        started_s = time.monotonic()
        answers = await call
        first = answers[0].call
        fields: dict[str, Any] = {
            "rollout": rollout.identity.rollout_id,
            "orders": [answer.call.order for answer in answers],
            "parent": first.parent,
            "break_reason": first.break_reason,
            "num_prompt_tokens": len(first.prompt_ids),
            "num_output_tokens": [len(answer.call.output_ids) for answer in answers],
            "finish_reasons": [answer.finish_reason for answer in answers],
            "seconds": round(time.monotonic() - started_s, 3),
        }
        if logs_prompts:
            fields["prompt"] = capture.tokenizer.decode(list(first.prompt_ids), skip_special_tokens=False)
            fields["answers"] = [answer.text for answer in answers]
        log_event("call", **fields)
        return answers

    @router.post("/chat/completions")
    async def chat_completions(
        request: Request,
        body: ChatBody,
        rollout: Annotated[CapturedRollout, Depends(rollout_of)],
        break_reason: BreakHeader = None,
    ) -> Response:
        call = rollout.chat(body, break_reason, request.is_disconnected)
        answers = await answered(rollout, call)
        if body.stream:
            return _stream(chat_events(answers, body, capture))
        return JSONResponse(chat_response(answers, body, capture))

    @router.post("/completions")
    async def completions(
        request: Request,
        body: CompletionBody,
        rollout: Annotated[CapturedRollout, Depends(rollout_of)],
        break_reason: BreakHeader = None,
    ) -> Response:
        call = rollout.complete(body, break_reason, request.is_disconnected)
        answers = await answered(rollout, call)
        if body.stream:
            return _stream(completion_events(answers, body, capture))
        return JSONResponse(completion_response(answers, body, capture))

    @router.get("/models")
    async def models() -> Response:
        model = {"id": capture.model_name, "object": "model", "created": 0, "owned_by": "evenstep"}
        model |= {"max_model_len": capture.context_tokens}
        return JSONResponse({"object": "list", "data": [model]})

    return router


def _rollout_routes(registry: Registry, rollout_of: Callable[..., CapturedRollout]) -> APIRouter:
    router = APIRouter()

    @router.post("/reward")
    async def reward(body: RewardBody, rollout: Annotated[CapturedRollout, Depends(rollout_of)]) -> Response:
        await registry.report(rollout, body)
        return JSONResponse(rollout.summary())

    @router.post("/segment")
    async def segment(body: BreakBody, rollout: Annotated[CapturedRollout, Depends(rollout_of)]) -> Response:
        rollout.declare(body.reason)
        return JSONResponse(rollout.summary())

    @router.post("/reject")
    async def reject(body: RejectBody, rollout: Annotated[CapturedRollout, Depends(rollout_of)]) -> Response:
        rollout.reject(body.calls)
        return JSONResponse(rollout.summary())

    @router.get("/status")
    async def status(rollout: Annotated[CapturedRollout, Depends(rollout_of)]) -> Response:
        return JSONResponse(rollout.summary())

    return router


def _server_routes(registry: Registry) -> APIRouter:
    router = APIRouter()

    @router.post("/rollouts", status_code=201)
    async def new_rollout(request: Request, body: NewRolloutBody) -> Response:
        if not cast(Caller, request.state.caller).is_admin:
            raise RefusedError(403, "only the administrator's key makes rollouts", code="not_the_admin_key")
        name, key = registry.create(body)
        base_url = f"{str(request.base_url).rstrip('/')}/r/{name}/v1"
        return JSONResponse({"rollout_id": name, "key": key, "base_url": base_url}, status_code=201)

    @router.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    return router


def _stream(events: Iterator[bytes]) -> Response:
    async def body() -> AsyncIterator[bytes]:
        for event in events:
            yield event

    return StreamingResponse(body(), media_type="text/event-stream", headers={"cache-control": "no-store"})


# ------------------------------------------------------------------------------------------------ errors


def _answer(refused: RefusedError) -> Response:
    return JSONResponse(refused.body(), status_code=refused.status, headers=refused.headers())


async def _refused(request: Request, error: Exception) -> Response:
    refused = cast(RefusedError, error)
    log_event("refused", path=_shape(request), status=refused.status, code=refused.code)
    return _answer(refused)


async def _invalid(request: Request, error: Exception) -> Response:
    """What is wrong with the body, without saying it back."""
    findings = cast(RequestValidationError, error).errors()[:8]
    places = [dotted(part for part in finding["loc"][1:]) or "body" for finding in findings]
    problems = [f"{place} {promise(finding)}" for place, finding in zip(places, findings, strict=True)]
    log_event("refused", path=_shape(request), status=422, code="invalid_value")
    return _answer(RefusedError(422, "; ".join(problems), code="invalid_value", param=places[0]))


async def _http_error(request: Request, error: Exception) -> Response:
    found = cast(HTTPException, error)
    messages = {404: ("there is no such path", "unknown_path"), 405: ("this path has other methods", "wrong_method")}
    message, code = messages.get(found.status_code, ("the request cannot be served", "bad_request"))
    response = _answer(RefusedError(found.status_code, message, code=code))
    response.headers.update(found.headers or {})
    return response


async def _unexpected(request: Request, error: Exception) -> Response:
    LOGGER.error("%s %s failed", request.method, _shape(request), exc_info=error)
    return _answer(RefusedError(500, "something went wrong here; the server's log says what", code="internal_error"))


def _shape(request: Request) -> str:
    route = request.scope.get("route")
    return "" if route is None else route.path
