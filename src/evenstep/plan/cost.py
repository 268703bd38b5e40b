"""What a micro-batch costs, as a value that travels with the plan.

``cost(cell) = c0 + c1 * footprint + c2 * attended pairs``; sources: the usual FLOP count of a transformer, 2 per weight
and token, 4 per head dimension and attended pair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from typing import Any

import numpy as np

from evenstep.errors import PlanError
from evenstep.plan.shape import ModelShape
from evenstep.types import Float64Array, Int64Array

__all__ = ["CostModel"]

# Tokens at which causal attention of a 4-billion-parameter dense transformer costs as much as everything linear.
_ATTENTION_TOKENS = 27278.0
_OVERHEAD_TOKENS = 1024.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Cost of a micro-batch: ``c0 + c1 * footprint + c2 * pairs``, in any one unit (tokens, FLOPs, seconds).

    A causal row of width ``w`` attends ``w * (w + 1) / 2`` pairs; in layers with a sliding window of ``s`` tokens it
    attends ``s * (s + 1) / 2 + (w - s) * s`` once ``w > s``. The default is in token equivalents of a dense transformer
    of 4 billion parameters.

    >>> cost = CostModel(c0=10.0, c1=1.0, c2=0.5)
    >>> cost.row_costs(np.array([4]))          # 4 + 0.5 * (1 + 2 + 3 + 4)
    array([9.])

    Raises:
        PlanError: a coefficient is negative or not finite, or all are zero.
    """

    c0: float = _OVERHEAD_TOKENS  # per micro-batch: launches and collectives
    c1: float = 1.0  # per token of footprint
    c2: float = 2.0 / _ATTENTION_TOKENS  # per attended pair, with all layers counted in
    sliding_window: int | None = None  # tokens a sliding layer sees
    sliding_share: float = 0.0  # share of the attention layers that slide

    def __post_init__(self) -> None:
        for name in ("c0", "c1", "c2"):
            value = float(getattr(self, name))
            if not math.isfinite(value) or value < 0:
                raise PlanError(f"cost.{name} must be finite and ≥ 0, found {value}; give seconds or token equivalents")
        if self.c1 == 0 and self.c2 == 0:
            raise PlanError("cost must grow with the rows, found c1 = c2 = 0; set cost.c1 > 0")
        if not 0.0 <= self.sliding_share <= 1.0:
            raise PlanError(f"cost.sliding_share must be within 0 and 1, found {self.sliding_share}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise PlanError(f"cost.sliding_window must be ≥ 1 tokens or None, found {self.sliding_window}")
        if self.sliding_share > 0 and self.sliding_window is None:
            raise PlanError(f"cost.sliding_share = {self.sliding_share} needs cost.sliding_window, found None")

    def pairs(self, widths_R: Int64Array) -> Float64Array:
        """[R] Attended pairs of causal rows of these widths, averaged over full and sliding layers."""
        w = np.asarray(widths_R, dtype=np.float64)
        full = w * (w + 1.0) * 0.5
        if self.sliding_window is None or self.sliding_share == 0.0:
            return full
        s = float(self.sliding_window)
        sliding = np.where(w <= s, full, s * (s + 1.0) * 0.5 + (w - s) * s)
        return (1.0 - self.sliding_share) * full + self.sliding_share * sliding

    def row_costs(self, widths_R: Int64Array) -> Float64Array:
        """[R] Cost of rows of these widths without the overhead of a micro-batch."""
        return self.c1 * np.asarray(widths_R, dtype=np.float64) + self.c2 * self.pairs(widths_R)

    @classmethod
    def from_shape(
        cls,
        *,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        ffn_size: int,
        vocab_size: int,
        gated_ffn: bool = True,
        experts_per_token: int = 1,  # MoE top-k plus shared experts; ffn_size is then one expert's
        sliding_window: int | None = None,
        num_sliding_layers: int = 0,
        overhead_tokens: float = _OVERHEAD_TOKENS,
    ) -> CostModel:
        """Count a transformer's FLOPs; the unit is one token's linear work, so ``c1 == 1``.

        >>> qwen = CostModel.from_shape(hidden_size=2560, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128,
        ...                             ffn_size=9728, vocab_size=151936)
        >>> round(2 / qwen.c2)                 # tokens at which attention costs as much as everything linear
        27278

        Raises:
            PlanError: a size is below 1, or more layers slide than there are.
        """
        shape = ModelShape(
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=hidden_size // num_heads if head_dim is None else head_dim,
            ffn_size=ffn_size,
            vocab_size=vocab_size,
            is_gated_ffn=gated_ffn,
            experts_per_token=experts_per_token,
            sliding_window=sliding_window,
            num_sliding_layers=num_sliding_layers,
        )
        return cls.from_model_shape(shape, overhead_tokens=overhead_tokens)

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], *, overhead_tokens: float = _OVERHEAD_TOKENS) -> CostModel:
        """Read the shape from a Hugging Face model config given as a mapping (``config.to_dict()`` or ``config.json``).

        Raises:
            PlanError: a needed key is absent.
        """
        return cls.from_model_shape(ModelShape.from_hf_config(config), overhead_tokens=overhead_tokens)

    @classmethod
    def from_model_shape(cls, shape: ModelShape, *, overhead_tokens: float = _OVERHEAD_TOKENS) -> CostModel:
        """Count the FLOPs of a model's shape; the unit is one token's linear work, so ``c1 == 1``."""
        return cls(
            c0=float(overhead_tokens),
            c1=1.0,
            c2=shape.pair_flops / shape.token_flops,
            sliding_window=shape.sliding_window if shape.num_sliding_layers else None,
            sliding_share=shape.num_sliding_layers / shape.num_layers,
        )

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float, float]]) -> CostModel:
        """Fit non-negative coefficients to measured cells ``(footprint, pairs, seconds)`` by least squares.

        >>> points = [(f, p, 3.0 + 2.0 * f + 0.5 * p) for f, p in [(1, 1), (2, 8), (5, 3), (9, 40)]]
        >>> model = CostModel.fit(points)
        >>> round(model.c0, 6), round(model.c1, 6), round(model.c2, 6)
        (3.0, 2.0, 0.5)

        Raises:
            PlanError: fewer than three points, or a value that is not finite.
        """
        table = np.asarray(points, dtype=np.float64)
        if table.ndim != 2 or table.shape[1] != 3 or len(table) < 3:
            raise PlanError(f"points must be at least 3 of (footprint, pairs, seconds), found shape {table.shape}")
        if not np.isfinite(table).all():
            raise PlanError(f"points must be finite, found {table[~np.isfinite(table).all(axis=1)][0].tolist()}")
        columns = np.column_stack([np.ones(len(table)), table[:, 0], table[:, 1]])
        best, best_error = np.zeros(3), math.inf
        # Three unknowns: trying every set of non-zero coefficients is exact non-negative least squares.
        for size in (1, 2, 3):
            for chosen in combinations(range(3), size):
                solution = np.linalg.lstsq(columns[:, chosen], table[:, 2], rcond=None)[0]
                error = float(np.sum((columns[:, chosen] @ solution - table[:, 2]) ** 2))
                if (solution >= 0).all() and error < best_error:
                    best, best_error = np.zeros(3), error
                    best[list(chosen)] = solution
        return cls(c0=float(best[0]), c1=float(best[1]), c2=float(best[2]))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostModel:
        """Rebuild a model from ``to_dict()``; unknown keys raise."""
        unknown = sorted(set(data) - {f.name for f in fields(cls)})
        if unknown:
            raise PlanError(f"a cost model has c0, c1, c2, sliding_window, sliding_share, found also {unknown}")
        return cls(**dict(data))
