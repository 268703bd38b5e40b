"""What ranks do together fails on all of them, with one error, whatever one of them raised.

1. An ``EvenstepError`` of any rank: the same class and words everywhere.
2. Any other exception: a ``DistributedError`` everywhere that names the rank, kind and text; its cause is kept there.
3. Several at once: that of the lowest rank. Nothing: each rank's own result. The next collective is not disturbed.
"""

from __future__ import annotations

from functools import partial

from evenstep.errors import DistributedError, EngineError
from evenstep.train import distributed
from ranks import run_ranks

CASES: tuple[dict[int, Exception], ...] = (
    {},
    {1: EngineError("no server")},
    {1: TypeError("not a str")},
    {0: KeyError("token_ids")},
    {0: OSError(28, "No space left on device"), 1: EngineError("no server")},
)


def on_a_rank() -> list[tuple[str, str, str]]:
    rank = distributed.rank_and_size()[0]
    found: list[tuple[str, str, str]] = []

    def work(error: Exception | None) -> str:
        if error is not None:
            raise error
        return f"rank {rank} is done"

    for errors in CASES:
        try:
            found.append(("", distributed.together(partial(work, errors.get(rank))), ""))
        except Exception as caught:  # noqa: BLE001 -- whatever it is, the test looks at it
            found.append((type(caught).__name__, str(caught), type(caught.__cause__).__name__))
    assert distributed.exchange(rank) == [0, 1]
    return found


def test_one_rank_fails_on_all() -> None:
    ranks = run_ranks(on_a_rank, 2)
    assert [found[0][1] for found in ranks] == ["rank 0 is done", "rank 1 is done"]
    for case in range(1, len(CASES)):
        first, second = ranks[0][case], ranks[1][case]
        assert first[:2] == second[:2]
    kinds = [found[0] for found in ranks[0]]
    assert kinds == ["", EngineError.__name__, *[DistributedError.__name__] * 3]
    assert ranks[0][1][1] == "no server"
    assert "rank 1 failed where all must go on together, with TypeError: not a str;" in ranks[0][2][1]
    assert "rank 0 failed where all must go on together, with KeyError: 'token_ids';" in ranks[1][3][1]
    assert "rank 0 failed" in ranks[1][4][1]
    assert "No space left" in ranks[1][4][1]
    assert [ranks[1][2][2], ranks[0][2][2], ranks[0][4][2]] == ["TypeError", "NoneType", "OSError"]
