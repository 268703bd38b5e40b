"""Images from an environment to rows. What is locked here:

1. The engine's log-probs with images equal the model's own forward over prompt and output, one row at a time, in
   batches of text, one image and several; another image changes what is said.
2. An observation's images stand before its text, each on as many placeholders as it has tokens; prompts append, so a
   rollout without compaction is one segment with all its images.
3. Compaction drops images with their turns: the next segment has those that are left, or none.
4. An output with a placeholder truncates the rollout, a fork's and a note's too, and no later prompt holds it: what is
   left can be trained. Images without a model that sees them end the run; what is no image fails its rollout.
5. The name of a placeholder in any text, a note or an observation that repeats what the policy said, stays that text:
   the rollout keeps its vote.
6. Engines refuse images that are not their model's; servers and programs refuse images, and a run that can show none
   says so at the first one.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tiny_vision as tiny
from evenstep.errors import ConfigError, EngineError, RowError
from evenstep.preflight import check_model
from evenstep.rollout.agent import AgentOptions, RolloutIdentity, run_rollout
from evenstep.rollout.chat import ChatRenderer, Prompt
from evenstep.rollout.compaction import NoCompaction, Recency, Summary
from evenstep.rollout.engine import Completion, Request
from evenstep.rollout.environment import Observation, Score, Start
from evenstep.rollout.in_process import InProcessEngine
from evenstep.rollout.segments import rows_of, segments_of
from evenstep.rollout.server import ServerEngine
from evenstep.train.collecting import _images_problem
from evenstep.train.models import load_vision
from evenstep.train.vision import spec_of
from evenstep.types import Rollout, Row, Sampling
from tiny_models import tiny_model
from vision_text import Spelling

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from make_vision_policy import IMAGE, TOKENS, make_model, make_tokenizer

PAD = TOKENS.index(IMAGE[1])


def request(row: Row, *, temperature: float = 1.0, seed: int = 0, key: int = 0) -> Request:
    sampling = Sampling(temperature=temperature, seed=seed, max_tokens=6)
    return Request(prompt_ids=tuple(row.token_ids.tolist()), sampling=sampling, rollout_key=(key,), media=row.media)


def engine_of(model: Any) -> InProcessEngine:
    return InProcessEngine(model, eos_token_ids=[0], max_context_tokens=80)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_log_probs_are_those_of_a_one_row_forward(family: str) -> None:
    model = tiny.tiny_vision_model(family, dtype=torch.float32, scale=0.2)
    prompts = [*tiny.mixed_rows(), tiny.row_of("ends with an image", 4, tiny.picture(5, height=8, width=4), trained=0)]
    asked = [request(row, temperature=float(i % 3 != 2), seed=i, key=i) for i, row in enumerate(prompts)]
    for one, row, completion in zip(asked, prompts, engine_of(model).generate_batch(asked), strict=True):
        ids = [*one.prompt_ids, *completion.output_ids]
        mask = [0] * len(one.prompt_ids) + [1] * len(completion.output_ids)
        whole = Row(row_id=0, rollout_id=0, group_id=0, token_ids=ids, loss_mask=mask, media=row.media)
        with torch.no_grad():
            if tiny.IMAGE in completion.output_ids:  # the model's own code would want an image for it
                continue
            expected = tiny.own_logprobs(model, whole)[len(one.prompt_ids) - 1 :]
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-5), row.row_id


def test_an_image_changes_what_is_said() -> None:
    model = tiny.tiny_vision_model(dtype=torch.float32)
    rows = [tiny.row_of("r", 1, tiny.picture(i), 2, trained=0) for i in range(6)]
    found = engine_of(model).generate_batch([request(row, temperature=0.0) for row in rows])
    assert len({completion.output_ids for completion in found}) > 1


def test_images_of_another_model_are_refused() -> None:
    row = tiny.row_of("r", 1, tiny.picture(1), 2, trained=0)
    wrong = tiny.row_of("r", 1, tiny.picture(1, width=8), 2, trained=0)
    seeing = engine_of(tiny.tiny_vision_model(dtype=torch.float32))
    blind = engine_of(tiny_model("qwen3", dtype=torch.float32))
    with pytest.raises(EngineError, match=r"the model sees no images, found 1"):
        blind.generate_batch([request(row)])
    for media, message in (
        ((wrong.media[0],), "must stand on 2 equal"),
        ((row.media[0].moved(1),), "found 21 at token 1"),
    ):
        asked = Request(prompt_ids=(1, tiny.START, tiny.IMAGE, 5), media=media)
        with pytest.raises(EngineError, match=message):
            seeing.generate_batch([asked])


def test_servers_refuse_images() -> None:
    asked = request(tiny.row_of("r", 1, tiny.picture(1), 2, trained=0))
    with pytest.raises(EngineError, match="servers are asked with token ids alone"):
        asyncio.run(ServerEngine.generate(object.__new__(ServerEngine), asked))


class Album:
    """Shows what it is given, one thing a turn."""

    def __init__(self, *shown: str) -> None:
        self._shown = list(shown)

    async def reset(self) -> Start:
        return Start(task="look", observation=self._shown.pop(0))

    async def step(self, action: str) -> str | None:
        return self._shown.pop(0) if self._shown else None

    async def score(self, episode: Any) -> Score:
        return Score(reward=1.0)


class Says:
    """Answers "a" and the end of a turn, or ids that it is given."""

    max_context_tokens, weight_version = 1000, 0

    def __init__(self, *ids: int) -> None:
        self._ids = ids or (TOKENS.index("a"), TOKENS.index("<|end|>"))
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        logprobs = (-0.5,) * len(self._ids)
        return Completion(output_ids=self._ids, logprobs=logprobs, finish_reason="stop", weight_version=0)


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return ChatRenderer(make_tokenizer(), spec_of(make_model(0)))


def play(renderer: ChatRenderer, album: Album, engine: Any = None, compaction: Any = None, **options: Any) -> Rollout:
    identity = RolloutIdentity(rollout_id="r", group_id="g", prompt_id="p", key=(0,), seed_of_call=lambda order: order)
    return asyncio.run(
        run_rollout(
            identity=identity,
            environment=album,  # type: ignore[arg-type]
            engine=engine or Says(),
            renderer=renderer,
            compaction=compaction or NoCompaction(),
            options=AgentOptions(**{"max_context_tokens": 400, "max_tokens_per_call": 4} | options),
        )
    )


def colour(value: int, height: int = 8, width: int = 8) -> np.ndarray:
    return np.full((height, width, 3), value, dtype=np.uint8)


def test_images_stand_before_their_text(renderer: ChatRenderer) -> None:
    engine = Says()
    shown = [Observation("what?", images=[colour(1, width=16), colour(2)]), "no image", Observation(images=[colour(3)])]
    rollout = play(renderer, Album(*shown), engine)
    assert (rollout.status, rollout.status_reason) == ("ok", None)
    text = make_tokenizer().decode(list(engine.requests[-1].prompt_ids))
    start, pad, end = IMAGE[:3]
    assert text == (
        f"<|user|>look\n{start}{pad}{pad}{end}{start}{pad}{end}what?<|end|><|assistant|>a<|end|>"
        f"<|user|>no image<|end|><|assistant|>a<|end|><|user|>{start}{pad}{end}<|end|><|assistant|>"
    )
    assert [len(call.media) for call in rollout.calls] == [2, 2, 3]
    assert [asked.media for asked in engine.requests] == [call.media for call in rollout.calls]
    (row,) = rows_of([rollout])
    assert [image.num_tokens for image in row.media] == [2, 1, 1]
    assert [float(image.pixels[0, 0]) * 255 for image in row.media] == pytest.approx([1, 2, 3])  # type: ignore[index]
    for image in row.media:
        assert set(row.token_ids[image.start : image.stop].tolist()) == {PAD}


def test_an_environment_may_draw_into_its_array_again(renderer: ChatRenderer) -> None:
    canvas = colour(1)
    seen = Observation(images=[canvas])
    canvas[:] = 9
    (row,) = rows_of([play(renderer, Album(seen))])
    assert float(row.media[0].pixels[0, 0]) * 255 == pytest.approx(1)  # type: ignore[index]


def test_patches_of_few_observations_are_kept(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [Observation("?", images=[np.full((16, 16, 3), i, dtype=np.uint8)]) for i in range(6)]
    ids = (1, PAD, 2)
    renderer._placed.clear()
    renderer._num_patch_bytes = 0
    first = renderer.prompt(ids, [seen[0]]).media[0]
    assert renderer.prompt(ids, [seen[0]]).media[0].pixels is first.pixels
    monkeypatch.setattr("evenstep.rollout.chat._MAX_PATCH_BYTES", 2 * np.asarray(first.pixels).nbytes)
    for each in seen:
        renderer.prompt(ids, [each])
        assert len(renderer._placed) <= 2
    again = renderer.prompt(ids, [seen[0]]).media[0]
    assert again == first


def test_compaction_drops_images_with_their_turns(renderer: ChatRenderer) -> None:
    shown = [Observation("a", images=[colour(1)]), Observation("b", images=[colour(2)]), "c", "d"]
    rollout = play(renderer, Album(*shown), compaction=Recency(keep_last=1, schedule="rolling"))
    assert rollout.status == "ok", rollout.status_reason
    segments = segments_of(rollout)
    assert [segment.break_reason for segment in segments] == [None, "compaction", "compaction"]
    found = [[round(float(image.pixels[0, 0]) * 255) for image in s.media] for s in segments]  # type: ignore[index]
    assert found == [[1, 2], [2], []]
    assert all(PAD not in segment.token_ids for segment in segments[2:])


def test_an_output_with_a_placeholder_truncates(renderer: ChatRenderer) -> None:
    rollout = play(renderer, Album("a", "b"), Says(TOKENS.index("a"), PAD))
    assert rollout.status == "truncated"
    assert "the output of call 0 holds the placeholder of an image" in str(rollout.status_reason)
    assert len(rollout.calls) == 1
    assert rows_of([rollout])[0].num_trained_tokens == 2


@pytest.mark.parametrize(
    "shown, message",
    [
        (Observation(images=[colour(1, height=9)]), "multiples of 8 pixels"),
        (Observation(images=[np.zeros((8, 8))]), "uint8 [height, width, 3], found float64"),
    ],
)
def test_what_cannot_be_shown_fails_its_rollout(renderer: ChatRenderer, shown: str, message: str) -> None:
    rollout = play(renderer, Album("first", shown))
    assert rollout.status == "failed"
    assert message in str(rollout.status_reason)


# ------------------------------------------------------------------------------------------------ placeholders


class SaysInTurn(Says):
    def __init__(self, *answers: tuple[int, ...]) -> None:
        super().__init__()
        self._answers = list(answers)

    async def generate(self, request: Request) -> Completion:
        self._ids = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return await super().generate(request)


@pytest.fixture(scope="module")
def spelling() -> Spelling:
    return Spelling()


NAMES = f"{IMAGE[1]} and {IMAGE[0]}{IMAGE[3]}"
LONG = {"max_tokens_per_call": 60, "max_context_tokens": 2000}


class Echo(Album):
    """Repeats what the policy said."""

    def __init__(self, task: str, *, says: bool, images: tuple[np.ndarray, ...] = ()) -> None:
        super().__init__("a", "b")
        self._task, self._says, self._images = task, says, images

    async def reset(self) -> Start:
        return Start(task=self._task, observation=self._shown.pop(0))

    async def step(self, action: str) -> str | None:
        seen = await super().step(action)
        return seen if seen is None or not self._says else Observation(f"you said {action}", images=self._images)


@pytest.mark.parametrize(
    ("where", "times"), [("note", 1), ("observation", 2), ("beside an image", 2), ("task", 2), ("marker", 1)]
)
def test_the_name_of_a_placeholder_is_text(
    spelling: Spelling, where: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def played() -> tuple[Rollout, list[Request]]:
        renderer = ChatRenderer(spelling.tokenizer, spelling.spec)
        engine = Says(*spelling.ids(NAMES, "<|end|>"))
        images = (colour(1),) if where == "beside an image" else ()
        says = where in ("observation", "beside an image")
        album = Echo(NAMES if where == "task" else "look", says=says, images=images)
        compaction: Any = None
        if where == "note":
            compaction = Summary(schedule="rolling", max_note_tokens=60)
        elif where == "marker":
            compaction = Recency(keep_last=0, schedule="rolling", marker=NAMES)
        return play(renderer, album, engine, compaction, **LONG), engine.requests

    rollout, (*_, last) = played()
    assert (rollout.status, rollout.status_reason) == ("ok", None)
    assert spelling.tokenizer.decode(list(last.prompt_ids)).count(NAMES) == times
    assert last.prompt_ids.count(spelling.spec.image_token_id) == sum(image.num_tokens for image in last.media)
    assert len(last.media) == (where == "beside an image")
    assert spelling.spec.video_token_id not in last.prompt_ids
    spelling.check(rollout)
    # the wrong way: what is spelled is read as marks, and the rollout has no vote
    monkeypatch.setattr(ChatRenderer, "literal", lambda self, text: text)
    assert played()[0].status == "failed"


@pytest.mark.parametrize("marks", [(IMAGE[1],), (IMAGE[0], IMAGE[3])], ids=["image", "video"])
@pytest.mark.parametrize("swallows", [False, True])
def test_a_sampled_placeholder_ends_a_fork_and_no_run(
    spelling: Spelling, marks: tuple[str, ...], swallows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forks(Album):
        def use_model(self, converse: Any) -> None:
            self._converse = converse

        async def step(self, action: str) -> str | None:
            one = self._converse()
            await one.ask("one")
            try:
                await one.ask("two")  # says the marks
            except Exception:
                if not swallows:
                    raise
            for other in (one.fork(), one.fork()):
                await other.ask("three")
            return None

    marked, plain = spelling.ids("x", *marks, "y", "<|end|>"), spelling.ids("x", "<|end|>")

    def played() -> Rollout:
        return play(spelling.renderer, Forks("a"), SaysInTurn(plain, plain, marked, plain), **LONG)

    rollout = played()
    assert rollout.status == ("ok" if swallows else "truncated"), rollout.status_reason
    assert swallows or "the output of call 2 holds the placeholder of an image or video" in str(rollout.status_reason)
    assert rollout.is_voter
    assert sum(row.num_trained_tokens for row in spelling.check(rollout)) == rollout.num_sampled_tokens
    # the wrong way: it goes on, a fork holds what was sampled as context, and its row cannot be trained
    monkeypatch.setattr(ChatRenderer, "placeholder_among", lambda self, ids: None)
    monkeypatch.setattr(ChatRenderer, "prompt", lambda self, ids, seen: Prompt(ids=tuple(ids)))
    with pytest.raises(RowError, match=r"is an image placeholder|begins a video"):
        spelling.check(played())


def test_a_note_with_a_sampled_placeholder_truncates(spelling: Spelling) -> None:
    engine = SaysInTurn(spelling.ids("x", "<|end|>"), spelling.ids("x", IMAGE[1], "<|end|>"))
    rollout = play(spelling.renderer, Album("a", "b"), engine, Summary(schedule="rolling", max_note_tokens=9), **LONG)
    assert rollout.status == "truncated"
    assert len(rollout.calls) == 2
    spelling.check(rollout)


def test_a_run_that_can_show_no_images_says_so_at_the_first_one(renderer: ChatRenderer) -> None:
    configured: Any = SimpleNamespace(has_critic=True, engine=SimpleNamespace(is_server=False))
    for is_critic, words in ((True, "shows 1 images, and a critic sees none; set another"), (False, "'in_process'")):
        configured.has_critic, configured.engine = is_critic, SimpleNamespace(is_server=not is_critic, kind="vllm")
        of_run = ChatRenderer(make_tokenizer(), spec_of(make_model(0)), images_problem=_images_problem(configured))
        engine = Says()
        with pytest.raises(ConfigError, match=words):
            play(of_run, Album(Observation(images=[colour(1)])), engine)
        assert not engine.requests
        assert play(of_run, Album("text")).status == "ok"


def test_images_in_the_task_fail_the_rollout(renderer: ChatRenderer) -> None:
    class InTask(Album):
        async def reset(self) -> Start:
            return Start(task=Observation("look", images=[colour(1)]))

    assert "found some in Start.task" in str(play(renderer, InTask()).status_reason)


def test_a_model_without_eyes_ends_the_run() -> None:
    with pytest.raises(ConfigError, match="shows 1 images, and the model sees none"):
        play(ChatRenderer(make_tokenizer()), Album(Observation(images=[colour(1)])))


def test_a_critic_of_a_vision_model_is_refused_before_weights_load(tmp_path: Path) -> None:
    make_model(0).config.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    config: Any = SimpleNamespace(
        model=SimpleNamespace(path=str(tmp_path), max_context_tokens=40),
        critic=SimpleNamespace(path=None),
        has_critic=True,
    )
    with pytest.raises(ConfigError, match=r"a critic, which sees no images, found model\.path of type 'qwen2_vl'"):
        check_model(config)


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_a_folder_says_how_images_become_patches(tmp_path: Path, name: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    make_model(0).config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"must hold preprocessor_config.json \(or processor_config.json\)"):
        load_vision(str(tmp_path))
    numbers: dict[str, Any] = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]}
    file = tmp_path / name
    file.write_text(json.dumps(numbers if name.startswith("pre") else {"image_processor": numbers}))
    spec, found = load_vision(str(tmp_path))
    assert spec is not None
    assert (spec.mean, spec.std, found) == ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7), file)
    numbers["do_normalize"] = False
    file.write_text(json.dumps(numbers if name.startswith("pre") else {"image_processor": numbers}))
    with pytest.raises(ConfigError, match="found do_normalize false"):
        load_vision(str(tmp_path))


def test_a_tokenizer_without_the_marks_is_refused() -> None:
    from scripted import CharacterTokenizer

    with pytest.raises(ConfigError, match="must know the tokens around an image"):
        ChatRenderer(Deaf(CharacterTokenizer()), tiny.spec())  # type: ignore[arg-type]


class Deaf:
    """A tokenizer that does not read back what it writes."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.eos_token_id = inner.eos_token_id
        self.apply_chat_template, self.encode = inner.apply_chat_template, inner.encode

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return "<image>"
