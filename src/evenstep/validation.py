"""Words for what pydantic found wrong, shared by data files and configuration.

pydantic checks outside input at the edges; its findings become one sentence each: what the field must be, and what
was found there.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import ErrorDetails

__all__ = ["MAX_DEPTH", "dotted", "find_unwritable", "nearest", "promise", "shown", "whole_text"]

MAX_DEPTH = 196  # of free-form JSON: what reads a line takes 200 levels, of which the line itself has up to four

_PROMISES = {
    "missing": "is required",
    "extra_forbidden": "is unknown",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a text",
    "string_too_short": "must be a text that is not empty",
    "finite_number": "must be a finite number",
    "tuple_type": "must be an array",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "invalid-json-value": "must be a JSON value",
}
_COMPARISONS = {"greater_than": ("gt", ">"), "greater_than_equal": ("ge", "≥"), "less_than": ("lt", "<")}
_COMPARISONS |= {"less_than_equal": ("le", "≤")}


def promise(error: ErrorDetails) -> str:
    """What the field of a pydantic finding must be, as the end of a sentence."""
    kind = error["type"]
    context = error.get("ctx", {})
    if kind in _COMPARISONS:
        name, sign = _COMPARISONS[kind]
        return f"must be {sign} {context[name]}"
    if kind == "literal_error":
        return f"must be {context['expected']}"
    if kind == "json_invalid":
        return f"must be one complete JSON object ({context['error']})"
    return _PROMISES.get(kind, error["msg"][:1].lower() + error["msg"][1:])


def shown(value: Any, *, width: int = 60) -> str:
    """A value as it stands in a message: JSON where possible, cut to ``width`` characters.

    >>> shown(None), shown("abc"), shown(float("nan"))
    ('null', '"abc"', 'NaN')
    >>> shown(list(range(100)), width=12)
    '[0, 1, 2, 3…'
    """
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} that is nested too deep to show"
    text = text.encode("utf-8", "backslashreplace").decode()  # no terminal shows half a surrogate pair
    return text if len(text) <= width else text[: width - 1] + "…"


def whole_text(text: str) -> str:
    """The text with ``?`` for each half of a surrogate pair: Python may hold one, UTF-8 has none.

    >>> whole_text("café " + chr(0xDCFF))
    'café ?'
    """
    return text.encode("utf-8", "replace").decode()


def dotted(location: Iterable[int | str]) -> str:
    """A field's place as people write it.

    >>> dotted(("calls", 0, "logprobs", 3))
    'calls[0].logprobs[3]'
    """
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The most similar of ``words``, or None when nothing is close.

    >>> nearest("max_token_per_gpu", ["max_tokens_per_gpu", "layout"])
    'max_tokens_per_gpu'
    """
    found = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return found[0] if found else None


def find_unwritable(
    value: Any, location: tuple[int | str, ...] = (), *, depth: int = 0
) -> tuple[tuple[int | str, ...], str] | None:
    """The place of the first value that a JSON file cannot give back, and what it must be; None: there is none.

    NaN and infinities, half a surrogate pair in a text or a key, and what is nested deeper than ``MAX_DEPTH``.

    >>> find_unwritable({"a": [0.5, float("nan")]})
    (('a', 1), 'must be a finite number, found NaN')
    """
    if isinstance(value, float):
        return None if math.isfinite(value) else (location, f"must be a finite number, found {shown(value)}")
    if isinstance(value, str):
        return None if whole_text(value) == value else (location, f"must be UTF-8 text, found {shown(value)}")
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return None
    if depth == MAX_DEPTH:
        return location[:4], f"must be nested at most {MAX_DEPTH} deep, found more"
    for key, item in items:
        if isinstance(key, str) and whole_text(key) != key:
            return location, f"must have keys of UTF-8 text, found {shown(key)}"
        found = find_unwritable(item, (*location, key), depth=depth + 1)
        if found is not None:
            return found
    return None
