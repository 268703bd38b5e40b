"""Dumps of prompts and completions: verl's JSONL, TRL's completion tables; lengths from text are approximate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from evenstep.files.lines import LineError
from evenstep.imports.nemo import texts_of
from evenstep.imports.rows import FoundRow
from evenstep.imports.text_lines import as_count, as_ids, optional_text, text_tokens
from evenstep.validation import shown

__all__ = ["completion_rows", "looks_like_completions", "looks_like_verl", "verl_rows"]

ID_COLUMNS = (("prompt_ids", "completion_ids"), ("prompt_token_ids", "completion_token_ids"))


def looks_like_verl(values: Mapping[str, Any]) -> bool:
    """Whether an object has a prompt and an answer by the names that verl dumps."""
    return isinstance(values.get("input"), str) and isinstance(values.get("output"), str)


def verl_rows(values: Mapping[str, Any], bytes_per_token: float) -> Iterator[FoundRow]:
    """One row: ``prompt_length`` + ``response_length`` where they were dumped too, else about as long as its text."""
    lengths = ("prompt_length", "response_length")
    is_exact = all(name in values for name in lengths)
    for name in ("input", "output"):
        if not isinstance(values.get(name), str):
            raise LineError(name, f"must be a text, found {shown(values.get(name))}; dump the decoded rollout")
    length = (
        sum(as_count(values, name) for name in lengths)
        if is_exact
        else text_tokens([values["input"], values["output"]], bytes_per_token)
    )
    yield FoundRow(
        length=length,
        group_id=optional_text(values, "uid"),
        rollout_id=optional_text(values, "request_id"),
        step=values["step"] if type(values.get("step")) is int else None,
        num_trained=as_count(values, "response_length") if is_exact else None,
        is_approximate=not is_exact,
    )


def looks_like_completions(values: Mapping[str, Any]) -> bool:
    """Whether an object or table has prompts and completions, as text, messages or ids."""
    return ("prompt" in values and "completion" in values) or any(
        all(name in values for name in pair) for pair in ID_COLUMNS
    )


def completion_rows(values: Mapping[str, Any], bytes_per_token: float) -> Iterator[FoundRow]:
    """One row: prompt and completion, counted where their ids are there, else about as long as their text."""
    step = values.get("step")
    found: dict[str, Any] = {
        "group_id": optional_text(values, "group_id", "prompt_id"),
        "rollout_id": optional_text(values, "rollout_id"),
        "step": int(step) if type(step) is int or (type(step) is float and step.is_integer()) else None,
    }
    pair = next((pair for pair in ID_COLUMNS if all(name in values for name in pair)), None)
    if pair is not None:
        prompt_ids, completion_ids = (as_ids(values, name) for name in pair)
        token_ids = [*prompt_ids, *completion_ids]
        yield FoundRow(length=len(token_ids), num_trained=len(completion_ids), token_ids=token_ids, **found)
        return
    for name in ("prompt", "completion"):
        if not isinstance(values.get(name), str | list):
            raise LineError(name, f"must be a text or messages, found {shown(values.get(name))}; log the completion")
    texts = [*texts_of(values["prompt"]), *texts_of(values["completion"])]
    yield FoundRow(length=text_tokens(texts, bytes_per_token), is_approximate=True, **found)
