"""Seeds of a run: a pure function of names and counters, never of a worker's state."""

from __future__ import annotations

import hashlib

__all__ = ["call_seed", "mixed_seed"]


def mixed_seed(*parts: int | str) -> int:
    """63-bit seed of a tuple of integers and strings.

    Formula: the first eight bytes of BLAKE2b over the parts, each with its kind and its length in front, so that no
    two tuples share a byte string; the top bit is cleared. Equal on every platform and in every process.

    >>> mixed_seed("train", 1, 23) == mixed_seed("train", 1, 23)
    True
    >>> mixed_seed("train", 1, 23) == mixed_seed("train", 12, 3)
    False
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        encoded = str(part).encode()
        digest.update(f"{type(part).__name__}:{len(encoded)}:".encode())
        digest.update(encoded)
    return int.from_bytes(digest.digest(), "big") >> 1


def call_seed(*, run: int, collection: int, occurrence: int, generation: int, attempt: int, call: int) -> int:
    """Sampling seed of one model call.

    Two occurrences of one prompt, two generations, two attempts and two calls all differ; the worker, the rank and
    the number of ranks do not enter, so a rerun on other ranks draws the same numbers.

    >>> seeds = {call_seed(run=7, collection=0, occurrence=o, generation=g, attempt=0, call=0)
    ...          for o in range(2) for g in range(2)}
    >>> len(seeds)
    4
    """
    return mixed_seed("call", run, collection, occurrence, generation, attempt, call)
