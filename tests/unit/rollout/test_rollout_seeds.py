"""Behaviours locked here:

1. A call's seed is a pure function of its six counters, the same in another process (P35).
2. No two different tuples of a run's size share a seed; neither do tuples that read alike when glued together (P35).
3. Seeds are 63-bit, so that they fit a signed 64-bit field.
"""

import itertools
import subprocess
import sys

from evenstep.rollout.seeds import call_seed, mixed_seed


def test_same_counters_same_seed_in_another_process():
    code = (
        "from evenstep.rollout.seeds import call_seed;"
        "print(call_seed(run=3, collection=2, occurrence=5, generation=1, attempt=0, call=4))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == call_seed(run=3, collection=2, occurrence=5, generation=1, attempt=0, call=4)


def test_every_counter_matters_and_nothing_collides():
    names = ("run", "collection", "occurrence", "generation", "attempt", "call")
    tuples = list(itertools.product(range(2), range(6), range(12), range(12), range(2), range(6)))
    seeds = {call_seed(**dict(zip(names, values, strict=True))) for values in tuples}
    assert len(seeds) == len(tuples) > 20_000


def test_one_prompt_twice_with_two_generations_has_four_seeds():
    seeds = [
        call_seed(run=0, collection=0, occurrence=occurrence, generation=generation, attempt=0, call=0)
        for occurrence in range(2)
        for generation in range(2)
    ]
    assert len(set(seeds)) == 4


def test_parts_are_kept_apart():
    alike = [(1, 23), (12, 3), ("1", 23), ("1", "23"), ("12", "3"), (123,), ("1", "2", "3"), ("int:1:1",), (-1, 23)]
    assert len({mixed_seed(*parts) for parts in alike}) == len(alike)


def test_seeds_are_63_bit():
    seeds = [mixed_seed(value) for value in range(2_000)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62
