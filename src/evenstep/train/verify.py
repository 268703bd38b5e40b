"""Does a model give each row the log-probs and the gradient it has alone, in this layout? Asked once, before training.

A few short rows, most of which begin alike, run together as they will in training, and one by one through the model's
own forward with plain attention; where the model sees images, so do some of the rows. Both must agree, whatever stands
in the neighbours' tokens and images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from evenstep.errors import PlanError
from evenstep.media import Media, VisionSpec
from evenstep.model_files import max_context_tokens
from evenstep.train import distributed
from evenstep.train.attention import Backend, attention_for, attention_named, choose_backend
from evenstep.train.collate import Cell, collate
from evenstep.train.critic import is_critic, value_inputs
from evenstep.train.logprobs import cell_logprobs
from evenstep.train.vision import spec_of
from evenstep.types import Row

__all__ = ["num_embeddings", "num_outputs", "num_positions", "verify_layout"]

IMAGE_ROWS, IMAGE_START = (0, 2), 1  # which rows have an image of two tokens, and where
SHARED, LENGTHS = (4, 4, 2, 4, 0), (9, 7, 6, 4, 3)  # tokens in common with the first row, and in all
WINDOW = 3  # tokens that layers with a sliding window see meanwhile: one of thousands would be reached by no row
NATS = 1e-3  # rounding is below 1e-5, a row that sees another one is off by more than 0.1
# a parameter's gradient, relative to its norm, but to no less than so much of the whole gradient's norm: some
# gradients, as of a bias that shifts all scores alike, are 0 but for rounding
RELATIVE, LEAST = 1e-3, 1e-2
HALF = 100.0  # times as much, where the forward computes in half precision or TF32


def num_embeddings(model: PreTrainedModel) -> int:
    """Token ids the model has an embedding for."""
    embeddings = model.get_input_embeddings()
    return embeddings.num_embeddings if isinstance(embeddings, torch.nn.Embedding) else int(model.config.vocab_size)


def num_outputs(model: PreTrainedModel) -> int:
    """Token ids the model can give a log-prob: some embed ids, as of images, that their output head has not."""
    width = getattr(model.get_output_embeddings(), "out_features", None)
    return num_embeddings(model) if width is None else min(int(width), num_embeddings(model))


def num_positions(model: PreTrainedModel) -> int | None:
    """Positions that the model has a table of, learned one by one as GPT-2's are; None: angles, or something else."""
    limit, tokens = max_context_tokens(model.config.to_dict()), model.get_input_embeddings()
    tables = [m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m is not tokens]
    # some tables have two more in front, for padding
    return limit if limit is not None and any(limit <= t.num_embeddings <= limit + 2 for t in tables) else None


def verify_layout(
    model: PreTrainedModel,
    layout: str,
    *,
    backend: Backend | None = None,
    compute_dtype: str | None = None,
    trained: Mapping[str, nn.Parameter] | None = None,
) -> None:
    """Compare a few rows laid out together with each of them alone, through the model's own logits.

    Finds models whose attention cannot be told where a row ends, that look ahead into padding, whose gradient is not
    that of their output, or that change the logits after the output head in a way evenstep does not know. Of a critic,
    whose head may still be 0, the hidden states before it are compared as well. Gradients that were there stay.

    Args:
        model: replicated, or sharded: then every rank calls this.
        layout: of micro-batches.
        backend: of attention; None: the one that ``choose_backend`` finds.
        compute_dtype: of the forward pass in training. The comparison is made in the parameters' dtype, but where
            attention needs half precision.
        trained: parameters whose gradients are compared, by name; taken before a sharded model ran for the first
            time. None or empty: the forward pass alone.

    Raises:
        PlanError: a log-prob (or hidden state) differs by more than 1e-3, or a parameter's gradient by more than 1e-3
            of its norm; names it, with both numbers. On every rank.
    """
    settings: dict[str, Any] = {"compute_dtype": compute_dtype, "is_trained": bool(trained)}
    backend = choose_backend(model, layout, "auto", **settings) if backend is None else backend
    trained = trained or {}
    own = str(model.config._attn_implementation)
    needs_half = compute_dtype == "bfloat16" and (backend == "flash" or (backend is None and "flash" in own))
    device = next(model.parameters()).device
    is_half = needs_half or any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    is_half = is_half or (device.type == "cuda" and torch.get_float32_matmul_precision() != "highest")
    was_training = model.training
    before = {name: parameter.grad for name, parameter in trained.items()}
    model.eval()
    try:
        for parameter in trained.values():
            parameter.grad = None
        half = torch.autocast(device.type, torch.bfloat16, enabled=needs_half, cache_enabled=False)
        with _short_windows(model), half:
            problem = _problem(model, layout, backend, trained, seed=0, slack=HALF if is_half else 1.0)
            if problem is not None:  # two experts that are equal but for rounding would not be so for other tokens too
                problem = _problem(model, layout, backend, trained, seed=1, slack=HALF if is_half else 1.0)
    finally:
        model.train(was_training)
        for name, parameter in trained.items():
            parameter.grad = before[name]
    if problem is not None:
        advice = "this model cannot be trained exactly" if backend is None else "use layout 'padded'"
        raise PlanError(
            f"layout {layout!r} must give each row the log-probs and gradient it has alone, and with "
            f"{type(model).__name__} {problem}; {advice}"
        )


def _problem(
    model: PreTrainedModel,
    layout: str,
    backend: Backend | None,
    trained: Mapping[str, nn.Parameter],
    *,
    seed: int,
    slack: float,
) -> str | None:
    """What differs, or None."""
    is_sharded = distributed.is_sharded(model)
    vision = None if is_critic(model) or layout == "tree" else spec_of(model)
    rows = _rows(num_outputs(model), seed, vision)
    probe = _Probe(model, backend, np.random.default_rng(seed))
    shape: dict[str, Any] = {"multiple": 1, "num_shape_rows": 1, "dtype": torch.float64}
    shape["device"] = next(model.parameters()).device
    together: dict[str, Any] = shape | {"layout": layout, "vision": vision}
    cell, other = (collate(each, [0.0] * len(each), **together) for each in (rows, _changed(rows)))
    with torch.no_grad():
        moved = probe.together(cell)[0] - probe.together(other)[0]
    num_first = rows[0].num_trained_tokens

    def difference() -> tuple[Tensor, dict[str, float], dict[str, float]]:
        """(outputs, norm of each gradient of the rows alone, and of what the gradient together differs by)."""
        for parameter in trained.values():
            parameter.grad = None
        alone: list[Tensor] = []
        for i, row in enumerate(rows):
            distributed.set_sync(model, is_last=i == len(rows) - 1)
            found = probe.alone(collate([row], [0.0], layout="padded", vision=vision if row.media else None, **shape))
            if trained:
                probe.loss(found, sum(map(len, alone))).backward()
            alone.append(found.detach())
        norms = _norms(trained, is_sharded=is_sharded)
        distributed.set_sync(model, is_last=True)
        found, anchor = probe.together(cell)
        if trained:
            (anchor - probe.loss(found, 0)).backward()
        return torch.cat(alone) - found.detach(), norms, _norms(trained, is_sharded=is_sharded)

    with torch.set_grad_enabled(bool(trained)):
        outputs, norms, differences = difference()
    # weights that are not finite are found, with their rows, when they are trained
    worst = {"alone": outputs, "moved": moved[:num_first]}
    numbers = {name: float(values.abs().nan_to_num(0.0).max()) for name, values in worst.items()}
    if is_sharded:  # ranks decide alike, also where rounding is not
        numbers = distributed.reduce_sums({}, numbers)[1]
    problems = [f"by {numbers['alone']:.3g} nats"] if numbers["alone"] > NATS * slack else []
    if numbers["moved"] > NATS * slack:
        problems.append(f"by {numbers['moved']:.3g} nats when other rows' tokens change")
    if problems:
        return f"they differ {', and '.join(problems)}"
    least = LEAST * sum(norm**2 for norm in norms.values()) ** 0.5
    for name, norm in norms.items():
        if differences[name] > RELATIVE * slack * max(norm, least):
            return f"the gradient of {name}, of norm {norm:.3g} alone, differs by {differences[name]:.3g}"
    return None


class _Probe:
    """What a model says of some rows, as numbers that a loss can be made of; F numbers for each trained token."""

    def __init__(self, model: PreTrainedModel, backend: Backend | None, draw: np.random.Generator) -> None:
        self._model, self._draw = model, draw
        self._backend: Backend | None = backend
        self._factors: Tensor | None = None

    def together(self, cell: Cell) -> tuple[Tensor, Tensor]:
        """([N, F] outputs, a scalar 0 to add to their loss)."""
        with attention_for(self._model, self._backend):
            if is_critic(self._model):
                found_NF = value_inputs(self._model, cell)
                return found_NF, found_NF[:0].sum()
            out = cell_logprobs(self._model, cell)
        return out.logprobs_N.double()[:, None], out.anchor

    def alone(self, cell: Cell) -> Tensor:
        """[N, F] The same through the model's own logits, with plain attention."""
        with attention_named(self._model, "eager"):
            if is_critic(self._model):
                return value_inputs(self._model, cell)
            inputs: dict[str, Any] = {"input_ids": cell.input_ids_BT, "use_cache": False}
            if cell.images is not None:  # places and positions are the model's own
                is_image_N = torch.zeros_like(cell.input_ids_BT).view(-1).index_fill(0, cell.images.index_N, 1)
                inputs["mm_token_type_ids"] = is_image_N.view_as(cell.input_ids_BT)
                inputs |= {"pixel_values": cell.images.pixels_QD, "image_grid_thw": cell.images.grids_M3}
            logits_TV = self._model(**inputs).logits[0]
        predicting_NV = logits_TV.index_select(0, cell.gather_N).double()
        return torch.log_softmax(predicting_NV, dim=-1).gather(1, cell.targets_N[:, None])

    def loss(self, found_NF: Tensor, start: int) -> Tensor:
        """A sum of outputs, each times a factor of its own; ``start`` is the number of the first token."""
        if self._factors is None:
            num_tokens = sum(length - 1 for length in LENGTHS)
            factors = self._draw.normal(size=(num_tokens, found_NF.shape[1]))
            self._factors = torch.from_numpy(factors).to(found_NF)
        return (self._factors[start : start + len(found_NF)] * found_NF).sum()


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Sliding windows of ``WINDOW`` tokens: some models have theirs in a mask alone, which backends never see."""
    configs = [
        model.config,
        model.config.get_text_config(),
        *(getattr(each, "config", None) for each in model.modules()),
    ]
    holders: list[Any] = [*{id(config): config for config in configs}.values()]
    holders += [each for each in model.modules() if "sliding_window" in vars(each)]
    sizes = [(holder, getattr(holder, "sliding_window", None)) for holder in holders]
    wide = [(holder, size) for holder, size in sizes if type(size) is int and size > WINDOW]
    try:
        for holder, _ in wide:
            holder.sliding_window = WINDOW
        yield
    finally:
        for holder, size in wide:
            holder.sliding_window = size


def _rows(num_ids: int, seed: int, vision: VisionSpec | None) -> list[Row]:
    draw = np.random.default_rng(seed)
    beginning = draw.integers(num_ids, size=max(LENGTHS))
    rows: list[Row] = []
    for i, (shared, length) in enumerate(zip(SHARED, LENGTHS, strict=True)):
        ids = np.concatenate([beginning[:shared], draw.integers(num_ids, size=length - shared)])
        mask = np.arange(length) > 0
        media: list[Media] = []
        if vision is not None:
            ids[ids == vision.image_token_id] = vision.end_token_id  # the model's own forward wants an image for each
            if i in IMAGE_ROWS:
                media = [_image(vision, draw)]
                ids[IMAGE_START : media[0].stop] = vision.image_token_id
                mask[IMAGE_START : media[0].stop] = False
        rows.append(Row(row_id=i, rollout_id=i, group_id=0, token_ids=ids, loss_mask=mask, media=media))
    return rows


def _image(vision: VisionSpec, draw: np.random.Generator) -> Media:
    grid = (1, vision.merge_size, 2 * vision.merge_size)
    pixels = draw.normal(size=(2 * vision.merge_size**2, vision.patch_numbers)).astype(np.float32)
    return Media(start=IMAGE_START, num_tokens=2, grid=grid, pixels=pixels)


def _changed(rows: Sequence[Row]) -> list[Row]:
    """Other tokens wherever a row has none in common with the first, and other images."""
    first, *others = rows
    changed = [first]
    for row, shared in zip(others, SHARED[1:], strict=True):
        is_own = np.arange(row.num_tokens) >= shared
        for image in row.media:
            is_own[image.start : image.stop] = False
        ids = np.where(is_own, row.token_ids[::-1], row.token_ids)
        media = [replace(image, pixels=-cast(Any, image.pixels), digest="") for image in row.media]
        changed.append(replace(row, token_ids=ids, media=media))
    return changed


def _norms(trained: Mapping[str, nn.Parameter], *, is_sharded: bool) -> dict[str, float]:
    """Norm of each gradient, 0 where there is none."""
    squares: dict[str, float] = {}
    for name, parameter in trained.items():
        gradient = parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        squares[name] = 0.0 if local is None else float(local.double().square().sum())
    if is_sharded:
        squares = distributed.reduce_sums(squares, {})[0]
    return {name: square**0.5 for name, square in squares.items()}
