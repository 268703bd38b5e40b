"""What requests may hold: the OpenAI fields that keep the sampled distribution the trainer's, and nothing unknown."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator
from pydantic_core import PydanticCustomError

from evenstep.serve.conversation import Message
from evenstep.serve.refusals import RefusedError
from evenstep.serve.tool_calls import ToolCall
from evenstep.types import WHOLE_DISTRIBUTION, BreakReason

__all__ = [
    "BreakBody",
    "ChatBody",
    "CompletionBody",
    "NewRolloutBody",
    "RejectBody",
    "RewardBody",
    "SamplingBody",
    "refuse_other_distributions",
    "stop_strings",
]

T = TypeVar("T")
MAX_INT = 2**63 - 1
Id = Annotated[int, Field(ge=0, le=MAX_INT)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Info = dict[str, JsonValue]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class TextPart(Body):
    type: Literal["text"]
    text: str


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCallBody(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # of a streamed call that a client put together


class MessageBody(Body):
    # the fields of a response's message that a client may send back empty
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[JsonValue], Field(max_length=0)] | None = None
    reasoning_content: None = None

    @field_validator("content", mode="before")
    @classmethod
    def _is_text_alone(cls, content: Any) -> Any:
        """Refuse images in a sentence, where each kind of part would have one of its own."""
        kinds = [part.get("type") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
        if any(isinstance(kind, str) and kind != "text" for kind in kinds):
            raise PydanticCustomError(
                "text_alone",
                "must be text, or parts of type 'text': images and other media are not served, only environments that "
                "the training ranks play show some (docs/images.md)",
            )
        return content

    def message(self) -> Message:
        """As it is compared and rendered."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return Message(
            role="system" if self.role == "developer" else self.role,
            content=content or "",
            tool_calls=tuple(
                ToolCall(name=call.function.name, arguments=call.function.arguments) for call in self.tool_calls or ()
            ),
            tool_call_id=self.tool_call_id,
            name=self.name,
        )


class Tool(Body):
    type: Literal["function"]
    function: dict[str, JsonValue]


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False


class ResponseFormat(Body):
    type: Literal["text"]


class SamplingBody(Body):
    """What both kinds of completions share."""

    model: str = ""  # any: the one that is served answers
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    seed: Annotated[int, Field(ge=-(2**63), le=MAX_INT)] | None = None
    stop: (
        Annotated[str, Field(min_length=1, max_length=256)]
        | Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16)]
        | None
    ) = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    user: str | None = None  # a label
    # of another distribution than the trainer's unless they have no effect
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


class ChatBody(SamplingBody):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: ResponseFormat | None = None
    metadata: dict[str, str] | None = None  # labels
    store: Literal[False] | None = None


class CompletionBody(SamplingBody):
    """``POST /v1/completions``: a text, or exact ids."""

    prompt: (
        str
        | Annotated[list[Id], Field(min_length=1, fail_fast=True)]
        | Annotated[list[str], Field(min_length=1, max_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    echo: Literal[False] | None = False
    best_of: Literal[1] | None = None
    suffix: None = None


class RewardBody(Body):
    """``POST /r/<rollout>/reward``: ends the rollout."""

    reward: float | None = None
    status: Literal["ok", "truncated", "failed"] = "ok"
    reason: Annotated[str, Field(max_length=4096)] | None = None
    info: Info = {}
    chosen: Annotated[list[Id], Field(max_length=4096)] = []  # of several choices, orders of calls that were used
    group_id: Name | None = None
    prompt_id: Name | None = None


class BreakBody(Body):
    """``POST /r/<rollout>/segment``: the next prompt may rewrite the history."""

    reason: BreakReason


class RejectBody(Body):
    """``POST /r/<rollout>/reject``: outputs that the agent threw away."""

    calls: Annotated[list[Id], Field(min_length=1, max_length=4096)]


class NewRolloutBody(Body):
    """``POST /rollouts``."""

    rollout_id: Name | None = None
    group_id: Name | None = None
    prompt_id: Name | None = None


def refuse_other_distributions(body: SamplingBody, temperature: float) -> None:
    """Refuse settings under which log-probs would not be those of the distribution that is trained.

    Raises:
        RefusedError: names the field.
    """
    for name, whole in WHOLE_DISTRIBUTION.items():
        value = getattr(body, name)
        if value not in whole:
            raise RefusedError(
                400,
                f"{name} changes the distribution that is sampled from, which must be the trainer's, found {value}; "
                f"leave it out",
                code="other_distribution",
                param=name,
            )
    if body.temperature is not None and body.temperature != temperature:
        raise RefusedError(
            400,
            f"temperature must be the one that is trained at, {temperature}, found {body.temperature}; leave it out, "
            f"or train at {body.temperature}",
            code="other_distribution",
            param="temperature",
        )


def stop_strings(body: SamplingBody) -> tuple[str, ...]:
    """Texts that end an output."""
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
