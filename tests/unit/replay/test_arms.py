"""What is locked here:

1. An arm leaves out the keys of its base that belong to another layout; those that it is given itself are refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstep.config import Config, load_config
from evenstep.errors import ConfigError
from evenstep.replay.arms import arm_config

EXAMPLE = Path(__file__).parents[3] / "examples" / "ledger.toml"
OF_FIXED = {"micro_batch_rows": 2, "logprob_micro_batch_rows": 3, "pad_scope": "group"}


def fixed_run() -> Config:
    keys = (f"plan.{name}={value!r}" for name, value in OF_FIXED.items())
    return load_config([EXAMPLE], ["plan.layout=fixed", *keys])


def test_keys_of_another_layout_are_left_out(tmp_path: Path) -> None:
    plan = arm_config("padded,max_tokens_per_gpu=128", fixed_run(), tmp_path).plan
    assert (plan.layout, plan.max_tokens_per_gpu) == ("padded", 128)
    assert {name: getattr(plan, name) for name in OF_FIXED} == dict.fromkeys(OF_FIXED, 1) | {"pad_scope": "window"}
    again = arm_config("fixed", fixed_run(), tmp_path).plan
    assert {name: getattr(again, name) for name in OF_FIXED} == OF_FIXED
    assert again.max_tokens_per_gpu is None


@pytest.mark.parametrize("name", OF_FIXED)
def test_keys_of_another_layout_are_refused_where_they_are_given(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"plan.{name} belongs to plan.layout = 'fixed'"):
        arm_config(f"padded,max_tokens_per_gpu=128,{name}={OF_FIXED[name]!r}", fixed_run(), tmp_path)
