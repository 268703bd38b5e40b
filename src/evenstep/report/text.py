"""Foreign text in a page: characters that hide or reorder become visible, nothing becomes markup."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["embedded_json", "escaped", "shortened", "significant", "visible"]

# controls but tab and line feed, invisible joiners and marks, direction changes, lone surrogates, noncharacters
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff0-\uffff"
    "\ud800-\udfff\U000e0000-\U000e0fff]"
)


def visible(text: str) -> str:
    """The text with every hidden character as its code point in brackets.

    >>> visible("a\\x00b\\u202ec")
    'a⟨U+0000⟩b⟨U+202E⟩c'
    """
    return _HIDDEN.sub(lambda found: found[0] if found[0] == "\ufffd" else f"⟨U+{ord(found[0]):04X}⟩", text)


def shortened(text: str, most: int) -> str:
    """A text of at most about ``most`` characters: its beginning and its end.

    >>> shortened("abcdefghij", 6)
    'abc … 4 characters … hij'
    """
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"


def escaped(text: object, most: int = 2000) -> str:
    """Foreign text as HTML, also inside of attributes.

    >>> escaped('<b a="1">')
    '&lt;b a=&quot;1&quot;&gt;'
    """
    return html.escape(visible(shortened(str(text), most)))


def significant(value: Any) -> Any:
    """A number to seven digits as JSON can hold it: None for NaN and infinities; whole numbers as they are.

    >>> significant(0.123456789), significant(float("nan")), significant(12345678901), significant(True)
    (0.1234568, None, 12345678901, True)
    """
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value


def embedded_json(data: Mapping[str, Any]) -> str:
    """JSON for a ``<script>`` element: ASCII alone, and nothing that could end the element or begin a comment.

    >>> embedded_json({"a": "</script><!--"})
    '{"a":"\\\\u003c/script\\\\u003e\\\\u003c!--"}'
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
