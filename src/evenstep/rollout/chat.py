"""From messages to token ids and back, for any tokenizer with a chat template, without ever re-tokenising an output."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

from evenstep.errors import ConfigError

__all__ = ["ChatRenderer", "ChatTokenizer"]

_SENTINEL = "evenstepturn"  # stands for an earlier answer; lower-case letters survive every template


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    @property
    def eos_token_id(self) -> Any: ...

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> Any: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any: ...


class ChatRenderer:
    """Token ids of a conversation's pieces.

    A conversation in ids is head + output + interstitial + output + …: the head is a rendered first message, outputs
    are the engine's ids as they are, and an interstitial is what the template puts between an answer and the next one.
    It is found by rendering the new message after a dummy answer and cutting the text behind that answer, so it
    depends on no earlier text and works with any template whose turns are independent.

    Raises:
        ConfigError: the tokenizer has no chat template, or its template does not show an assistant's answer.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        # The rollouts of a group read the same pages, so most renderings are asked for again.
        self.head = lru_cache(maxsize=4096)(self._head)
        self._ids_after_answer = lru_cache(maxsize=4096)(self._rendered_after_answer)
        turn_end_ids = self._ids_after_answer("x")[:1]
        eos_ids = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        # The id that ends an assistant's turn: the engine stops there, and it is not repeated after an output with it.
        self._stop_token_ids = frozenset(eos_ids + turn_end_ids)
        self._turn_end_ids = turn_end_ids

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Ids that end an answer: the tokenizer's eos id and the first id after an answer in the template."""
        return self._stop_token_ids

    def interstitial(self, content: str, *, after: Sequence[int]) -> tuple[int, ...]:
        """Ids between the output ``after`` and the model's next answer: end of turn, user message, start of answer."""
        return self._unless_closed(self._ids_after_answer(content), after)

    def after_output(self, text: str, *, after: Sequence[int]) -> tuple[int, ...]:
        """Ids of a text that a template writes behind the output ``after``, whose end of turn is not repeated."""
        return self._unless_closed(self.encoded(text), after)

    def text(self, output_ids: Sequence[int]) -> str:
        """What an output says, without special tokens."""
        return self._tokenizer.decode(list(output_ids), skip_special_tokens=True)

    def encoded(self, text: str) -> tuple[int, ...]:
        """Ids of a text in which a template has put its special tokens."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _unless_closed(self, ids: tuple[int, ...], after: Sequence[int]) -> tuple[int, ...]:
        is_closed = bool(after) and tuple(after[-1:]) == self._turn_end_ids
        return ids[1:] if is_closed and ids[:1] == self._turn_end_ids else ids

    def _head(self, content: str) -> tuple[int, ...]:
        """Ids of a conversation that begins with one user message, up to where the model answers."""
        return self.encoded(self._rendered([{"role": "user", "content": content}]))

    def _rendered_after_answer(self, content: str) -> tuple[int, ...]:
        text = self._rendered(
            [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": _SENTINEL},
                {"role": "user", "content": content},
            ]
        )
        _, found, after = text.partition(_SENTINEL)
        if not found:
            raise ConfigError(
                f"a chat template must show an assistant's answer as it is, found the rendering {text!r} of a "
                f"conversation with the answer {_SENTINEL!r}; use another chat template"
            )
        return self.encoded(after)

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
