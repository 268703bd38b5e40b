"""Dumps of NVIDIA's trainers: NeMo-RL's ``train_data_step*.jsonl`` and the rollouts that NeMo-Gym collects."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evenstep.errors import SegmentationError
from evenstep.files.lines import LineError
from evenstep.imports.rows import FoundRow
from evenstep.imports.text_lines import as_count, as_ids, as_mask, text_tokens
from evenstep.rollout.segments import segments_of
from evenstep.types import Call, Rollout
from evenstep.validation import shown

__all__ = ["looks_like_nemo_gym", "looks_like_nemo_rl", "nemo_gym_rows", "nemo_rl_rows"]

_STEP_IN_NAME = re.compile(r"train_data_step(\d+)")


def looks_like_nemo_rl(values: Mapping[str, Any]) -> bool:
    """Whether an object has a row's length beside what NeMo-RL logs with it."""
    logged = ("content", "rewards", "generation_logprobs", "prev_logprobs", "token_loss_mask", "advantages")
    return "input_lengths" in values and any(name in values for name in logged)


def nemo_rl_rows(values: Mapping[str, Any], file_name: str) -> Iterator[FoundRow]:
    """One row: ``input_lengths`` counts its tokens; ``token_ids`` and masks are padded beyond them."""
    length = as_count(values, "input_lengths", least=1)
    token_ids = as_ids(values, "token_ids") if "token_ids" in values else None
    if token_ids is not None and len(token_ids) < length:
        raise LineError(
            "token_ids", f"must have at least the {length} tokens of input_lengths, found {len(token_ids)}; take both "
            f"from one row"
        )  # fmt: skip
    num_trained = None
    mask = values.get("token_loss_mask")
    if isinstance(mask, list):
        num_trained = as_mask({"token_loss_mask": mask[:length]}, "token_loss_mask", length)
    found = _STEP_IN_NAME.search(file_name)
    step = int(found.group(1)) if found else None
    index = values.get("idx")
    yield FoundRow(
        length=length,
        rollout_id=None if index is None else f"{'' if step is None else f'step {step}, '}{index}",
        step=step,
        num_trained=num_trained,
        token_ids=None if token_ids is None else token_ids[:length],
    )


def looks_like_nemo_gym(values: Mapping[str, Any]) -> bool:
    """Whether an object has a request and what came of it."""
    return "responses_create_params" in values and ("response" in values or "output" in values)


def nemo_gym_rows(values: Mapping[str, Any], bytes_per_token: float) -> Iterator[FoundRow]:
    """A rollout's rows: its model calls by the prefix rule where they carry token ids, else one row by its text."""
    response = values.get("response")
    holder: Mapping[str, Any] = response if isinstance(response, Mapping) else values
    where = "response.output" if holder is response else "output"
    items = holder.get("output")
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise LineError(where, f"must be an array of objects, found {shown(items)}; write the whole response")
    group, index = values.get("_ng_task_index"), values.get("_ng_rollout_index")
    group_id = None if group is None else f"task {group}"
    rollout_id = None if group is None or index is None else f"task {group}, {index}"
    calls: list[Call] = []
    for at, item in enumerate(items):
        if not item.get("generation_token_ids"):
            continue
        try:
            output_ids = as_ids(item, "generation_token_ids")
            prompt_ids = as_ids(item, "prompt_token_ids")
        except LineError as problem:
            raise LineError(f"{where}[{at}].{problem.location}", problem.message) from None
        if not prompt_ids:
            raise LineError(
                f"{where}[{at}].prompt_token_ids", "must hold the prompt's token ids, found none; keep them"
            )
        calls.append(
            Call(
                order=len(calls),
                prompt_ids=tuple(prompt_ids),
                output_ids=tuple(output_ids),
                logprobs=(0.0,) * len(output_ids),
            )
        )
    if calls:
        yield from _rows_of_calls(calls, rollout_id, group_id)
        return
    parameters = values.get("responses_create_params")
    request = parameters.get("input") if isinstance(parameters, Mapping) else None
    texts = [*texts_of(request), *texts_of(items)]
    yield FoundRow(
        length=text_tokens(texts, bytes_per_token), rollout_id=rollout_id, group_id=group_id, is_approximate=True
    )


def _rows_of_calls(calls: Sequence[Call], rollout_id: str | None, group_id: str | None) -> Iterator[FoundRow]:
    rollout = Rollout(rollout_id="", group_id="", prompt_id="", reward=0.0, calls=tuple(calls))
    try:
        segments = segments_of(rollout, on_undeclared="segment")
    except SegmentationError as error:
        raise LineError("", str(error)) from None
    for segment in segments:
        yield FoundRow(
            length=segment.num_tokens,
            rollout_id=rollout_id,
            group_id=group_id,
            num_trained=segment.num_trained_tokens,
            token_ids=segment.token_ids,
        )


def texts_of(value: Any) -> Iterator[str]:
    """Every text that a model reads or writes in messages: their contents, arguments and outputs.

    >>> list(texts_of([{"role": "user", "content": "2 + 2?"}, {"type": "message", "content": [{"text": "4"}]}]))
    ['2 + 2?', '4']
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            yield from texts_of(item)
    elif isinstance(value, Mapping):
        for name in (
            "content",
            "reasoning_content",
            "text",
            "arguments",
            "output",
            "summary",
            "tool_calls",
            "function",
        ):
            if name in value:
                yield from texts_of(value[name])
