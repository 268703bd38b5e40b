"""Models that carry a state from token to token, and experts that drop tokens: what is exact runs, the rest is refused.

1. Every causal LM of the installed transformers whose code keeps a state is known by type, with what wraps it.
2. Layouts packed and tree are refused with the reason: by the Trainer, before a model is loaded, and under another name
   by running a few rows, which also finds that a row moves when its neighbours' tokens change. Layout auto is padded.
3. The engine in this process pads prompts on the left, and selects rows of a batch when others have ended: its
   log-probs are the Trainer's. Without the mask the padding would be in the state. Models with a cache of their own are
   refused, and those that limit time steps in a scan alone.
4. Adapters on all linear layers leave out those whose weights a scan reads, and naming one of these is refused.
5. Exports of whole and adapted models load again, with experts, states and sinks; adapters alone as well.
6. Experts with a capacity are refused by their configuration, also before a model is loaded, and where it says nothing
   of it by running a few rows; a limit that is off is none.
7. A block and its mixer that a model both names for sharding are one group.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from evenstep import model_files
from evenstep.config import load_config
from evenstep.errors import ConfigError, EngineError, PlanError
from evenstep.model_files import STATEFUL_MODEL_TYPES, capacity_problem, layout_problem
from evenstep.preflight import check_model
from evenstep.rollout import in_process
from evenstep.rollout.engine import Request
from evenstep.rollout.in_process import InProcessEngine
from evenstep.train import Scorer, Trainer
from evenstep.train.checkpoint import export, export_adapter
from evenstep.train.lora import add_lora
from evenstep.train.models import load_tokenizer
from evenstep.train.verify import verify_layout
from evenstep.types import Row, Sampling
from tiny_hybrids import HYBRIDS
from tiny_models import VOCAB, tiny_model, true_float64
from tiny_rows import make_rows

STATE = re.compile(r"conv_state|recurrent_state|ssm_state|class Rwkv|class xLSTM|class \w*LightningAttention")


def trainer_of(model: Any, **options: Any) -> Trainer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Trainer(model, torch.optim.SGD(trained, lr=0.1), **options)


# ------------------------------------------------------------------------------------------------ states


def test_all_types_with_a_state_are_known() -> None:
    root = Path(transformers.__file__).parent / "models"
    found: set[str] = set()
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        name = model_type.removesuffix("_text").replace("-", "_")
        code = root / name / f"modeling_{name}.py"
        if code.is_file() and STATE.search(code.read_text(encoding="utf-8")):
            found.add(model_type.removesuffix("_text"))
    assert {"jamba", "lfm2", "mamba", "minimax", "qwen3_next", "rwkv"} <= found
    assert found <= STATEFUL_MODEL_TYPES
    text_of_another = {"model_type": "some_vl", "text_config": {"model_type": "qwen3_5_text"}}
    assert layout_problem(text_of_another, "tree") is not None


@pytest.mark.parametrize("family", HYBRIDS)
def test_layouts_are_refused_and_auto_is_padded(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, dtype=torch.float32)
    for layout in ("packed", "tree"):
        with pytest.raises(PlanError, match=rf"'{layout}' must keep rows apart, and layers of model type '{family}'"):
            trainer_of(model, layout=layout)
    trainer = trainer_of(model, layout="auto", max_tokens_per_gpu=40)
    assert tuple(trainer.backends) == ("padded",)
    assert trainer.prepare(make_rows()).plan.layout == "padded"
    config_of(tmp_path, {"model_type": family}, "plan.layout=padded")
    with pytest.raises(
        ConfigError, match=r"plan\.layout = 'packed' must keep rows apart, .* set plan\.layout = 'padded'"
    ):
        config_of(tmp_path, {"model_type": family}, "plan.layout=packed")


def config_of(folder: Path, settings: dict[str, Any], *changes: str) -> None:
    """What is checked of a model with these settings before it is loaded."""
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (folder / name).touch()
    (folder / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 4096}))
    example = Path(__file__).resolve().parents[3] / "examples" / "ledger.toml"
    check_model(load_config([example], [f"model.path={folder}", *changes]))


@pytest.mark.parametrize("family", HYBRIDS)
def test_rows_find_a_state_of_another_name(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "STATEFUL_MODEL_TYPES", frozenset())
    model = tiny_model(family, dtype=torch.float32)
    trained = dict(model.named_parameters())
    verify_layout(model, "padded", trained=trained)
    verify_layout(model, "fixed", trained=trained)
    with pytest.raises(PlanError, match=r"they differ by \d.* nats; use layout 'padded'"):
        verify_layout(model, "packed", trained=trained)
    moved = r"they differ by \d\S* nats, and by \d\S* nats when other rows' tokens change; use layout 'padded'"
    with pytest.raises(PlanError, match=moved):
        verify_layout(model, "tree", trained=trained)


# ------------------------------------------------------------------------------------------------ generation

PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6), (5, 3), (8,), (9, 7, 9, 3, 2))


def deviation(family: str) -> float:
    """Largest difference, in nats, of the engine's log-probs from the Trainer's, over outputs of several lengths."""
    with true_float64(family):
        model = tiny_model(family)
        engine = InProcessEngine(model, eos_token_ids=[VOCAB], max_context_tokens=40)  # an id that is never drawn
        requests = [
            Request(
                rollout_key=(0, 0, i, 0),
                prompt_ids=prompt,
                sampling=Sampling(temperature=1.0, max_tokens=(3, 9, 4, 3)[i], seed=i),
            )
            for i, prompt in enumerate(PROMPTS)
        ]
        found = engine.generate_batch(requests)
        rows = [
            Row(
                row_id=i,
                rollout_id=i,
                group_id=0,
                token_ids=[*prompt, *completion.output_ids],
                loss_mask=[0] * len(prompt) + [1] * len(completion.output_ids),
            )
            for i, (prompt, completion) in enumerate(zip(PROMPTS, found, strict=True))
        ]
        scored = Scorer(model, max_tokens_per_gpu=60).score(rows)
    assert len(found[1].output_ids) == 9  # goes on when the others have ended
    return max(
        abs(a - b)
        for i, completion in enumerate(found)
        for a, b in zip(completion.logprobs, scored[i][len(PROMPTS[i]) :].tolist(), strict=True)
    )


@pytest.mark.parametrize("family", HYBRIDS)
def test_left_padding_is_not_in_the_state(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert deviation(family) < 1e-9
    left_padded = in_process._left_padded

    def without_mask(*args: Any) -> Any:
        ids_BT, mask_BT, positions_BT = left_padded(*args)
        return ids_BT, torch.ones_like(mask_BT), positions_BT

    monkeypatch.setattr(in_process, "_left_padded", without_mask)
    assert deviation(family) > 1e-2


@pytest.mark.parametrize("model_type", ["minimax", "rwkv"])
def test_models_with_a_cache_of_their_own_do_not_generate(model_type: str) -> None:
    shape = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
    config = AutoConfig.for_model(model_type, **shape, num_attention_heads=2, num_key_value_heads=2, head_dim=8)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(EngineError, match=rf"models of type '{model_type}' keep one of their own; generate on servers"):
        InProcessEngine(model, eos_token_ids=[0], max_context_tokens=40)


@pytest.mark.parametrize(("limit", "is_refused"), [((0.0, float("inf")), False), ((0.01, 0.1), True)])
def test_a_limit_that_a_scan_alone_knows_does_not_generate(limit: tuple[float, float], is_refused: bool) -> None:
    shape = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "num_heads": 4}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("mamba2", **shape, head_dim=8, n_groups=1, time_step_limit=limit)
    )
    expected = pytest.raises(EngineError, match=r"within \(0\.01, 0\.1\) only where it scans many")
    with expected if is_refused else contextlib.nullcontext():
        InProcessEngine(model, eos_token_ids=[0], max_context_tokens=40)


# ------------------------------------------------------------------------------------------------ adapters, exports


def test_layers_that_a_scan_reads_are_not_adapted() -> None:
    pytest.importorskip("peft")
    adapted = add_lora(tiny_model("mamba", dtype=torch.float32), rank=2, alpha=4.0, seed=0)
    names = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in adapted.named_parameters() if ".lora_" in name}
    assert names == {"in_proj"}
    for name in ("dt_proj", "x_proj", "out_proj"):
        words = rf"'{name}' names \S*mixer\.{name}, a layer of a state-space mixer .* use 'all-linear'"
        with pytest.raises(ConfigError, match=words):
            add_lora(tiny_model("mamba", dtype=torch.float32), rank=2, alpha=4.0, seed=0, target_modules=[name])
    lfm2 = add_lora(tiny_model("lfm2"), rank=2, alpha=4.0, seed=0, target_modules=["out_proj"])  # that of a convolution
    assert any("conv.out_proj.lora_A" in name for name, _ in lfm2.named_parameters())


def test_stacked_experts_cannot_be_named() -> None:
    pytest.importorskip("peft")
    for family, name in (("gpt_oss", "experts"), ("qwen3_moe", "gate")):
        with pytest.raises(ConfigError, match=rf"must be linear layers, found that '{name}' is a \w+"):
            add_lora(tiny_model(family), rank=2, alpha=4.0, seed=0, target_modules=[name])


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(1, 19)[None], use_cache=False).logits


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing", "ignore:The following (rank|alpha)_pattern")  # peft's
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "mixtral", *HYBRIDS])
def test_exports_load_again(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    tokenizer, _ = load_tokenizer("evenstep:ledger")
    base = tiny_model(family, dtype=torch.float32, attention="eager")
    expected = logits_of(base)
    largest = float(expected.abs().max())
    export(tmp_path / "whole", base, tokenizer)

    def loaded(name: str) -> torch.Tensor:
        return logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32))

    assert float((loaded("whole") - expected).abs().max()) < 1e-5 * largest

    model = add_lora(base, rank=2, alpha=4.0, seed=0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    adapted = logits_of(model)
    assert float((adapted - expected).abs().max()) > 1e-2 * largest
    export(tmp_path / "merged", model, tokenizer)
    export_adapter(tmp_path / "adapter", model)
    assert float((loaded("merged") - adapted).abs().max()) < 1e-5 * float(adapted.abs().max())
    again = peft.PeftModel.from_pretrained(
        tiny_model(family, dtype=torch.float32, attention="eager"), tmp_path / "adapter"
    )
    assert torch.equal(logits_of(again), adapted)


# ------------------------------------------------------------------------------------------------ capacity


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_type": "my_moe", "capacity_factor": 1.25}, r"capacity_factor = 1\.25"),
        ({"model_type": "my_moe", "text_config": {"moe_expert_capacity_factor": 2}}, "moe_expert_capacity_factor = 2"),
        ({"model_type": "switch_transformers"}, "model type 'switch_transformers' drop tokens"),
        ({"model_type": "nllb-moe", "expert_capacity": 64}, "expert_capacity = 64"),
    ],
    ids=["factor", "of the text model", "by type", "number"],
)
def test_a_capacity_is_refused_before_loading(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"must not depend on the other rows .*{words}.* set the limit to null"):
        config_of(tmp_path, settings)


def test_no_capacity_is_none() -> None:
    for settings in ({"capacity_factor": None}, {"capacity_factor": -1.0}, {"text_config": {"expert_capacity": 0}}):
        assert capacity_problem({"model_type": "my_moe"} | settings) is None


def test_a_capacity_is_refused_by_the_trainer() -> None:
    model = tiny_model("mixtral", dtype=torch.float32)
    model.config.expert_capacity = 8
    with pytest.raises(PlanError, match=r"expert_capacity = 8\) in this MixtralForCausalLM; set the limit to None"):
        trainer_of(model)


@pytest.mark.parametrize("layout", ["fixed", "padded", "packed", "tree"])
def test_rows_find_experts_that_drop_tokens(layout: str) -> None:
    """Routers that send no more tokens to an expert than an even share: a configuration that says nothing of it."""
    model = tiny_model("mixtral", dtype=torch.float32)
    verify_layout(model, layout)

    def drop(_: Any, args: Any, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Any:
        logits_TE, scores_TX, experts_TX = output
        is_taken = torch.nn.functional.one_hot(experts_TX.flatten(), logits_TE.shape[1])
        place = (is_taken.cumsum(0) * is_taken).sum(1).view_as(experts_TX)  # of each token in its expert's queue
        capacity = -(-experts_TX.numel() // logits_TE.shape[1])
        return logits_TE, scores_TX * (place <= capacity), experts_TX

    for module in model.modules():
        if type(module).__name__ == "MixtralTopKRouter":
            module.register_forward_hook(drop)
    with pytest.raises(PlanError, match=r"they differ by \d"):
        trainer_of(model, layout=layout)
