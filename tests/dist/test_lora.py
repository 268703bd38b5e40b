"""Training adapters instead of whole weights, on one and two gloo ranks.

1. Replicated and with FSDP2, in every layout, with and without activation checkpointing, also with the output head
   adapted: loss, gradient of every adapter parameter and log-probs equal the oracle on the same adapted model to 1e-12;
   so do the weights after an SGD step, and loss, gradient and log-probs again now that B is not zero.
2. Base weights keep their bits; ranks have the same adapters; the global random state is left alone; another scale
   gives another gradient.
3. With the adapters off, scoring gives the base model's log-probs bit for bit, and the next gradient is whole.
4. A checkpoint holds only the adapters; loaded into a fresh model, weights, moments and the next step are bit-equal.
5. The exported folder loads without peft and has the adapted model's logits, tied and transposed weights included; the
   exported adapter gives them on top of the base model; the model itself is not changed.
6. The engine generates with the adapters: greedy tokens of the adapted and of the merged model agree.
7. The base model may be in bfloat16: adapters and log-probs are float32 then, adapters train, base weights keep their
   bits.
8. Without peft, and for what cannot be exact, there is an error that says what to do.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PhimoeConfig, PhimoeForCausalLM

import evenstep.train
import oracle
from evenstep.errors import ConfigError, StateError
from evenstep.rollout.engine import Request
from evenstep.rollout.in_process import InProcessEngine
from evenstep.train.checkpoint import Trained, export, export_adapter, load_checkpoint, save_checkpoint
from evenstep.train.distributed import copy_full_weights
from evenstep.train.lora import adapters_off, add_lora, is_lora
from evenstep.train.models import load_model
from evenstep.types import Row, Sampling
from ranks import once, run_ranks
from step_cases import CaseOutcome, StepCase, build, run_built, whole, whole_weights
from tiny_models import VOCAB, tiny_model, true_float64
from tiny_rows import make_rows, with_old_logprobs

peft = pytest.importorskip("peft")

LORA: dict[str, Any] = {"rank": 3, "alpha": 8, "seed": 11}
HEAD: dict[str, Any] = LORA | {"target_modules": ["v_proj", "down_proj", "lm_head"]}
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"layout": "padded", "max_tokens_per_gpu": 30},
    "packed": {"layout": "packed", "max_tokens_per_gpu": 30},
    "fixed": {"layout": "fixed", "micro_batch_rows": 2},
}


def adapted(case: StepCase, lora: dict[str, Any]) -> Any:
    return add_lora(tiny_model(**case.model), **lora)


def trained(model: Any) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def trainer_of(case: StepCase, model: Any) -> evenstep.train.Trainer:
    if case.is_sharded:
        evenstep.train.shard(model)
    optimizer = getattr(torch.optim, case.optimizer)(trained(model), **case.optimizer_args)
    return evenstep.train.Trainer(model, optimizer, **case.trainer)


@once
def jobs(world_size: int) -> dict[str, tuple[StepCase, dict[str, Any]]]:
    """Name -> (case, arguments of add_lora)."""
    with true_float64():
        rows = with_old_logprobs(make_rows(((1, 2), (2, 1)), max_tokens=10), tiny_model())
    found = {}
    for is_sharded in (False, True)[:world_size]:
        for layout, options in LAYOUTS.items():
            for is_checkpointed in (False, True)[: 1 if world_size == 2 and not is_sharded else 2]:
                name = f"{layout}-{'fsdp2' if is_sharded else 'replicated'}{'-checkpointed' * is_checkpointed}"
                case = StepCase(
                    name=name,
                    rows=rows,
                    model={"family": "llama" if layout == "padded" else "qwen3"},
                    trainer=options | {"activation_checkpointing": is_checkpointed},
                    is_sharded=is_sharded,
                    keeps_weights=True,
                    forbids_float32=is_sharded and layout == "packed" and not is_checkpointed,
                )
                found[name] = (case, HEAD if layout == "packed" and is_checkpointed else LORA)
    return found


# ------------------------------------------------------------------------------------------------ the step


def two_steps(case: StepCase, lora: dict[str, Any]) -> tuple[CaseOutcome, CaseOutcome, dict[Any, Any], dict[Any, Any]]:
    """(first step, second step, log-probs with the adapters off in between, those of the base model)."""
    with case.precision():
        _, base = build(case)
        expected = base.gather(base.score(case.rows))
        model = adapted(case, lora)
        trainer = trainer_of(case, model)
        num_trained = len(trained(model))
        first = run_built(case, model, trainer)
        with adapters_off(model):
            found = trainer.gather(trainer.score(case.rows))
        second = run_built(case, model, trainer)
        assert len(trained(model)) == num_trained  # peft's own switch leaves those of a sharded root frozen
        return first, second, found, expected


def all_steps(cases: list[tuple[StepCase, dict[str, Any]]]) -> list[Any]:
    """Runs on every rank."""
    return [two_steps(case, lora) for case, lora in cases]


@once
def outcomes(world_size: int) -> dict[str, list[Any]]:
    """Name -> what every rank found; one process needs no process group."""
    cases = list(jobs(world_size).values())
    if world_size == 1:
        by_rank = [all_steps(cases)]
    else:
        by_rank = run_ranks(all_steps, world_size, cases, timeout_s=170, group_timeout_s=60)
    return {case.name: [found[i] for found in by_rank] for i, (case, _) in enumerate(cases)}


def assert_oracle(case: StepCase, model: Any, found: CaseOutcome) -> None:
    with case.precision():
        expected = oracle.oracle_step(model, case.rows)
    assert abs(found.loss - expected.loss) <= 1e-12 * max(1.0, abs(expected.loss))
    names = [name for name in expected.gradient if "lora_" in name]
    assert names
    ours, theirs = ({name: part[name] for name in names} for part in (found.gradient, expected.gradient))
    assert oracle.relative_error(ours, theirs) <= 1e-12
    ours, theirs = ({repr(row_id): v.double() for row_id, v in part.logprobs.items()} for part in (found, expected))
    assert oracle.relative_error(ours, theirs) <= 1e-12


NAMES = [(world_size, name) for world_size in (1, 2) for name in jobs(world_size)]


@pytest.mark.parametrize("world_size, name", NAMES)
def test_steps_equal_the_oracle(world_size: int, name: str) -> None:
    case, lora = jobs(world_size)[name]
    by_rank = outcomes(world_size)[name]
    first, second, off, base_logprobs = by_rank[0]
    for other in by_rank[1:]:
        assert (other[0].loss, other[1].loss) == (first.loss, second.loss)
        for ours, theirs in zip(first.weights + second.weights, other[0].weights + other[1].weights, strict=True):
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)

    with case.precision():
        model = adapted(case, lora)
    start = whole_weights(model)
    assert_oracle(case, model, first)
    assert all(torch.equal(first.weights[0][key], start[key]) for key in start)
    adapters = {key: value for key, value in start.items() if "lora_" in key}
    gradient = {key: first.gradient[key] for key in adapters}
    stepped = oracle.sgd_step(adapters, gradient, lr=0.1)
    assert oracle.relative_error({key: first.weights[1][key] for key in adapters}, stepped) <= 1e-12

    model.load_state_dict(first.weights[1], strict=False)
    assert all(float(part.abs().max()) > 0 for key, part in whole_weights(model).items() if "lora_B" in key)
    assert_oracle(case, model, second)
    assert all(float(second.gradient[key].abs().max()) > 0 for key in adapters)
    for key in start.keys() - adapters.keys():
        assert torch.equal(second.weights[1][key], start[key]), key

    for row in case.rows:
        assert torch.equal(off[row.row_id], base_logprobs[row.row_id])
        assert not torch.equal(second.logprobs[row.row_id], base_logprobs[row.row_id])
    assert len(off) == len(case.rows)


def test_the_seed_decides_and_the_scale_counts() -> None:
    before = torch.get_rng_state()
    rows = make_rows()

    def gradient(**settings: Any) -> dict[str, Any]:
        base = tiny_model()
        torch.set_rng_state(before)
        model = add_lora(base, **(LORA | settings))
        assert torch.equal(torch.get_rng_state(), before)
        with true_float64():
            full = oracle.oracle_step(model, rows).gradient
        return {name: part for name, part in full.items() if "lora_" in name}

    exact = gradient()
    torch.manual_seed(99)
    assert oracle.relative_error(gradient(), exact) == 0
    for wrong in ({"seed": 12}, {"alpha": 16}):
        assert oracle.relative_error(gradient(**wrong), exact) > 1e-2


# ------------------------------------------------------------------------------------------------ checkpoints


def moments(optimizer: torch.optim.Optimizer, model: Any) -> dict[str, Any]:
    """Parameter name -> its moments and step count, whole."""
    return {
        f"{name}/{key}": whole(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def save_and_load(folder: Path, case: StepCase) -> dict[str, Any]:
    """Runs on every rank: train, save, load into a fresh model whose adapters were drawn otherwise, train both on."""
    with case.precision():
        model = adapted(case, LORA)
        trainer = trainer_of(case, model)
        run_built(case, model, trainer)
        saved = save_checkpoint(
            folder, {"policy": Trained(model, trainer.optimizer)}, {"window": 1, "collection": 1}, keep=1
        )
        fresh = adapted(case, LORA | {"seed": 12})
        other = trainer_of(case, fresh)
        state = load_checkpoint(saved, {"policy": Trained(fresh, other.optimizer)})
        pairs = {
            "weights": (whole_weights(model), whole_weights(fresh)),
            "moments": (moments(trainer.optimizer, model), moments(other.optimizer, fresh)),
        }
        for runner, owner in ((trainer, model), (other, fresh)):
            run_built(case, owner, runner)
        pairs["next"] = (whole_weights(model), whole_weights(fresh))
    names = sorted(FileSystemReader(saved / "dcp").read_metadata().state_dict_metadata)
    return {"state": state, "pairs": pairs, "names": names, "num_trained": len(trained(model))}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # saved by one process
@pytest.mark.parametrize("world_size, is_sharded", [(1, False), (2, True)])
def test_checkpoints_hold_the_adapters_alone(tmp_path: Path, world_size: int, is_sharded: bool) -> None:
    case = StepCase(
        name="checkpoint",
        rows=make_rows(((1, 2),)),
        model={"is_tied": True},
        trainer={"layout": "padded", "max_tokens_per_gpu": 30},
        is_sharded=is_sharded,
        optimizer="AdamW",
        optimizer_args={"lr": 0.01},
    )
    by_rank = run_ranks(save_and_load, world_size, tmp_path, case) if is_sharded else [save_and_load(tmp_path, case)]
    for found in by_rank:
        assert (found["state"]["window"], found["state"]["collection"]) == (1, 1)
        for what, (ours, theirs) in found["pairs"].items():
            assert ours.keys() == theirs.keys() != set(), what
            assert all(torch.equal(ours[name], theirs[name]) for name in ours), what
        weights = [n for n in found["names"] if n.startswith("policy.") and not n.startswith("policy.optimizer.")]
        assert len(weights) == found["num_trained"]
        assert all(".lora_" in name for name in weights)
        states = [name for name in found["names"] if name.startswith("policy.optimizer.state.")]
        assert len(states) == 3 * found["num_trained"]
        assert all(".lora_" in name for name in states)


# ------------------------------------------------------------------------------------------------ exports


def moved(model: Any, *, scale: float = 0.1) -> Any:
    """The model with adapters away from zero; the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trained(model):
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter))
    return model


def logits_of(model: Any) -> torch.Tensor:
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def export_both(folder: Path) -> torch.Tensor:
    """Runs on every rank: export the adapted ledger model, sharded; gives the logits expected."""
    base, tokenizer = load_model("evenstep:ledger", dtype=torch.float32)
    model = moved(add_lora(base, **LORA), scale=0.02)
    expected = logits_of(model)
    sampler = copy.deepcopy(model)
    for parameter in trained(sampler):
        parameter.data.zero_()
    evenstep.train.shard(model)
    before = whole_weights(model)
    export(folder / "merged", model, tokenizer)
    export_adapter(folder / "adapter", model)
    after = whole_weights(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    copy_full_weights(model, sampler)  # the whole copy that an engine uses
    assert torch.equal(logits_of(sampler), expected)
    assert torch.equal(logits_of(model), expected)
    return expected


LOAD_WITHOUT_PEFT = """
import sys, torch
sys.modules["peft"] = None  # any import of it fails
from transformers import AutoModelForCausalLM, AutoTokenizer
AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
with torch.no_grad():
    torch.save(model(input_ids=torch.arange(2, 20)[None], use_cache=False).logits, sys.argv[2])
"""


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # asked by peft
def test_exports_load(tmp_path: Path) -> None:
    expected = run_ranks(export_both, 2, tmp_path)[0]
    loading = [sys.executable, "-c", LOAD_WITHOUT_PEFT, str(tmp_path / "merged"), str(tmp_path / "logits")]
    subprocess.run(loading, check=True, timeout=60)
    largest = float(expected.abs().max())
    assert float((torch.load(tmp_path / "logits") - expected).abs().max()) < 1e-5 * largest

    base, _ = load_model("evenstep:ledger", dtype=torch.float32)
    assert float((logits_of(base) - expected).abs().max()) > 1e-2 * largest
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.equal(logits_of(again), expected)
    assert {path.name for path in tmp_path.iterdir()} == {"merged", "adapter", "logits"}
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def gpt2() -> Any:
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": VOCAB, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=None, eos_token_id=None)).eval()


def phimoe() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return PhimoeForCausalLM(PhimoeConfig(**shape, **heads, num_local_experts=4)).eval()


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tied": (lambda: tiny_model(dtype=torch.float32, is_tied=True), LORA),
    "head": (lambda: tiny_model("llama", dtype=torch.float32), HEAD),
    "router": (phimoe, LORA),  # its router is a linear layer, and stays as it is
    "transposed": (gpt2, LORA),  # weights are [in, out], and square ones look the same
    "bfloat16": (lambda: tiny_model(dtype=torch.bfloat16), LORA),
}


@pytest.mark.parametrize("name", MODELS)
def test_merged_weights_are_the_adapted_model(tmp_path: Path, name: str) -> None:
    make, lora = MODELS[name]
    _, tokenizer = load_model("evenstep:ledger", dtype=torch.float32)
    model = moved(add_lora(make(), **lora))
    (tmp_path / "merged").mkdir()  # an older one is replaced
    export(tmp_path / "merged", model, tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert loaded.config.tie_word_embeddings == (name in ("tied", "transposed"))
    theirs = copy.deepcopy(model).merge_and_unload().state_dict()
    assert loaded.state_dict().keys() == theirs.keys()
    for key, value in loaded.state_dict().items():
        assert value.dtype == theirs[key].dtype
        assert torch.allclose(value, theirs[key], rtol=1e-2 if name == "bfloat16" else 1e-6, atol=1e-6), key
    if name != "bfloat16":
        assert float((logits_of(loaded) - logits_of(model)).abs().max()) < 1e-5
    assert float((logits_of(loaded) - logits_of(make())).abs().max()) > 1e-3


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # asked by peft
def test_several_sets_of_adapters_are_not_merged(tmp_path: Path) -> None:
    _, tokenizer = load_model("evenstep:ledger", dtype=torch.float32)
    model = add_lora(tiny_model(dtype=torch.float32), **LORA)
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match=r"lora_A\.second.*export_adapter"):
        export(tmp_path / "merged", model, tokenizer)
    assert not (tmp_path / "merged").exists()


# ------------------------------------------------------------------------------------------------ the engine, dtypes


def test_the_engine_generates_with_the_adapters() -> None:
    model = moved(add_lora(tiny_model(dtype=torch.float32), **LORA), scale=0.3)
    merged = copy.deepcopy(model).merge_and_unload()
    requests = [
        Request(prompt_ids=prompt, sampling=Sampling(temperature=0.0, max_tokens=12), rollout_key=(0,))
        for prompt in ((3,), (4, 5, 6, 7), (9, 1))
    ]

    def tokens(policy: Any) -> list[tuple[int, ...]]:
        engine = InProcessEngine(policy, eos_token_ids=[VOCAB + 1], max_context_tokens=40)
        return [completion.output_ids for completion in engine.generate_batch(requests)]

    adapted_base = model.get_base_model()  # peft's own forward hides what the cache argument is called
    with_adapters = tokens(adapted_base)
    assert with_adapters == tokens(merged)
    with adapters_off(model):
        assert tokens(adapted_base) == tokens(tiny_model(dtype=torch.float32)) != with_adapters
    assert tokens(adapted_base) == with_adapters


def half_precision(rows: list[Row]) -> tuple[list[str], dict[Any, torch.Tensor], Any]:
    """Runs on every rank."""
    model = add_lora(tiny_model(dtype=torch.bfloat16), **LORA)
    base = {name: value for name, value in whole_weights(model).items() if "lora_" not in name}
    if torch.distributed.get_world_size() > 1:
        evenstep.train.shard(model)
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    trainer = evenstep.train.Trainer(model, optimizer, layout="packed", max_tokens_per_gpu=30)
    for _ in range(2):
        result = trainer.forward_backward(rows)
        trainer.optim_step()
    after = whole_weights(model)
    assert all(torch.equal(after[name], value) for name, value in base.items())
    dtypes = sorted({str(parameter.dtype) for parameter in trained(model)})
    return dtypes, trainer.gather(result.logprobs), after


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_base_model_may_be_in_half_precision(world_size: int) -> None:
    rows = make_rows(((1, 2),))
    dtypes, logprobs, after = run_ranks(half_precision, world_size, rows)[0]
    assert dtypes == ["torch.float32"]
    assert all(values.dtype == torch.float32 for values in logprobs.values())
    assert any(float(value.abs().max()) > 0 for name, value in after.items() if "lora_B" in name)


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"rank": 0}, "rank must be a whole number from 1 on, found 0"),
        ({"rank": 2.0}, "rank must be a whole number"),
        ({"alpha": 0}, "alpha must be above 0"),
        ({"dropout": 0.1}, r"dropout 0, found 0\.1.*leave it out"),
        ({"target_modules": "q_proj"}, r"write \['q_proj'\]"),
        ({"target_modules": []}, "at least one linear layer.*this model has: down_proj, gate_proj"),
        ({"target_modules": ["q_proj", "query"]}, "no layer 'query' in Qwen3ForCausalLM; this model has"),
        ({"target_modules": ["embed_tokens"]}, "'embed_tokens' is a Embedding"),
        ({"target_modules": ["lm_head"]}, "'lm_head' has a weight that this model uses in a second place"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], message: str) -> None:
    base = tiny_model(is_tied=True)
    names = [name for name, _ in base.named_parameters()]
    with pytest.raises(ConfigError, match=message):
        add_lora(base, **(LORA | settings))
    assert [name for name, _ in base.named_parameters()] == names
    assert all(parameter.requires_grad for parameter in base.parameters())


def test_a_router_is_no_linear_layer() -> None:
    with pytest.raises(ConfigError, match="'router' is a PhimoeTopKRouter"):
        add_lora(phimoe(), **(LORA | {"target_modules": ["q_proj", "router"]}))
    assert not any("router" in name for name, _ in add_lora(phimoe(), **LORA).named_parameters() if "lora" in name)


def test_wrong_models_are_refused(tmp_path: Path) -> None:
    base = tiny_model()
    with pytest.raises(ConfigError, match="adapts a causal LM, found Qwen3Model"):
        add_lora(base.model, **LORA)
    assert not is_lora(base)
    for refused in (lambda: adapters_off(base).__enter__(), lambda: export_adapter(tmp_path / "adapter", base)):
        with pytest.raises(StateError, match="needs a model with adapters, found Qwen3ForCausalLM"):
            refused()
    model = add_lora(base, **LORA)
    assert is_lora(model)
    with pytest.raises(StateError, match="found one that has adapters"):
        add_lora(model, **LORA)


def test_without_peft_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'evenstep\[lora\]'"):
        add_lora(tiny_model(), **LORA)
    assert not is_lora(tiny_model())
