"""Behaviours locked here:

1. Means count every rollout once, overall and by number of segments; the mean over ranks' shares is not that.
2. The floor is the share of the most common answer; there is none where an environment gives no answers.
3. Failed rollouts are counted and in no mean; truncated ones are in it. Without any reward it is an error.
4. The JSON object has the names that metrics.jsonl promises.
"""

import json
from dataclasses import replace

import pytest

from evenstep.errors import CollectionError
from evenstep.rollout.evaluate import evaluation_of
from evenstep.types import Rollout


def rollout(index, reward, num_segments, answer="7", status="ok"):
    info = {"num_segments": num_segments} | ({} if answer is None else {"answer": answer})
    return Rollout(
        rollout_id=f"c0/p{index}/g0", group_id=f"c0/p{index}", prompt_id=str(index), reward=reward, status=status,
        status_reason=None if status == "ok" else "why", info=info,
    )  # fmt: skip


MIXED = [
    rollout(0, 1.0, 1, "3"),
    rollout(1, 1.0, 1, "3"),
    rollout(2, 0.5, 3, "3"),
    rollout(3, 0.0, 5, "1", status="truncated"),
    rollout(4, None, 2, "9", status="failed"),
]


def test_means_by_number_of_segments():
    evaluation = evaluation_of(MIXED)
    assert (evaluation.all.num_rollouts, evaluation.all.reward_mean) == (4, 0.625)
    assert (evaluation.long.num_rollouts, evaluation.long.reward_mean, evaluation.long.floor) == (2, 0.25, 0.5)
    assert {k: (s.num_rollouts, s.reward_mean) for k, s in evaluation.by_segments.items()} == {
        1: (2, 1.0), 3: (1, 0.5), 5: (1, 0.0),
    }  # fmt: skip
    assert evaluation.all.floor == 0.75
    assert (evaluation.num_failed, evaluation.num_truncated) == (1, 1)
    uneven = [evaluation_of(MIXED[:1]).all.reward_mean, evaluation_of(MIXED[1:]).all.reward_mean]
    assert sum(uneven) / 2 != evaluation.all.reward_mean


def test_long_rollouts_that_could_read_the_answer_off_are_counted():
    seen = [
        replace(rollout(index, 1.0, segments, "2"), info={"num_segments": segments, "was_answer_visible": is_visible})
        for index, (segments, is_visible) in enumerate([(3, True), (4, False), (1, True)])
    ]
    assert evaluation_of(seen).to_json()["eval_num_long_visible"] == 1
    assert evaluation_of(MIXED).to_json()["eval_num_long_visible"] is None  # the environment does not say


def test_an_answer_may_be_any_json():
    answers = [{"x": 1, "y": [2]}, {"y": [2], "x": 1}, ["a"], 7]
    found = evaluation_of([rollout(index, 1.0, 1, answer) for index, answer in enumerate(answers)])
    assert found.all.floor == 0.5
    unsure = [replace(one, info=one.info | {"num_segments": 3, "was_answer_visible": None}) for one in MIXED[:2]]
    assert evaluation_of(unsure).num_long_visible == 0


def test_no_answers_no_floor():
    evaluation = evaluation_of([rollout(0, 1.0, 1, None), rollout(1, 0.0, 1, "2")])
    assert evaluation.all.floor is None
    assert evaluation.long is None


def test_nothing_scored_is_an_error():
    with pytest.raises(CollectionError, match="1 rollouts, all failed; the first says: why"):
        evaluation_of(MIXED[4:])
    with pytest.raises(CollectionError, match="found 0 rollouts"):
        evaluation_of([])


def test_json_object():
    found = json.loads(json.dumps(evaluation_of(MIXED).to_json()))
    assert found["eval_reward_mean"] == 0.625
    assert (found["eval_num_tasks"], found["eval_temperature"], found["eval_rollouts_per_task"]) == (5, 0.0, 1)
    assert (found["eval_long_reward_mean"], found["eval_num_long"], found["eval_long_floor"]) == (0.25, 2, 0.5)
    assert found["eval_by_segments"]["3"] == {"num_rollouts": 1, "reward_mean": 0.5}
    assert evaluation_of(MIXED[:2]).to_json()["eval_long_reward_mean"] is None
