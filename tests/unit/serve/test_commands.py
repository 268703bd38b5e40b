"""What is locked here, with real programs behind the real server:

1. A program gets its task on standard input and the server in its environment; what it prints is scored, or what it
   reports: one rule, by configuration.
2. A rollout of it is what the agent loop would have made of the same calls: ids, log-probs, status, number of segments.
3. Exit code, time limit, no reward, too long an answer, an environment that goes on, a reward of the wrong kind:
   ``failed``, with the end of standard error as the reason. Nobody else's rollout is touched.
4. Nothing is left running: a program that ignores its end, its children, and all of them when this process is killed.
5. So many run at a time and no more.
6. An engine's failure ends the run, not the rollout.
7. In an evaluation sampling is greedy, whatever temperature the program asks for.
8. A batch engine is served in the background: the server answers while it generates, and calls share batches.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from evenstep.errors import ConfigError, EngineError
from evenstep.rollout.agent import AgentOptions, RolloutIdentity, run_rollout
from evenstep.rollout.chat import ChatRenderer
from evenstep.rollout.compaction import NoCompaction
from evenstep.rollout.engine import Completion, Request
from evenstep.rollout.environment import Episode, Score, Start
from evenstep.rollout.segments import segments_of
from evenstep.serve.batches import BackgroundBatches
from evenstep.serve.commands import CommandAgent, CommandPlayer
from evenstep.types import Rollout
from serving_fakes import AsyncEngine, ToolTokenizer, spelled

HEAD = """
import json, os, sys, time, urllib.request
task = json.load(sys.stdin)
def post(url, body, **headers):
    headers |= {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
def ask(messages, **options):
    found = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": messages, **options})
    return found["choices"][0]["message"]
def reward(value):
    post(os.environ["EVENSTEP_ROLLOUT_URL"] + "/reward", {"reward": value})
messages = [{"role": "user", "content": task["task"]}]
"""
ONE_ANSWER = HEAD + "print(ask(messages)['content'])"


@dataclass(slots=True)
class Marked:
    """One question; right is what it was made with."""

    right: str = "ok"
    is_long: bool = False  # goes on after the answer
    said: str = ""

    async def reset(self) -> Start:
        return Start(task="say " + self.right, metadata={"answer": self.right})

    async def step(self, action: str) -> str | None:
        self.said = action
        return "and now?" if self.is_long else None

    async def score(self, episode: Episode) -> Score:
        return Score(reward=float(self.said == self.right), info={"said": self.said})


def identity(index: int) -> RolloutIdentity:
    return RolloutIdentity(
        rollout_id=f"c0/p0/g{index}", group_id="c0/p0", prompt_id="p", key=(index,), seed_of_call=lambda order: order
    )


def player(program: str, tmp_path: Path, **options: Any) -> CommandPlayer:
    script = tmp_path / "agent.py"
    script.write_text(textwrap.dedent(program))
    side_by_side = options.pop("max_side_by_side", 4)
    tokenizer = ToolTokenizer()
    return CommandPlayer(
        agent=CommandAgent(**({"command": (sys.executable, str(script)), "timeout_s": 20.0} | options)),
        tokenizer=tokenizer,
        renderer=ChatRenderer(tokenizer),
        trained_temperature=1.0,
        max_side_by_side=side_by_side,
    )


def played(
    program: str,
    tmp_path: Path,
    engine: Any = None,
    *,
    environments: Sequence[Any] | None = None,
    agent_options: AgentOptions | None = None,
    **options: Any,
) -> list[Rollout]:
    environments = [Marked()] if environments is None else environments
    rollouts = [(identity(index), environment) for index, environment in enumerate(environments)]
    agent_options = agent_options or AgentOptions(max_context_tokens=1000, max_tokens_per_call=50, vocab_size=2000)
    made = player(program, tmp_path, **options)
    return asyncio.run(made.play(rollouts, AsyncEngine("ok") if engine is None else engine, agent_options))


# ------------------------------------------------------------------------------------------------ rewards


def test_what_is_printed_is_scored(tmp_path: Path) -> None:
    program = HEAD + "assert task['metadata'] == {'answer': task['task'][4:]}\n" + ONE_ANSWER[len(HEAD) :]
    right, wrong = played(program, tmp_path, environments=[Marked(), Marked(right="no")])
    assert (right.status, right.reward, right.info) == ("ok", 1.0, {"said": "ok", "num_segments": 1})
    assert (wrong.status, wrong.reward) == ("ok", 0.0)
    assert (right.rollout_id, wrong.rollout_id, right.group_id) == ("c0/p0/g0", "c0/p0/g1", "c0/p0")


def test_a_rollout_is_what_the_agent_loop_makes_of_the_same_call(tmp_path: Path) -> None:
    (by_program,) = played(ONE_ANSWER, tmp_path)
    tokenizer = ToolTokenizer()
    options = AgentOptions(max_context_tokens=1000, max_tokens_per_call=50, vocab_size=2000)
    by_loop = asyncio.run(
        run_rollout(
            identity=identity(0),
            environment=Marked(),
            engine=AsyncEngine("ok"),
            renderer=ChatRenderer(tokenizer),
            compaction=NoCompaction(),
            options=options,
        )
    )
    assert by_program == by_loop


def test_compaction_and_a_reported_reward(tmp_path: Path) -> None:
    program = (
        HEAD
        + """
messages.append(ask(messages)); messages.append({"role": "user", "content": "more"})
ask(messages)
note = {"messages": [{"role": "user", "content": "note"}]}
post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", note, **{"x-evenstep-break": "compaction"})
reward(0.25)
print("this is not scored")
"""
    )
    (rollout,) = played(program, tmp_path, AsyncEngine("ok", "yes", "ab"), reward="call")
    assert (rollout.status, rollout.reward, rollout.info) == ("ok", 0.25, {"num_segments": 2})
    assert [call.output_ids for call in rollout.calls] == [spelled("ok"), spelled("yes"), spelled("ab")]
    assert [segment.break_reason for segment in segments_of(rollout)] == [None, "compaction"]


FAILURES: list[tuple[str, dict[str, Any], str]] = [
    ("print('x', file=sys.stderr); sys.exit(3)", {}, "found exit code 3; it wrote to stderr:\nx"),
    ("raise KeyError('here')", {}, "KeyError: 'here'"),
    ("os.kill(os.getpid(), 9)", {}, "found exit code 137"),
    ("time.sleep(60)", {"timeout_s": 0.7}, "must end within agent.rollout_timeout_s = {timeout_s:g} seconds"),
    ("ask(messages)", {"reward": "call"}, "must report a reward, found none"),
    ("reward(1.0); sys.exit(1)", {"reward": "call"}, "found exit code 1"),
    ("reward(1.0)", {}, "HTTP Error 409"),
    ("print('x' * (2**20 + 1))", {}, "may print at most 1048576 bytes"),
    ("ask([{'role': 'user', 'content': 'a'}]); ask([{'role': 'user', 'content': 'b'}])", {}, "HTTP Error 409"),
]


def test_what_goes_wrong_costs_its_own_rollout(tmp_path: Path) -> None:
    for program, options, says in FAILURES:
        body = f"if task['task'] == 'say no':\n    {program}\nelse:\n    said = ask(messages)['content']\n"
        body += "    reward(1.0)\n" if options.get("reward") == "call" else "    print(said)\n"
        # to start Python at all takes longer than a short limit where the machine is busy: then a longer one
        for factor in (1, 5, 25) if "timeout_s" in options else (1,):
            given = options | ({"timeout_s": options["timeout_s"] * factor} if "timeout_s" in options else {})
            wrong, right = played(HEAD + body, tmp_path, environments=[Marked(right="no"), Marked()], **given)
            assert (wrong.status, wrong.reward) == ("failed", None), program
            assert says.format(**given) in str(wrong.status_reason), (program, wrong.status_reason)
            if right.status == "ok":
                break
        assert (right.status, right.reward) == ("ok", 1.0), program


def test_an_environment_that_goes_on_and_one_that_raises(tmp_path: Path) -> None:
    class Raises(Marked):
        async def step(self, action: str) -> str | None:
            raise ValueError("the environment's own")

    long, raises = played(ONE_ANSWER, tmp_path, environments=[Marked(is_long=True), Raises()])
    assert "scores one answer, found an environment that goes on" in str(long.status_reason)
    assert "ValueError: the environment's own" in str(raises.status_reason)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    (rollout,) = played("", tmp_path, command=("no-such-program",))
    assert "no-such-program: No such file or directory" in str(rollout.status_reason)
    with pytest.raises(ConfigError, match="must name a program"):
        CommandAgent(command=())


def test_an_environment_that_asks_the_policy_is_refused(tmp_path: Path) -> None:
    class Asks(Marked):
        def use_model(self, conversation: Any) -> None: ...

    with pytest.raises(ConfigError, match="environment Asks, which asks the policy itself"):
        played(ONE_ANSWER, tmp_path, environments=[Asks()])


def test_limits_truncate(tmp_path: Path) -> None:
    program = (
        HEAD
        + """
try:
    for _ in range(3):
        messages.append(ask(messages)); messages.append({"role": "user", "content": "more"})
except urllib.error.HTTPError as error:
    assert error.code == 403
print("ok")
"""
    )
    options = AgentOptions(max_context_tokens=1000, max_tokens_per_call=50, max_calls=2)
    (rollout,) = played(program, tmp_path, agent_options=options)
    assert (rollout.status, rollout.reward, len(rollout.calls)) == ("truncated", 1.0, 2)
    assert "max_calls = 2" in str(rollout.status_reason)


def test_an_evaluation_is_greedy_whatever_the_program_asks_for(tmp_path: Path) -> None:
    engine = AsyncEngine("ok")
    options = AgentOptions(max_context_tokens=1000, max_tokens_per_call=50, temperature=0.0)
    (rollout,) = played(
        HEAD + "print(ask(messages, temperature=1.0)['content'])", tmp_path, engine, agent_options=options
    )
    assert rollout.reward == 1.0
    assert engine.requests[0].sampling.temperature == 0.0


def test_an_engines_failure_ends_the_run(tmp_path: Path) -> None:
    started = time.monotonic()
    program = HEAD + "try:\n    ask(messages)\nexcept Exception:\n    time.sleep(60)"
    with pytest.raises(EngineError, match="broken"):
        played(program, tmp_path, AsyncEngine(EngineError("broken")), environments=[Marked(), Marked()])
    assert time.monotonic() - started < 15


# ------------------------------------------------------------------------------------------------ processes


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if is_alive(pid)]}"
        time.sleep(0.02)


STUBBORN = (
    HEAD
    + """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(99)"
child = subprocess.Popen([sys.executable, "-c", code])
open(os.path.join(os.path.dirname(__file__), "pids"), "w").write(f"{os.getpid()} {child.pid}\\n")
"""
)
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


@needs_proc
@pytest.mark.parametrize("then", ["time.sleep(99)", "print('ok')"])
def test_nothing_is_left_running(tmp_path: Path, then: str) -> None:
    (rollout,) = played(STUBBORN + then, tmp_path, timeout_s=2.5)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    wait_until_gone(pids)
    assert rollout.status == ("failed" if "sleep" in then else "ok"), rollout.status_reason


@needs_proc
def test_nothing_is_left_when_this_process_is_killed(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(STUBBORN + "time.sleep(99)")
    code = """
import asyncio, sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
import test_commands
asyncio.run(test_commands.player(Path(sys.argv[1], "agent.py").read_text(), Path(sys.argv[1])).play(
    [(test_commands.identity(0), test_commands.Marked())], test_commands.AsyncEngine("ok"),
    test_commands.AgentOptions(max_context_tokens=1000, max_tokens_per_call=50)))
"""
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), *folders])
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text().endswith("\n"):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    wait_until_gone([int(pid) for pid in (tmp_path / "pids").read_text().split()])


def test_so_many_at_a_time(tmp_path: Path) -> None:
    class Counting(AsyncEngine):
        running, most = 0, 0

        async def generate(self, request: Request) -> Completion:
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0.3)
            self.running -= 1
            return await super().generate(request)

    engine = Counting("ok")
    rollouts = played(ONE_ANSWER, tmp_path, engine, environments=[Marked() for _ in range(5)], max_side_by_side=2)
    assert [rollout.reward for rollout in rollouts] == [1.0] * 5
    assert engine.most == 2


# ------------------------------------------------------------------------------------------------ batches


class Blocking:
    """A batch engine that takes its time without giving the event loop back."""

    max_context_tokens, weight_version = 1000, 0

    def __init__(self, seconds: float = 0.2) -> None:
        self.seconds = seconds
        self.sizes: list[int] = []

    async def generate(self, request: Request) -> Completion:
        return self.generate_batch([request])[0]

    def generate_batch(self, requests: Sequence[Request]) -> list[Completion]:
        self.sizes.append(len(requests))
        time.sleep(self.seconds)
        if any(request.prompt_ids == (13,) for request in requests):
            raise EngineError("unlucky")
        return [
            Completion(output_ids=request.prompt_ids, logprobs=(-1.0,), finish_reason="stop", weight_version=0)
            for request in requests
        ]


def test_batches_run_beside_the_event_loop() -> None:
    async def run() -> None:
        engine = Blocking()
        batches = BackgroundBatches(engine, max_rows=3)
        calls = [asyncio.create_task(batches.generate(Request(prompt_ids=(index,)))) for index in range(7)]
        ticks = 0
        while not all(call.done() for call in calls):
            await asyncio.sleep(0.01)
            ticks += 1
        assert ticks > 20  # the loop went on while three batches were generated
        assert [call.result().output_ids for call in calls] == [(index,) for index in range(7)]
        assert engine.sizes == [3, 3, 1]
        unlucky = [asyncio.create_task(batches.generate(Request(prompt_ids=(index,)))) for index in (13, 1)]
        left = asyncio.create_task(batches.generate(Request(prompt_ids=(5,))))
        await asyncio.sleep(0)
        left.cancel()
        found = await asyncio.gather(*unlucky, left, return_exceptions=True)
        assert [type(error) for error in found] == [EngineError, EngineError, asyncio.CancelledError]
        assert engine.sizes[3:] == [2]
        assert (await batches.generate(Request(prompt_ids=(6,)))).output_ids == (6,)
        with pytest.raises(ConfigError):
            BackgroundBatches(engine, max_rows=0)

    asyncio.run(run())


def test_programs_share_batches_and_the_server_answers_meanwhile(tmp_path: Path) -> None:
    class Says(Blocking):
        def generate_batch(self, requests: Sequence[Request]) -> list[Completion]:
            self.sizes.append(len(requests))
            time.sleep(self.seconds)
            ids = spelled("ok")
            one = Completion(output_ids=ids, logprobs=(-0.5,) * len(ids), finish_reason="stop", weight_version=0)
            return [one for _ in requests]

    program = (
        HEAD
        + """
import threading
threading.Thread(target=lambda: (ask(messages), print("ok"))).start()
time.sleep(0.5)
begun = time.monotonic()
url = os.environ["EVENSTEP_ROLLOUT_URL"] + "/status"
urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}))
assert time.monotonic() - begun < 1.0
"""
    )
    engine = Says(2.0)
    rollouts = played(program, tmp_path, engine, environments=[Marked() for _ in range(3)])
    assert [rollout.status for rollout in rollouts] == ["ok"] * 3, rollouts[0].status_reason
    assert len(engine.sizes) <= 2
