"""What is locked here, with a real vLLM server on the CPU that `evenstep train` starts and ends:

1. four optimizer steps of a tiny model, weights updated after each: engine and trainer log-probs differ by at most 1e-3
   in every window, versions advance; the server is killed in the middle of a collection, is started again with the present
   weights, and no rollout is lost or doubled
2. weights of a model whose head is its embedding, written as they are: the probe after the first update stops the run
   and names the stale head

Skipped where there is no vLLM: ``scripts/install_vllm_cpu.sh`` installs one into ``.venv-vllm``, and
EVENSTEP_VLLM_PYTHON names the Python of another.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from evenstep.rollout.server_process import port_problem
from server_runs import LEDGER, config_of, free_port, ids_of, rollouts, start, windows

DEFAULT = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
PYTHON = Path(os.environ.get("EVENSTEP_VLLM_PYTHON", DEFAULT))

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: {PYTHON} is missing; run scripts/install_vllm_cpu.sh"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random model whose head is its embedding, with the shipped tokenizer. The shipped model itself has a bias
    where vLLM's Qwen3 has none."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from evenstep.model_files import model_folder

    shipped = model_folder(LEDGER)
    assert shipped is not None
    folder = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(shipped)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    made = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.15,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    made.save_pretrained(folder)
    return str(folder)


def engine_of(port: int, **changes: Any) -> dict[str, Any]:
    return {"launch": True, "python": str(PYTHON), "ports": [port], "max_concurrent": 8} | changes


def processes_with(argument: str) -> list[int]:
    """Ids of processes that have an argument, the oldest first."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if argument in path.read_text().split("\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return sorted(found)


def test_steps_with_a_server_that_dies(model: str, tmp_path: Path) -> None:
    port = free_port()
    config = config_of(
        tmp_path,
        run={"num_collections": 4},
        model={"path": model},
        rollout={"temperature": 0.8},
        engine=engine_of(port, reconnect_limit_s=600.0),
    )
    process = start(config)
    deadline = time.monotonic() + 900
    while len(windows(tmp_path)) < 1:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    servers = [pid for pid in processes_with(str(port)) if str(pid) not in ("", str(process.pid))]
    time.sleep(0.3)  # into the next collection, or its update of weights
    os.kill(servers[-1], signal.SIGKILL)
    try:
        output, _ = process.communicate(timeout=900)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    assert "it is started again" in " ".join(output.split())
    lines = windows(tmp_path)
    assert [line["window"] for line in lines] == [0, 1, 2, 3]
    assert [line["optimizer_step"] for line in lines] == [0, 1, 2, 3]
    for line in lines:
        assert line["stepped"]
        assert line["engine_logprob_difference_max"] <= 1e-3
        assert line["staleness_max"] == 0
        print({name: value for name, value in line.items() if name.startswith("engine") or name == "window"})
    for collection in range(4):
        found = rollouts(tmp_path, collection)
        assert len(found) == 8
        assert {rollout.weight_version for rollout in found.values()} == {collection}
        assert len({str(calls) for calls in ids_of(found).values()}) > 2
    assert port_problem(port) is None


def test_a_stale_head_is_named(model: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, model={"path": model}, engine=engine_of(free_port(), untie_embeddings=False))
    process = start(config)
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 2, output
    text = " ".join(output.split())
    assert "it has a stale head" in text
    assert "engine.untie_embeddings = true" in text
    assert len(windows(tmp_path)) == 1
