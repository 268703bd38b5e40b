"""From messages to token ids and back, for any tokenizer with a chat template, without ever re-tokenising an output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, cast

import numpy as np

from evenstep.errors import ConfigError
from evenstep.media import Media, VisionSpec
from evenstep.rollout.environment import Observation

__all__ = ["STAND_IN", "ChatRenderer", "ChatTokenizer", "Prompt"]

_MAX_OBSERVATIONS, _MAX_PATCH_BYTES = 1024, 1 << 28  # whose patches are kept: a picture of a megapixel has 24 MB
STAND_IN = "evenstepturn"  # for an earlier answer; lower-case letters survive every template
_SEAM = "\ufdd0"  # where a text is cut before it is tokenised; no character, and in no text


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a model is given."""

    ids: tuple[int, ...]
    media: tuple[Media, ...] = ()  # images, each on its placeholders

    def continues(self, ids: tuple[int, ...], media: tuple[Media, ...]) -> bool:
        """Whether it only appends to these ids, with the same images on them."""
        return self.ids[: len(ids)] == ids and tuple(image for image in self.media if image.start < len(ids)) == media


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
    depends on no earlier text and works with any template whose turns are independent. An image is three special tokens
    in the text of its message (start, placeholder, end), whose placeholder becomes as many as the image has tokens.
    Whoever else writes the name of a placeholder, the policy in its note or a program in its message, has written text:
    it is tokenised in two halves and never stands for an image.

    Args:
        tokenizer: with a chat template.
        vision: what the model makes of images; None: it sees none.
        images_problem: why this run can show none to a model that sees them, and the way out; None: it can.

    Raises:
        ConfigError: the tokenizer has no chat template, its template does not show an assistant's answer, or it does
            not know the tokens of an image.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, vision: VisionSpec | None = None, *, images_problem: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._vision = vision
        self._images_problem = images_problem
        self._image_text = "" if vision is None else self._text_of_image(vision)
        self._placeholder_texts = () if vision is None else self._texts_of_placeholders(vision)
        # by identity, so that each observation is cut into patches once
        self._placed: dict[int, tuple[Observation, tuple[Media, ...]]] = {}
        self._num_patch_bytes = 0
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

    def placeholder_among(self, ids: Sequence[int]) -> int | None:
        """The first id that stands for an image or begins a video; None where there is none, or the model sees none."""
        return None if self._vision is None else self._vision.placeholder_among(ids)

    def literal(self, text: str) -> str:
        """The same text for a template, in which the name of a placeholder stands for itself."""
        for name in self._placeholder_texts:
            text = text.replace(name, f"{name[: len(name) // 2]}{_SEAM}{name[len(name) // 2 :]}")
        return text

    def shown(self, observation: str) -> str:
        """An observation's text, with the tokens of its images in front.

        Raises:
            ConfigError: it has images, and the model sees none or the run can show none.
        """
        if not isinstance(observation, Observation) or not observation.images:
            return self.literal(observation)
        if self._vision is None:
            raise ConfigError(
                f"the environment shows {len(observation.images)} images, and the model sees none; use a vision model "
                f"whose type evenstep knows (docs/images.md), or an environment of text"
            )
        if self._images_problem is not None:
            raise ConfigError(f"the environment shows {len(observation.images)} images, and {self._images_problem}")
        return self._image_text * len(observation.images) + self.literal(observation)

    def prompt(self, ids: Sequence[int], observations: Sequence[str]) -> Prompt:
        """A prompt in which each image of its observations, in order, stands on as many placeholders as it has tokens.

        Raises:
            ValueError: an image that is none or has sides that the model cannot cut up, or other placeholders among
                the ids.
        """
        if self._vision is None:
            return Prompt(ids=tuple(ids))
        images = [image for each in observations if isinstance(each, Observation) for image in self._media_of(each)]
        places = np.flatnonzero(np.asarray(ids) == self._vision.image_token_id).tolist()
        if len(places) != len(images):
            raise ValueError(
                f"a prompt holds one placeholder (token {self._vision.image_token_id}) for each image, found "
                f"{len(places)} for {len(images)}; make texts with shown() or literal(), and keep outputs without one"
            )
        placed: list[int] = []
        media: list[Media] = []
        end = 0
        for place, image in zip(places, images, strict=True):
            placed += ids[end:place]
            media.append(image.moved(len(placed)))
            placed += [self._vision.image_token_id] * image.num_tokens
            end = place + 1
        return Prompt(ids=(*placed, *ids[end:]), media=tuple(media))

    def _media_of(self, observation: Observation) -> tuple[Media, ...]:
        assert self._vision is not None
        found = self._placed.get(id(observation))
        if found is None:
            found = observation, tuple(self._vision.media(image, start=0) for image in observation.images)
            num_bytes = sum(cast(Any, image.pixels).nbytes for image in found[1])
            if len(self._placed) >= _MAX_OBSERVATIONS or self._num_patch_bytes + num_bytes > _MAX_PATCH_BYTES:
                self._placed.clear()
                self._num_patch_bytes = 0
            self._num_patch_bytes += num_bytes
            self._placed[id(observation)] = found
        return found[1]

    def _text_of_image(self, vision: VisionSpec) -> str:
        ids = (vision.start_token_id, vision.image_token_id, vision.end_token_id)
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        if self.encoded(text) != ids:
            raise ConfigError(
                f"a vision model's tokenizer must know the tokens around an image, found {ids} as {text!r} and that as "
                f"{self.encoded(text)}; use the tokenizer that belongs to the model"
            )
        return text

    def _texts_of_placeholders(self, vision: VisionSpec) -> tuple[str, ...]:
        ids = (vision.image_token_id, vision.video_token_id)
        texts = {i: self._tokenizer.decode([i], skip_special_tokens=False) for i in ids if i is not None}
        return tuple(text for i, text in texts.items() if self.encoded(text) == (i,))

    def text(self, output_ids: Sequence[int]) -> str:
        """What an output says, without special tokens."""
        return self._tokenizer.decode(list(output_ids), skip_special_tokens=True)

    def encoded(self, text: str) -> tuple[int, ...]:
        """Ids of a text in which a template has put its special tokens; what is `literal` in it has none."""
        parts = [text] if self._vision is None else text.split(_SEAM)
        return tuple(token for part in parts for token in self._tokenizer.encode(part, add_special_tokens=False))

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
                {"role": "assistant", "content": STAND_IN},
                {"role": "user", "content": content},
            ]
        )
        _, found, after = text.partition(STAND_IN)
        if not found:
            raise ConfigError(
                f"a chat template must show an assistant's answer as it is, found the rendering {text!r} of a "
                f"conversation with the answer {STAND_IN!r}; use another chat template"
            )
        return self.encoded(after)

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
