"""Token ids as text, without torch: through the run's tokenizer.json where it is at hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from evenstep.errors import ConfigError
from evenstep.model_files import model_folder

__all__ = ["Decoder", "IdsAsText", "TokenizerText", "decoder_for"]

CONTEXT = 8  # tokens decoded in front of a piece, so that characters and blanks at its border come out as in the whole
BROKEN = "\ufffd"  # part of a character


class Decoder(Protocol):
    """Ids to text; ``source`` says how, for the reader of the page."""

    @property
    def source(self) -> str: ...

    def text(self, token_ids: Sequence[int], start: int, end: int) -> str: ...


class IdsAsText:
    """The ids themselves.

    >>> IdsAsText("no tokenizer").text([5, 6, 7], 1, 3)
    '6 7 '
    """

    def __init__(self, why: str) -> None:
        self.source = f"token ids, because {why}"

    def text(self, token_ids: Sequence[int], start: int, end: int) -> str:
        return "".join(f"{token} " for token in token_ids[start:end])


class TokenizerText:
    """Text by a ``tokenizers.Tokenizer``, special tokens included."""

    def __init__(self, tokenizer: Any, source: str) -> None:
        self._tokenizer = tokenizer
        self.source = source

    def text(self, token_ids: Sequence[int], start: int, end: int) -> str:
        """What tokens ``start`` to ``end`` add to the text before them."""
        first = max(0, start - CONTEXT)
        before, upto = self._decoded(token_ids[first:start]), self._decoded(token_ids[first:end])
        # a character whose bytes lie on both sides of a border is shown where it ends
        before = before.rstrip(BROKEN)
        if end < len(token_ids):
            upto = upto.rstrip(BROKEN)
        return upto[len(before) :] if upto.startswith(before) else self._decoded(token_ids[start:end])

    def _decoded(self, token_ids: Sequence[int]) -> str:
        try:
            return self._tokenizer.decode(list(token_ids), skip_special_tokens=False) if token_ids else ""
        except OverflowError:  # an id that no vocabulary has
            return " ".join(map(str, token_ids))


def decoder_for(run_folder: Path, model_path: object) -> Decoder:
    """The tokenizer that the run exported, else the one of the model that it began with, else ids."""
    try:
        import tokenizers
    except ImportError:
        return IdsAsText("the package tokenizers is not installed (it comes with evenstep[train])")
    folders = [run_folder / "model"]
    why = "the configuration names no model"
    if isinstance(model_path, str):
        try:
            found = model_folder(model_path)
            folders += [] if found is None else [found]
            why = f"{model_path} has no tokenizer.json"
        except (ConfigError, OSError) as error:
            why = str(error)
    for folder in folders:
        path = folder / "tokenizer.json"
        if not path.is_file():
            continue
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 -- the library raises bare exceptions; without text the ids are shown
            why = f"{path} cannot be read ({error})"
            continue
        return TokenizerText(tokenizer, f"text decoded by {path}")
    return IdsAsText(why)
