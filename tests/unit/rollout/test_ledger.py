"""Behaviours locked here:

1. A task is a pure function of (options, seed, split, index), the same in another process.
2. Splits are disjoint by the tasks' own text, whatever the seeds.
3. The asked account stands exactly once in a ledger, on a page of the first half; every page has its sizes.
4. The right answer scores 1, anything else 0; the floor of the most common answer is near 1/10.
5. A score says whether the answer was still visible, for any number of segments.
6. Options and names that make no sense are refused.
7. The shipped policy is a small character model that transformers loads, and the demo's contexts give rollouts of 1 to
   5 and more segments whose long ones can be answered only from dropped pages.
"""

import asyncio
import subprocess
import sys
from collections import Counter

import pytest

from evenstep.errors import ConfigError
from evenstep.model_files import model_folder
from evenstep.rollout.agent import AgentOptions
from evenstep.rollout.chat import ChatRenderer
from evenstep.rollout.collector import generate_rollouts, slots_of
from evenstep.rollout.compaction import Summary
from evenstep.rollout.environment import SPLITS, Episode, TaskSource, environment_named
from evenstep.rollout.ledger import Ledger, LedgerOptions, LedgerTask, make_task

TASK = LedgerTask(account="c", pages=(("a4", "c7"), ("b1", "d2"), ("e5",)), page_of_answer=0)


def play(actions, episode):
    async def run():
        ledger = Ledger(TASK)
        start = await ledger.reset()
        observations = [await ledger.step(action) for action in actions]
        return start, observations, await ledger.score(episode)

    return asyncio.run(run())


def test_a_task_is_a_pure_function():
    code = (
        "from evenstep.rollout.ledger import *;"
        "print([make_task(LedgerOptions(), seed=4, split='heldout', index=i) for i in range(5)])"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = [make_task(LedgerOptions(), seed=4, split="heldout", index=index) for index in range(5)]
    assert other.stdout.strip() == str(here)
    assert len({str(task) for task in here}) == 5


def test_splits_share_no_task():
    options = LedgerOptions(
        max_pages=1, min_entries=1, max_entries=1
    )  # 260 tasks in all: every draw is likely to recur
    tasks = {
        split: {str(make_task(options, seed=seed, split=split, index=i)) for seed in range(3) for i in range(300)}
        for split in SPLITS
    }
    assert sum(len(found) for found in tasks.values()) == len(set().union(*tasks.values())) > 240
    assert len(tasks["train"]) > len(tasks["heldout"]) > 30


def test_the_asked_account_stands_once_in_the_first_half():
    options = LedgerOptions(min_pages=2, max_pages=6, min_entries=1, max_entries=4)
    sizes = Counter()
    for index in range(400):
        task = make_task(options, seed=1, split="train", index=index)
        entries = [entry for page in task.pages for entry in page]
        assert sum(entry[0] == task.account for entry in entries) == 1
        assert task.answer in task.pages[task.page_of_answer]
        assert task.page_of_answer < (len(task.pages) + 1) // 2
        assert all(1 <= len(page) <= 4 for page in task.pages)
        sizes[len(task.pages)] += 1
    assert set(sizes) == {2, 3, 4, 5, 6}


def test_answers_are_spread():
    answers = Counter(make_task(LedgerOptions(), seed=0, split="heldout", index=i).answer[1] for i in range(1_000))
    assert len(answers) == 10
    assert max(answers.values()) < 150


@pytest.mark.parametrize(
    "answer, reward", [("c7", 1.0), (" c7\n", 1.0), ("7", 0.0), ("c8", 0.0), ("d2", 0.0), ("", 0.0), ("c7c7", 0.0)]
)
def test_reward(answer, reward):
    start, observations, score = play(
        [">", ">", ">", answer], Episode(num_segments=1, visible_observations=(0, 1, 2, 3))
    )
    assert (start.task, start.observation) == ("find c", "a4 c7")
    assert observations == ["b1 d2", "e5", "c?", None]
    assert score.reward == reward
    assert score.info["answer"] == "7"
    assert score.info["was_answer_visible"]


def test_an_episode_that_was_cut_scores_nothing():
    _, _, score = play([">"], Episode(num_segments=1, visible_observations=()))
    assert score.reward == 0.0
    assert score.info["given"] is None


@pytest.mark.parametrize("num_segments", [1, 2, 3, 9])
@pytest.mark.parametrize("visible, was_answer_visible", [((0, 3), True), ((1, 2, 3), False), ((), False)])
def test_a_score_says_whether_the_answer_could_be_read_off(num_segments, visible, was_answer_visible):
    """Which pages are left after how many segments is the compaction policy's affair: none of it ends a run."""
    _, _, score = play([">", ">", ">", "c7"], Episode(num_segments=num_segments, visible_observations=visible))
    assert (score.reward, score.info["was_answer_visible"]) == (1.0, was_answer_visible)


def test_bad_options_and_names_are_refused():
    with pytest.raises(ConfigError, match="min_pages = 3 and max_pages = 2"):
        LedgerOptions(min_pages=3, max_pages=2)
    with pytest.raises(ConfigError, match="min_entries = 0"):
        LedgerOptions(min_entries=0)
    with pytest.raises(ConfigError, match="'abacus' is not known; known environments: ledger"):
        environment_named("abacus")
    with pytest.raises(ConfigError, match="split must be one of train, heldout, warmstart, found 'test'"):
        TaskSource(name="ledger", options=LedgerOptions(), seed=0, split="test")
    with pytest.raises(ConfigError, match=r"takes LedgerOptions \(min_pages, max_pages, min_entries, max_entries\)"):
        TaskSource(name="ledger", options={"max_pages": 3}, seed=0, split="train")


def test_the_shipped_policy_plays_rollouts_of_one_to_five_segments():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from evenstep.rollout.in_process import InProcessEngine

    folder = model_folder("evenstep:ledger")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 3_000_000
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    assert len(tokenizer) == model.config.vocab_size < 64
    text = "find c\nnote c7\na4 b1-?:.>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text)

    renderer = ChatRenderer(tokenizer)
    engine = InProcessEngine(model, eos_token_ids=renderer.stop_token_ids, max_context_tokens=64)
    rollouts = asyncio.run(
        generate_rollouts(
            slots_of(collection=0, num_prompts=60, num_generations=1),
            tasks=TaskSource(name="ledger", options=LedgerOptions(), seed=9, split="heldout"),
            engine=engine,
            renderer=renderer,
            compaction=Summary(),
            options=AgentOptions(max_context_tokens=64, temperature=0.0),
            run_seed=0,
            batch_rollouts=60,
        )
    )
    segments = Counter(rollout.info["num_segments"] for rollout in rollouts)
    assert {1, 2, 3, 4, 5} <= set(segments)
    assert all(rollout.status == "ok" for rollout in rollouts)
    long = [rollout for rollout in rollouts if rollout.info["num_segments"] >= 3]
    assert len(long) > 20
    assert not any(rollout.info["was_answer_visible"] for rollout in long)
    assert all(len(call.prompt_ids) + len(call.output_ids) <= 64 for rollout in rollouts for call in rollout.calls)
