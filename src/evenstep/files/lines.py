"""What a line of each kind of file may hold, as strict models."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from evenstep.errors import FileFormatError, RowError
from evenstep.experts import RoutedExperts
from evenstep.types import MAX_TOKEN_IDS, BreakReason, Status
from evenstep.validation import dotted, find_unwritable, promise, shown

__all__ = [
    "FORMAT_VERSION",
    "CallObject",
    "ExpertsObject",
    "LengthsLine",
    "Line",
    "LineError",
    "RolloutLine",
    "RowLine",
]

FORMAT_VERSION = 1
# A log-prob is at most 0; float32 rounding may leave a trace above it, a probability stored by mistake lies far above.
MAX_LOGPROB = 1e-3

Text = Annotated[str, Field(min_length=1)]
Natural = Annotated[int, Field(ge=0)]
TokenId = Annotated[int, Field(ge=0, lt=MAX_TOKEN_IDS)]
LogProb = Annotated[float, Field(le=MAX_LOGPROB)]
Mask = Annotated[int, Field(ge=0, le=1)]


class LineError(Exception):
    """Something wrong in one line, before its file and number are known."""

    def __init__(self, location: str, message: str) -> None:
        super().__init__(location, message)
        self.location = location
        self.message = message

    def at(self, where: str) -> FileFormatError:
        field = f", field `{self.location}`" if self.location else ""
        return FileFormatError(f"{where}{field}: {self.message}")


class _Object(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    __pydantic_extra__: dict[str, JsonValue]  # pyright: ignore[reportIncompatibleVariableOverride]


class Line(_Object):
    """One object of a file."""

    format_version: Annotated[int, Field(ge=1, le=FORMAT_VERSION)]

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """The line from its JSON; raises `LineError`."""
        try:
            line = cls.model_validate_json(text)
        except ValidationError as error:
            raise _explained(error) from None
        line.check()
        return line

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """The line from Python values, before it is written; raises `LineError`."""
        try:
            line = cls.model_validate(values)
        except ValidationError as error:
            raise _explained(error) from None
        line.check()
        return line

    def check(self) -> None:
        """Raise `LineError` when fields contradict each other, or free-form JSON could not be read back."""
        _require_writable(self.__pydantic_extra__)


class SamplingObject(_Object):
    temperature: Annotated[float, Field(ge=0)]
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Natural = 0
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None


class MediaObject(_Object):
    """An image of a prompt; its pixels are a file of their own, named by the digest."""

    start: Natural
    num_tokens: Annotated[int, Field(ge=1)]
    grid: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]
    digest: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]  # also a file's name: nothing else may be one


class ExpertsObject(BaseModel):
    """Experts as base64 of little-endian int16: a long row of a deep model has millions of them."""

    model_config = ConfigDict(strict=True, extra="forbid")

    shape: tuple[Natural, Natural, Natural]
    base64: str

    def to_experts(self) -> RoutedExperts:
        """The experts; raises `RowError`, or `ValueError` where the text is no base64."""
        return RoutedExperts(self.shape, b64decode(self.base64, validate=True))

    @staticmethod
    def plain(experts: RoutedExperts) -> dict[str, Any]:
        """What is written of them."""
        return {"shape": experts.shape, "base64": b64encode(experts.data).decode()}


class CallObject(_Object):
    order: Natural
    prompt_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    output_ids: tuple[TokenId, ...]
    logprobs: tuple[LogProb, ...]
    parent: Natural | None = None
    weight_version: Natural
    sampling: SamplingObject
    break_reason: BreakReason | None = None
    finish_reason: str | None = None
    is_rejected: bool = False
    media: tuple[MediaObject, ...] = ()
    routed_experts: ExpertsObject | None = None

    @model_serializer(mode="wrap")
    def _without_what_is_empty(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values = serialise(self)
        for name in ("media", "routed_experts"):
            if not values[name]:
                del values[name]
        return values


class RolloutLine(Line):
    kind: Literal["rollout"]
    rollout_id: Text
    group_id: Text
    prompt_id: Text
    status: Status
    status_reason: str | None = None
    reward: float | None
    info: dict[str, JsonValue] = {}
    calls: tuple[CallObject, ...]

    def check(self) -> None:
        super().check()
        _require_writable(self.info, "info")
        _require_writable(self.status_reason, "status_reason")
        if self.reward is None and self.status != "failed":
            raise LineError(
                "reward",
                f'must be a number when status is "{self.status}", found null; score the rollout, '
                f'or set its status to "failed"',
            )
        index_of_order: dict[int, int] = {}
        for index, call in enumerate(self.calls):
            here = f"calls[{index}]"
            _require_writable(call.finish_reason, f"{here}.finish_reason")
            _require_writable(call.__pydantic_extra__, here)
            _require_writable(call.sampling.__pydantic_extra__, f"{here}.sampling")
            _require_one_each(f"{here}.logprobs", len(call.logprobs), "output_ids", len(call.output_ids))
            if call.order in index_of_order:
                raise LineError(
                    f"{here}.order",
                    f"must be unique in the rollout, found {call.order} also in calls[{index_of_order[call.order]}]; "
                    f"number the calls in the order they were made",
                )
            index_of_order[call.order] = index
            if call.routed_experts is not None:
                _require_experts(f"{here}.routed_experts", call.routed_experts)
                num_tokens = len(call.prompt_ids) + len(call.output_ids)
                if call.routed_experts.shape[0] > num_tokens:
                    raise LineError(
                        f"{here}.routed_experts.shape[0]",
                        f"must be at most the {num_tokens} tokens of prompt_ids and output_ids, found "
                        f"{call.routed_experts.shape[0]}; take both from the same response of the engine",
                    )
        for index, call in enumerate(self.calls):
            if call.parent is not None and (call.parent not in index_of_order or call.parent >= call.order):
                raise LineError(
                    f"calls[{index}].parent",
                    f"must be the order of an earlier call of this rollout, found {call.parent} in the call of order "
                    f"{call.order} (orders: {sorted(index_of_order)[:12]}); name the call it continues, or null for "
                    f"the previous one",
                )


class RowLine(Line):
    kind: Literal["row"]
    row_id: Text
    rollout_id: Text
    group_id: Text
    reward: float
    advantage: float | None = None
    token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    loss_mask: tuple[Mask, ...]
    logprobs: tuple[LogProb, ...]
    routed_experts: ExpertsObject | None = None

    def check(self) -> None:
        super().check()
        _require_one_each("loss_mask", len(self.loss_mask), "token_ids", len(self.token_ids))
        _require_one_each("logprobs", len(self.logprobs), "token_ids", len(self.token_ids))
        if self.loss_mask[0] != 0:
            raise LineError(
                "loss_mask[0]", "must be 0, found 1; no token comes before the first one: put a context token in front"
            )
        if self.routed_experts is not None:
            _require_experts("routed_experts", self.routed_experts)
            _require_one_each("routed_experts.shape[0]", self.routed_experts.shape[0], "token_ids", len(self.token_ids))


class LengthsLine(Line):
    kind: Literal["lengths"]
    row_id: Text
    rollout_id: Text
    group_id: Text
    num_tokens: Annotated[int, Field(ge=1)]
    num_trained_tokens: Natural

    def check(self) -> None:
        super().check()
        if self.num_trained_tokens >= self.num_tokens:
            raise LineError(
                "num_trained_tokens",
                f"must be below num_tokens ({self.num_tokens}), found {self.num_trained_tokens}; "
                f"a row's first token is never trained",
            )


def _require_one_each(location: str, num_values: int, reference: str, num_references: int) -> None:
    if num_values != num_references:
        raise LineError(
            location,
            f"must have one value for each of the {num_references} {reference}, found {num_values} values; "
            f"take both from the same response of the engine",
        )


def _require_experts(location: str, found: ExpertsObject) -> None:
    try:
        found.to_experts()
    except RowError as error:
        raise LineError(location, str(error)) from None
    except ValueError as error:
        raise LineError(
            f"{location}.base64", f"must be base64 of little-endian int16, found {error}; write the array's bytes"
        ) from None


def _require_writable(value: Any, *location: str) -> None:
    """Free-form JSON passes the parser with NaN in it and more, so it is looked for by hand."""
    found = find_unwritable(value, location)
    if found is not None:
        place, problem = found
        raise LineError(dotted(place), f"{problem}; correct what produced it, such values have no place in a file")


# ---------------------------------------------------------------------------------------------------- messages

_FIXES = {
    "finite_number": "correct what produced it, NaN and infinities have no place in a file",
    "json_invalid": "write each object on a line of its own",
    "model_type": "write one object per line",
}
_MISSING = {
    "reward": ': a number, null only with status "failed"',
    "format_version": f": {FORMAT_VERSION} for this format",
    "sampling": ": an object with at least `temperature`",
    "weight_version": ": optimizer steps behind the weights that sampled the call, 0 when they never changed",
}


def _explained(error: ValidationError) -> LineError:
    """The finding a reader should hear first: about the format version, then the kind, then in order."""
    urgency = {"format_version": 0, "kind": 1}
    findings = error.errors(include_url=False)
    finding = min(findings, key=lambda item: urgency.get(str(item["loc"][0]) if item["loc"] else "", 2))
    kind, location, found = finding["type"], dotted(finding["loc"]), shown(finding["input"])
    name = str(finding["loc"][-1]) if finding["loc"] else ""
    if kind == "missing":
        return LineError(location, f"is required, found no such field; add it{_MISSING.get(name, '')}")
    if name == "format_version" and kind == "less_than_equal":
        return LineError(
            location,
            f"must be at most {FORMAT_VERSION}, the newest format this evenstep knows, found {found}; "
            f"read the file with the evenstep that wrote it, or a newer one",
        )
    fix = _FIXES.get(kind, "correct the value where the file is made")
    if name == "kind":
        fix = "each kind has its reader: read_rollouts, read_rows, read_lengths"
    elif "logprobs" in finding["loc"] and kind != "finite_number":
        fix = "store natural logarithms of probabilities, one number for each sampled token"
    return LineError(location, f"{promise(finding)}, found {found}; {fix}")
