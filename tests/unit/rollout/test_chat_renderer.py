"""Behaviours locked here:

1. Head and interstitials put together are exactly what the template makes of the whole conversation, for templates of
   several kinds (ChatML with a default system message, header tokens, no special tokens at all, one token per role).
2. An output that ends with the end-of-turn id does not get a second one; one that was cut gets it.
3. The ids that end an answer are the eos id and the template's end-of-turn id.
4. A template that hides an assistant's answer is refused.
"""

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from evenstep.errors import ConfigError
from evenstep.rollout.chat import ChatRenderer

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<S>system\nBe kind.<E>\n{% endif %}"
    "{% for m in messages %}<S>{{ m['role'] }}\n{{ m['content'] | trim }}<E>\n{% endfor %}"
    "{% if add_generation_prompt %}<S>assistant\n{% endif %}"
)
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<S>{{ m['role'] }}<H>\n\n{{ m['content'] }}<E>{% endfor %}"
    "{% if add_generation_prompt %}<S>assistant<H>\n\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
STRICT = (  # as several models do: roles must alternate
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<S>{{ m['content'] }}<E>{% endfor %}"
    "{% if add_generation_prompt %}<S>{% endif %}"
)
SECRETIVE = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"


def tokenizer_of(template):
    special = ["<X>", "<S>", "<E>", "<H>", "<B>"]
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    backend = Tokenizer(models.WordLevel({t: i for i, t in enumerate(special + characters)}, unk_token="<X>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<X>", eos_token="<X>", bos_token="<B>",
        extra_special_tokens=["<S>", "<E>", "<H>"], chat_template=template,
    )  # fmt: skip


def whole(tokenizer, messages):
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("template", [CHATML, HEADERS, PLAIN, STRICT], ids=["chatml", "headers", "plain", "strict"])
@pytest.mark.parametrize("is_closed", [True, False], ids=["stopped", "cut"])
def test_pieces_make_the_whole_conversation(template, is_closed):
    tokenizer = tokenizer_of(template)
    renderer = ChatRenderer(tokenizer)
    turn_end = renderer.interstitial("x", after=())[:1]
    said = ["first question", "seven", "and a\nsecond one", "8", "third?"]
    ids = renderer.head(said[0])
    for answer, message in zip(said[1::2], said[2::2], strict=True):
        output = tuple(tokenizer.encode(answer, add_special_tokens=False)) + (turn_end if is_closed else ())
        ids += output + renderer.interstitial(message, after=output)
    roles = ["user", "assistant", "user", "assistant", "user"]
    messages = [{"role": r, "content": c} for r, c in zip(roles, said, strict=True)]
    assert ids == whole(tokenizer, messages)


def test_an_answer_ends_with_eos_or_with_the_end_of_turn():
    tokenizer = tokenizer_of(CHATML)
    assert ChatRenderer(tokenizer).stop_token_ids == {
        tokenizer.convert_tokens_to_ids("<E>"),
        tokenizer.convert_tokens_to_ids("<X>"),
    }


def test_only_the_end_of_turn_itself_is_not_repeated():
    tokenizer = tokenizer_of(CHATML)
    renderer = ChatRenderer(tokenizer)
    end, eos = (tokenizer.convert_tokens_to_ids(token) for token in ("<E>", "<X>"))
    full = renderer.interstitial("hi", after=())
    assert full[0] == end
    assert renderer.interstitial("hi", after=(40, end)) == full[1:]
    assert renderer.interstitial("hi", after=(40, eos)) == full


def test_text_leaves_special_tokens_out():
    tokenizer = tokenizer_of(CHATML)
    ids = tokenizer.encode("a 7<E>", add_special_tokens=False)
    assert ChatRenderer(tokenizer).text(ids) == "a 7"


def test_a_template_that_hides_answers_is_refused():
    with pytest.raises(ConfigError, match="must show an assistant's answer"):
        ChatRenderer(tokenizer_of(SECRETIVE))
