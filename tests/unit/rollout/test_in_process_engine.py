"""Behaviours locked here:

1. Log-probs of a batch of unequal prompts equal those of a one-row forward without a cache, to 1e-5, after temperature;
   greedy ones those at temperature 1. Both families of transformers models.
2. Greedy tokens are the arg max of that forward.
3. Tokens depend on the request's seed, not on its place in the batch, on a rerun, or on rows that finish early.
4. Draws follow the distribution; every token of it can be drawn, and only those.
5. An output ends with the stop id (part of it), at max_tokens, or where the context is full.
6. The weights can be trained afterwards: mode restored, gradients flow, nothing cached goes stale.
7. Requests that cannot be served as asked are refused by name.
8. Weights change between two batches, never within one, and their version with them.
9. An engine that is closed ends the batch that runs in another thread.
"""

import asyncio
import threading
from types import SimpleNamespace

import pytest
import torch

from evenstep.errors import EngineError
from evenstep.rollout.engine import BatchEngine, Completion, Request
from evenstep.rollout.in_process import InProcessEngine, _sample
from evenstep.types import Sampling
from tiny_models import VOCAB, tiny_model

PROMPTS = ((3,), (4, 5, 6, 7, 8, 9, 10), (1, 2), (9, 9, 9, 9), (20, 3, 11), (5, 1, 5, 1, 5))
EOS = 0


def engine_of(model, **settings):
    return InProcessEngine(model, **({"eos_token_ids": [EOS], "max_context_tokens": 40} | settings))


def request(prompt, *, temperature=1.0, seed: int | None = 0, max_tokens: int | None = 12, key=0, **more):
    sampling = Sampling(temperature=temperature, seed=seed, max_tokens=max_tokens, **more)
    return Request(prompt_ids=tuple(prompt), sampling=sampling, rollout_key=(key,))


def one_row_logprobs(model, prompt, output, temperature):
    ids = torch.tensor([[*prompt, *output]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / (temperature or 1.0), dim=-1)


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_logprobs_are_those_of_a_one_row_forward(family, temperature):
    model = tiny_model(family, dtype=torch.float32)
    requests = [request(p, temperature=temperature, seed=10 + i) for i, p in enumerate(PROMPTS)]
    completions = engine_of(model).generate_batch(requests)
    for asked, got in zip(requests, completions, strict=True):
        logprobs_TV = one_row_logprobs(model, asked.prompt_ids, got.output_ids, temperature)
        expected = logprobs_TV[torch.arange(len(got.output_ids)), list(got.output_ids)]
        assert torch.allclose(torch.tensor(got.logprobs), expected, rtol=0, atol=1e-5)
        if temperature == 0.0:
            assert tuple(logprobs_TV.argmax(-1).tolist()) == got.output_ids
    assert len({len(got.output_ids) for got in completions}) > 1 or temperature == 0.0  # some rows finished earlier


def test_tokens_follow_the_seed_not_the_place(model):
    requests = [request(p, seed=100 + i, key=i) for i, p in enumerate(PROMPTS * 3)]
    engine = engine_of(model)
    first = engine.generate_batch(requests)
    assert engine.generate_batch(requests) == first
    backwards = engine.generate_batch(requests[::-1])[::-1]
    alone = [asyncio.run(engine.generate(asked)) for asked in requests]
    ids = [got.output_ids for got in first]
    assert [got.output_ids for got in backwards] == ids == [got.output_ids for got in alone]
    assert len({len(output) for output in ids}) > 3  # rows finished at many different steps
    assert len({engine.generate_batch([request((3,), seed=s)])[0].output_ids for s in range(8)}) > 4


def test_requests_without_a_seed_draw_fresh_numbers(model):
    engine = engine_of(model, eos_token_ids=[VOCAB + 1])
    assert len({engine.generate_batch([request((3,), seed=None)])[0].output_ids for _ in range(4)}) == 4


def test_draws_follow_the_distribution(model):
    num_draws, temperature = 3_000, 0.8
    requests = [request((4, 5, 6), temperature=temperature, seed=i, max_tokens=1) for i in range(num_draws)]
    tokens = [got.output_ids[0] for got in engine_of(model).generate_batch(requests)]
    expected_V = one_row_logprobs(model, (4, 5, 6), (0,), temperature)[0].exp()
    found_V = torch.bincount(torch.tensor(tokens), minlength=VOCAB) / num_draws
    sigma_V = (expected_V * (1 - expected_V) / num_draws).sqrt()
    assert ((found_V - expected_V).abs() <= 4.5 * sigma_V + 1e-4).all()


def test_inverse_cdf_at_its_edges():
    logits_BV = torch.log(torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]] * 5))
    u_B = torch.tensor([0.0, 0.2499, 0.2501, 0.9999999, 1 - 2**-53], dtype=torch.float64)
    tokens_B, logprobs_B = _sample(logits_BV, torch.ones(5, dtype=torch.float64), u_B)
    assert tokens_B.tolist() == [1, 1, 3, 3, 3]
    assert torch.allclose(logprobs_B.exp(), torch.tensor([0.25, 0.25, 0.75, 0.75, 0.75], dtype=torch.float64))


def test_an_output_ends_at_a_stop_id_at_max_tokens_or_where_the_context_is_full(model):
    never = engine_of(model, eos_token_ids=[VOCAB + 1])
    (by_length,) = never.generate_batch([request((3, 4), max_tokens=5)])
    (by_context,) = never.generate_batch([request((3, 4), max_tokens=None)])
    assert (len(by_length.output_ids), by_length.finish_reason) == (5, "length")
    assert (len(by_context.output_ids), by_context.finish_reason) == (38, "length")
    stop = by_length.output_ids[2]
    (stopped,) = engine_of(model, eos_token_ids=[stop]).generate_batch([request((3, 4), max_tokens=5)])
    end = by_length.output_ids.index(stop) + 1
    assert (stopped.output_ids, stopped.finish_reason) == (by_length.output_ids[:end], "stop")


def test_unequal_limits_in_one_batch(model):
    limits = [1, 2, 3, 7, 11, 12]
    engine = engine_of(model, eos_token_ids=[VOCAB + 1])
    asked = [request(p, max_tokens=n, seed=n) for p, n in zip(PROMPTS, limits, strict=True)]
    assert [len(got.output_ids) for got in engine.generate_batch(asked)] == limits


def test_training_goes_on_after_generation():
    model = tiny_model(dtype=torch.float32)
    engine = engine_of(model, weight_version=4)
    model.train()
    before = engine.generate_batch([request((3, 4))])[0]
    assert model.training
    assert before.weight_version == 4
    assert all(parameter.requires_grad for parameter in model.parameters())
    model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False).logits.sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 0.05 * parameter.grad.sign()
    engine.weight_version = 5
    after = engine.generate_batch([request((3, 4))])[0]
    assert after.weight_version == 5
    expected = one_row_logprobs(model, (3, 4), after.output_ids, 1.0)
    expected_T = expected[torch.arange(len(after.output_ids)), list(after.output_ids)]
    assert torch.allclose(torch.tensor(after.logprobs), expected_T, atol=1e-5)
    assert before.logprobs != after.logprobs


@pytest.mark.parametrize(
    "bad, message",
    [
        (request(()), "at least one token"),
        (request((1,) * 40), "must fit 40 tokens, found a prompt of 40"),
        (request((1,), top_p=0.9), "top_p 0.9"),
        (request((1,), top_k=5), "top_k 5"),
        (request((1,), temperature=-1.0), "temperature -1.0"),
        (request((1,), max_tokens=0), "max_tokens must be at least 1, found 0"),
    ],
)
def test_requests_that_cannot_be_served(model, bad, message):
    with pytest.raises(EngineError, match=message) as caught:
        engine_of(model).generate_batch([request((1,)), bad])
    assert "request 1" in str(caught.value)


def test_engines_that_cannot_work(model):
    with pytest.raises(EngineError, match="at least one id that ends"):
        engine_of(model, eos_token_ids=[])
    with pytest.raises(EngineError, match="at least 2"):
        engine_of(model, max_context_tokens=1)


def test_it_is_a_batch_engine_and_serves_nothing_for_nothing(model):
    engine = engine_of(model)
    assert isinstance(engine, BatchEngine)
    assert engine.generate_batch([]) == []


def test_the_cache_argument_has_the_name_the_model_uses(model):
    seen = {}

    class Renamed(torch.nn.Module):
        """The same model behind the older name of the argument."""

        config, device = model.config, torch.device("cpu")

        def forward(self, input_ids, attention_mask, position_ids, past_key_values, use_cache, logits_to_keep):
            seen["length"] = past_key_values.get_seq_length()
            output = model(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
                **{engine_of(model)._cache_argument: past_key_values}, use_cache=use_cache,
                logits_to_keep=logits_to_keep,
            )  # fmt: skip
            return SimpleNamespace(logits=output.logits)

    asked = [request((3, 4), seed=5)]
    assert engine_of(Renamed()).generate_batch(asked) == engine_of(model).generate_batch(asked)
    assert seen["length"] > 2


def test_weights_and_version_change_between_two_batches(model):
    engine = engine_of(model)
    found: list[Completion] = []
    generation = threading.Thread(target=lambda: found.extend(engine.generate_batch([request((3,), max_tokens=2)])))
    with engine.between_batches():
        generation.start()
        generation.join(timeout=0.3)
        assert not found  # it waits
        engine.weight_version = 7
    generation.join(timeout=30)
    assert [completion.weight_version for completion in found] == [7]


def test_a_closed_engine_ends_its_batch(model, monkeypatch):
    engine = engine_of(model)
    seed = next(s for s in range(50) if len(one_output(model, s)) > 4)
    forward, num_forwards = InProcessEngine._forward, 0

    def counted(self, *args):
        nonlocal num_forwards
        num_forwards += 1
        if num_forwards == 2:
            engine.close()
        return forward(self, *args)

    monkeypatch.setattr(InProcessEngine, "_forward", counted)
    with pytest.raises(EngineError, match="was closed while it generated"):
        engine.generate_batch([request((3,), seed=seed)])
    assert num_forwards == 2


def one_output(model, seed):
    return engine_of(model).generate_batch([request((3,), seed=seed)])[0].output_ids
