"""What is locked here, with runs on two real ranks and scripted servers of a real tiny model:

1. steps on two servers: each window's engine and trainer log-probs are the same to 1e-4, versions advance, every server
   gets every version, every call of a rollout was asked for once; old folders of weights are removed
2. after an update a probe finds a stale head, a stale cache, stale weights, and log-probs of another temperature, and
   each message names the fault; so it does for a sharded policy and for one with adapters
3. sharded policies, adapters, SGLang's protocol, and generation ahead of training
4. importance weights are those of the servers' own log-probs; with those as old log-probs a server that computes a
   little otherwise ends no run, and how far it is from the trainer is logged
5. an error of the servers ends all ranks with one message, and what was finished is on disk
6. the example for vLLM runs against a scripted server
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evenstep.config import Config, load_config
from evenstep.errors import EvenstepError
from evenstep.model_files import model_folder
from evenstep.train.run import run_training
from ranks import run_ranks
from scripted_server import ScriptedServer, Transformers
from server_runs import LEDGER, config_of, ids_of, rollouts, untied, windows


@contextlib.contextmanager
def served(model: Path, **settings: Any) -> Iterator[ScriptedServer]:
    with ScriptedServer(Transformers(str(model)), **settings) as server:
        yield server


def train(configs: list[Config]) -> list[str | None]:
    """Each run's error, or None."""
    found: list[str | None] = []
    for config in configs:
        try:
            run_training(config)
            found.append(None)
        except EvenstepError as error:
            found.append(str(error))
    return found


def run(*configs: Path, ranks: int = 2) -> list[str | None]:
    """Each run's error, which is the same on all ranks."""
    by_rank = run_ranks(train, ranks, [load_config([path]) for path in configs], timeout_s=150)
    assert all(found == by_rank[0] for found in by_rank)
    return by_rank[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untied(tmp_path_factory.mktemp("model"))


def versions(log: list[dict[str, Any]]) -> list[str]:
    stamps = dict.fromkeys(entry["stamp"] for entry in log)
    return [stamp.split(":")[2] for stamp in stamps if stamp != "default"]


def test_steps_on_two_servers(model: Path, tmp_path: Path) -> None:
    folder = tmp_path
    with served(model) as one, served(model) as two:
        assert run(config_of(folder, engine={"urls": [one.url, two.url]})) == [None]
        logs = [one.log, two.log]
    lines = windows(folder)
    assert [line["window"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert line["stepped"]
        assert 0 < line["engine_logprob_difference_mean"] <= line["engine_logprob_difference_max"] < 1e-4
        assert abs(line["engine_trainer_kl"]) < 1e-6
        assert line["staleness_max"] == 0
    for log in logs:
        assert versions(log) == ["0", "1", "2"]
    asked: Counter[Any] = Counter()
    for log in logs:
        for entry in log:
            if entry["path"] == "/v1/completions" and entry["body"].get("stop_token_ids"):
                asked[tuple(entry["body"]["prompt"]), entry["body"]["seed"], entry["stamp"].split(":")[2]] += 1
    recorded: Counter[Any] = Counter()
    for collection in range(3):
        for rollout in rollouts(folder, collection).values():
            assert rollout.weight_version == collection
            for call in rollout.calls:
                recorded[call.prompt_ids, call.sampling.seed, str(collection)] += 1
    assert asked == recorded
    assert max(asked.values()) == 1
    kept = sorted(path.name for path in (folder / "run" / "weights").iterdir())
    assert kept == ["version_000001", "version_000002"]


# --------------------------------------------------------------------------------------------------------- the probe

FAULTS: dict[str, tuple[str, dict[str, dict[str, Any]], str]] = {
    # a server of a model whose head is its embedding, and weights that are written the same way
    "head": ("stale_head", {"engine": {"untie_embeddings": False}}, "it has a stale head"),
    "weights": ("stale_weights", {}, "it still has the weights before"),
    "cache": ("stale_cache", {}, "it has a stale cache: keys and values of the first 128 prompt tokens"),
    "cache, sharded": ("stale_cache", {"train": {"sharding": "fsdp2"}}, "it has a stale cache"),
    "weights, adapters": ("stale_weights", {"lora": {"rank": 4}}, "it still has the weights before"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_probe_names_the_fault(name: str, model: Path, tmp_path: Path) -> None:
    fault, sections, message = FAULTS[name]
    tied = model_folder(LEDGER)
    assert tied is not None
    with served(tied if name == "head" else model, faults={fault: -1}) as server:
        engine = {"urls": [server.url], **sections.get("engine", {})}
        (found,) = run(config_of(tmp_path, **{**sections, "engine": engine}))
    assert found is not None
    assert message in found, found
    assert "engine.probe_tolerance = 0.001" in found
    assert "160 prompt tokens" in found
    assert len(windows(tmp_path)) == 1  # the first weights were right, and nothing was trained on the wrong ones


def test_the_probe_names_the_temperature(model: Path, tmp_path: Path) -> None:
    # a server that does not say what its log-probs are
    with served(model, kind="sglang", logprobs_mode="raw_logprobs") as server:
        engine = {"kind": "sglang", "urls": [server.url]}
        (found,) = run(config_of(tmp_path, engine=engine, rollout={"temperature": 0.6}), ranks=1)
    assert found is not None
    assert "its log-probs are those at temperature 1, and rollout.temperature is 0.6" in found
    assert windows(tmp_path) == []


def test_the_probe_names_another_model(model: Path, tmp_path: Path) -> None:
    with served(model, faults={"shifted": -1}) as server:
        (found,) = run(config_of(tmp_path, engine={"urls": [server.url]}), ranks=1)
    assert found is not None
    assert "it probably serves another model, computes in half precision" in found


def test_a_stale_head_does_not_show_with_a_head_of_its_own(model: Path, tmp_path: Path) -> None:
    with served(model, faults={"stale_head": -1}) as server:
        assert run(config_of(tmp_path, engine={"urls": [server.url]})) == [None]


KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "sharded": {"train": {"sharding": "fsdp2"}},
    "adapters": {"lora": {"rank": 4}},
    "sglang": {"engine": {"kind": "sglang"}, "rollout": {"temperature": 0.7}},
    "ahead": {"rollout": {"max_staleness": 1}},
    "in flight": {"rollout": {"max_staleness": 1, "in_flight_updates": True}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_policies(kind: str, model: Path, tmp_path: Path) -> None:
    sections = KINDS[kind]
    of_engine = {"kind": "vllm", **sections.get("engine", {})}
    with served(model, kind=of_engine["kind"]) as server:
        assert run(config_of(tmp_path, **{**sections, "engine": of_engine | {"urls": [server.url]}})) == [None]
        log = server.log
    lines = windows(tmp_path)
    assert len(lines) == 3
    assert all(line["stepped"] for line in lines)
    if kind == "in flight":
        assert versions(log)[:2] == ["0", "1"]
        assert {call.weight_version for name in range(3) for r in rollouts(tmp_path, name).values() for call in r.calls}
        assert max(line["staleness_max"] for line in lines) <= 1
    elif kind == "ahead":
        assert versions(log) == ["0", "1"]
        assert [line["staleness_max"] for line in lines] == [0, 1, 1]
    else:
        assert versions(log) == ["0", "1", "2"]
        assert all(line["engine_logprob_difference_max"] < 1e-4 for line in lines)


def test_importance_weights_are_of_the_servers_logprobs(model: Path, tmp_path: Path) -> None:
    """A server whose log-probs are all too low by 0.05: the gradient is exp(0.05) of the right one's."""
    found = {}
    for name, faults in (("right", {}), ("shifted", {"shifted": -1})):
        folder = tmp_path / name
        folder.mkdir()
        with served(model, faults=faults) as server:
            config = config_of(
                folder,
                engine={"urls": [server.url], "probe_tolerance": 0.1},
                run={"num_collections": 1},
                train={"importance_cap": 2.0, "entropy_coef": 0.0},
                credit={"estimator": "reinforce_pp"},
            )
            assert run(config, ranks=1) == [None]
        (found[name],) = windows(folder)
    assert found["right"]["stepped"]
    assert found["shifted"]["engine_logprob_difference_mean"] == pytest.approx(0.05, abs=1e-4)
    assert found["shifted"]["grad_norm"] / found["right"]["grad_norm"] == pytest.approx(1.051271, abs=1e-4)
    assert found["right"]["engine_logprob_difference_max"] < 1e-4


def test_old_logprobs_of_a_server_that_rounds(model: Path, tmp_path: Path) -> None:
    with served(model, faults={"shifted": -1}) as server:
        config = config_of(
            tmp_path,
            engine={"urls": [server.url], "probe_tolerance": 0.1},
            run={"num_collections": 1},
            train={"old_logprobs": "engine"},
        )
        assert run(config, ranks=1) == [None]
    (found,) = windows(tmp_path)
    assert found["ratio_max_deviation"] == pytest.approx(math.expm1(0.05), abs=1e-3)
    assert found["engine_logprob_difference_mean"] == pytest.approx(0.05, abs=1e-4)
    assert found["engine_trainer_kl"] == pytest.approx(math.exp(0.05) - 1 - 0.05, rel=1e-2)


# --------------------------------------------------------------------------------------------------- errors, examples


def test_an_error_keeps_what_was_finished(model: Path, tmp_path: Path) -> None:
    class Ends(ScriptedServer):
        def begin(self) -> None:
            super().begin()
            if len(self.calls) >= 30:  # calls may end two at a time
                self.faults["no_logprobs"] = -1

    with Ends(Transformers(str(model))) as server:
        (found,) = run(config_of(tmp_path, engine={"urls": [server.url], "max_concurrent": 2}))
        assert found is not None
        assert "must give a log-prob for each of" in found
        kept = ids_of(rollouts(tmp_path, 0))
        assert 0 < len(kept) < 8
        assert windows(tmp_path) == []


def test_the_example(model: Path, tmp_path: Path) -> None:
    """With the model of this test, and a server that is there instead of one to be started."""
    example = Path(__file__).parents[2] / "examples" / "vllm.toml"
    changes = {
        "run.dir": str(tmp_path / "run"),
        "model.path": str(model),
        "engine.launch": False,
        "environment.max_numbers": 2,
    }
    with served(model) as server:
        given = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
        text = "\n".join(line for line in example.read_text().splitlines() if not line.startswith("python ="))
        path = tmp_path / "vllm.toml"
        path.write_text(text)
        config = load_config([path], [*given, f"engine.urls={json.dumps([server.url])}"])
        assert run_ranks(train, 2, [config], timeout_s=150)[0] == [None]
    assert len(windows(tmp_path)) == 3
