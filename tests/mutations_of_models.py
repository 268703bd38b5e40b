"""Wrong formulas about kinds of models: states that leak, experts that are full, adapters in the wrong place.

``contract/test_mutations.py`` puts each into the production code.
"""

from __future__ import annotations

from functools import partial

from mutations import Mutation

_ENGINE = partial(Mutation, module="evenstep.rollout.in_process")
_LORA = partial(Mutation, module="evenstep.train.lora")
_FILES = partial(Mutation, module="evenstep.model_files")

TEST = "tests/unit/train/test_hybrids.py::"

MODELS: list[Mutation] = [
    _ENGINE(
        name="mask of the prompt on a sampled token",
        why="Layers with a state take the mask of all tokens for that of the last one.",
        old="mask = None if step and has_states_alone else mask_BT",
        new="mask = mask_BT",
        killed_by=TEST + "test_left_padding_is_not_in_the_state[mamba]",
    ),
    _ENGINE(
        name="states of other rows",
        why="Rows that have ended leave the batch, and their states stay in it.",
        old="cache.reorder_cache(index)",
        new="[layer.batch_select_indices(index) for layer in cache.layers if hasattr(layer, 'batch_select_indices')]",
        killed_by=TEST + "test_left_padding_is_not_in_the_state[lfm2]",
    ),
    _LORA(
        name="factors of other experts",
        why="Stacked factors are read with the rank outside and the experts inside.",
        old="A_ERI = A.reshape(num_experts, -1, A.shape[-1])",
        new="A_ERI = A.reshape(-1, num_experts, A.shape[-1]).transpose(0, 1)",
        killed_by=TEST + "test_exports_load_again[qwen3_moe]",
    ),
    _LORA(
        name="adapters beside a scan",
        why="Layers whose weights a scan reads get adapters that never act.",
        old="and module is not head and name not in left_out",
        new="and module is not head and name not in ()",
        killed_by=TEST + "test_layers_that_a_scan_reads_are_not_adapted",
    ),
    _FILES(
        name="states of text models",
        why="A text model within another is not looked up under its family's name.",
        old='str(model_type).removesuffix("_text")',
        new="str(model_type)",
        killed_by=TEST + "test_all_types_with_a_state_are_known",
    ),
    _FILES(
        name="small capacities pass",
        why="A capacity factor is taken for a number of tokens, of which a few do no harm.",
        old="isinstance(value, (int, float)) and value > 0",
        new="isinstance(value, (int, float)) and value > 10",
        killed_by=TEST + "test_a_capacity_is_refused_before_loading[factor]",
    ),
]
