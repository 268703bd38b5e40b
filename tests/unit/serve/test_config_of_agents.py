"""What is locked here: keys of ``[agent]`` that contradict each other or others are refused by name before anything
runs, and so are programs and packages that are not there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from evenstep.config import load_config
from evenstep.errors import ConfigError
from evenstep.preflight import check_command

EXAMPLE = Path(__file__).parents[3] / "examples" / "openai_agent.toml"


@pytest.mark.parametrize(
    "settings, says",
    [
        (["agent.kind=loop"], "agent.command belongs to agent.kind = 'command', found 'loop'"),
        (["agent.command=[]"], "starts a program, found no agent.command"),
        (["agent.kind=program"], "`agent.kind` must be 'loop' or 'command'"),
        (["agent.reward=stdout"], "`agent.reward` must be 'environment' or 'call'"),
        (["agent.rollout_timeout_s=0"], "`agent.rollout_timeout_s` must be > 0"),
        (["rollout.cut_off=truncated"], "rollout.cut_off looks at the last output of the agent loop"),
        (["compaction.policy=recency"], "compaction.policy is of the agent loop, found 'recency'"),
        (
            ["rollout.in_flight_updates=true", "rollout.max_staleness=1"],
            "in_flight_updates changes weights between two batches of the agent loop",
        ),
    ],
)
def test_contradictions(settings: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config([EXAMPLE], settings)
    assert says in str(error.value)


def test_programs_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_config([EXAMPLE]).agent.command[0] == "python"
    check_command("sh")
    with pytest.raises(ConfigError, match="found 'no-such-program'; give its path"):
        check_command("no-such-program")
    real = importlib.util.find_spec

    def without_fastapi(name: str) -> Any:
        return None if name == "fastapi" else real(name)

    monkeypatch.setattr(importlib.util, "find_spec", without_fastapi)
    with pytest.raises(ConfigError, match=r"extra 'serve', found no fastapi; run: pip install 'evenstep\[serve\]'"):
        check_command("sh")
