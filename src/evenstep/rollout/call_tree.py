"""The tree of a rollout's calls: which call continues which, by exact ids (and, under placeholders, equal images).

A call's completed view is its prompt and its output. A call continues another when its prompt begins with all of that
view. Its parent is the one that it names; else the earlier call with the longest such view. Order numbers decide what
is earlier, so calls may arrive in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from evenstep.errors import RowError, SegmentationError
from evenstep.media import check_media
from evenstep.types import Call, Rollout

__all__ = ["CallNode", "OnUndeclared", "Origin", "call_tree", "has_kept"]

OnUndeclared = Literal["error", "segment", "realign"]
Origin = Literal["start", "continued", "fork", "compaction", "template", "subagent", "undeclared", "quarantined"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallNode:
    """One call in its place; nodes stand in a tuple, by order number."""

    call: Call
    parent: int | None  # index of the node it continues, below its own; None: its whole prompt is context
    num_kept_tokens: int  # of the parent's completed view; fewer than all of it where a drift was realigned
    origin: Origin  # why it has this parent, or none

    @property
    def num_tokens(self) -> int:
        """Length of the completed view."""
        return len(self.call.prompt_ids) + len(self.call.output_ids)


def call_tree(rollout: Rollout, *, on_undeclared: OnUndeclared = "error") -> tuple[CallNode, ...]:
    """Give every call its parent.

    - A rollout in which each call continues the one before it or declares a break is linear; so are its parents.
    - Otherwise a call that names no parent continues the longest completed view that its prompt begins with. Where two
      chains hold that same view (equal outputs of siblings), nobody can say which one it continued: the call is
      quarantined, it has no parent.
    - A prompt that holds all of another call's prompt, and then something else than its output, does not fork: the
      history drifted.
    - A call that continues nothing has no parent: it is the first one (sub-agents may come before it), it declares a
      ``break_reason``, or it repeats another such prompt id for id (a retry of the first turn), else its break is
      undeclared.
    - ``on_undeclared="segment"`` gives an undeclared break no parent. ``"realign"`` lets it continue the closest chain
      up to the first id that differs; a prompt that differs inside the chain's first prompt has no parent, as nothing
      sampled comes before that, and one that is as close to several chains is quarantined.
    - Rejected calls have their place, because a later prompt may hold their output.

    Raises:
        SegmentationError: an undeclared break (``on_undeclared="error"``), an empty prompt, images out of place,
            unequal numbers of ids and log-probs, an order number used twice, a parent that is no earlier call, an
            unknown ``on_undeclared``.

    >>> def call(order, prompt, output, **fields):
    ...     return Call(order=order, prompt_ids=prompt, output_ids=output, logprobs=(-1.0,) * len(output), **fields)
    >>> calls = (call(0, (1,), (2,)), call(1, (1, 2, 5), (3,)), call(2, (1, 2, 5), (4,)), call(3, (1, 2, 5, 3), (6,)))
    >>> nodes = call_tree(Rollout(rollout_id="r", group_id="g", prompt_id="p", calls=calls))
    >>> [(node.parent, node.origin) for node in nodes]
    [(None, 'start'), (0, 'continued'), (0, 'continued'), (1, 'continued')]
    """
    if on_undeclared not in get_args(OnUndeclared):
        raise SegmentationError(
            f"on_undeclared must be one of {', '.join(get_args(OnUndeclared))}, found {on_undeclared!r}"
        )
    calls = [_checked(call, rollout) for call in sorted(rollout.calls, key=lambda call: call.order)]
    index_of_order = {call.order: index for index, call in enumerate(calls)}
    if len(index_of_order) < len(calls):
        twice = next(call.order for index, call in enumerate(calls) if index_of_order[call.order] != index)
        raise SegmentationError(
            f"rollout {rollout.rollout_id!r}: order numbers must be unique, found two calls of order {twice}; number "
            f"the calls in the order they were made"
        )
    keyed = _keyed(calls)
    linear = _linear(keyed)
    nodes = linear if linear is not None else _Builder(rollout, keyed, index_of_order, on_undeclared).built()
    if keyed is calls:
        return nodes
    return tuple(replace(node, call=calls[index_of_order[node.call.order]]) for node in nodes)


def _keyed(calls: Sequence[Call]) -> Sequence[Call]:
    """The calls as they are compared: the placeholders of an image are ids of their own, below 0, for each image.

    So a prompt in which another image stands on the same placeholders does not continue.
    """
    if not any(call.media for call in calls):
        return calls
    keys: dict[str, int] = {}
    keyed: list[Call] = []
    for call in calls:
        try:
            check_media(call.media, np.asarray(call.prompt_ids), f"call {call.order}")
        except RowError as error:
            raise SegmentationError(str(error)) from None
        ids = list(call.prompt_ids)
        for image in call.media:
            key = keys.setdefault(image.digest, -2 - len(keys))  # the hash of a prefix is made of id + 1
            ids[image.start : image.stop] = [key] * image.num_tokens
        keyed.append(replace(call, prompt_ids=tuple(ids)))
    return keyed


def _checked(call: Call, rollout: Rollout) -> Call:
    if not call.prompt_ids:
        raise SegmentationError(
            f"rollout {rollout.rollout_id!r}, call {call.order}: the prompt is empty, so its first sampled token would "
            f"have nothing before it; start every prompt with at least one token (a bos id, or the task)"
        )
    if len(call.logprobs) != len(call.output_ids):
        raise SegmentationError(
            f"rollout {rollout.rollout_id!r}, call {call.order}: one log-prob per sampled token was promised, found "
            f"{len(call.logprobs)} log-probs for {len(call.output_ids)} tokens; record both from the same answer"
        )
    return call


def _linear(calls: Sequence[Call]) -> tuple[CallNode, ...] | None:
    """The nodes when every call continues the one before it or declares a break; None otherwise."""
    nodes: list[CallNode] = []
    for index, call in enumerate(calls):
        before = calls[index - 1] if index else None
        if call.is_rejected or (call.parent is not None and (before is None or call.parent != before.order)):
            return None
        if before is not None and _continues(call, before):
            nodes.append(_child(call, index - 1, nodes[-1].num_tokens))
        elif before is None:
            nodes.append(_root(call, "start"))
        elif call.break_reason is not None:
            nodes.append(_root(call, call.break_reason))
        else:
            return None
    return tuple(nodes)


def _continues(call: Call, before: Call) -> bool:
    num_prompt = len(before.prompt_ids)
    end = num_prompt + len(before.output_ids)
    prompt = call.prompt_ids
    return prompt[:num_prompt] == before.prompt_ids and prompt[num_prompt:end] == before.output_ids


def _root(call: Call, origin: Origin) -> CallNode:
    return CallNode(call=call, parent=None, num_kept_tokens=0, origin=origin)


def _child(call: Call, parent: int, num_kept_tokens: int, origin: Origin = "continued") -> CallNode:
    return CallNode(call=call, parent=parent, num_kept_tokens=num_kept_tokens, origin=origin)


class _Builder:
    """Places calls one after the other, in their order."""

    def __init__(
        self, rollout: Rollout, calls: Sequence[Call], index_of_order: dict[int, int], on_undeclared: OnUndeclared
    ) -> None:
        self._rollout = rollout
        self._calls = calls
        self._index_of_order = index_of_order
        self._on_undeclared = on_undeclared
        self._nodes: list[CallNode] = []
        self._is_of_subagent: list[bool] = []  # by node: whether its chain began as a sub-agent's
        self._views = _Views()
        self._retried: dict[tuple[int, ...], int] = {}  # prompts that do not continue a whole view -> first such node
        self._leaves: dict[int, None] = {}  # indices of nodes that nothing continues, in order

    def built(self) -> tuple[CallNode, ...]:
        for call in self._calls:
            self._add(self._placed(call))
        if self._on_undeclared == "error":
            self._refuse_undeclared()
        return tuple(self._nodes)

    def _add(self, node: CallNode) -> None:
        index = len(self._nodes)
        self._nodes.append(node)
        self._is_of_subagent.append(
            node.origin == "subagent" or (node.parent is not None and self._is_of_subagent[node.parent])
        )
        if node.origin != "continued":
            self._retried.setdefault(node.call.prompt_ids, index)
        if node.parent is not None:
            self._leaves.pop(node.parent, None)
        self._leaves[index] = None

    def _placed(self, call: Call) -> CallNode:
        named = self._named_parent(call)
        found = self._found(call) if named is None else [named] if _continues(call, self._calls[named]) else []
        if len(found) == 1:
            return _child(call, found[0], self._nodes[found[0]].num_tokens)
        if call.break_reason is not None:
            return _root(call, call.break_reason)
        if found:
            return _root(call, "quarantined")
        if named is None and self._is_first(call):
            return _root(call, "start")
        if named is None and call.prompt_ids in self._retried:
            index = self._retried[call.prompt_ids]
            first = self._nodes[index]
            # in its place, where that one was thrown away; but there is one start, and this call is not it
            is_in_its_place = first.origin == "undeclared" or not has_kept(self._nodes)[index]
            is_in_its_place = is_in_its_place and first.origin != "start"
            return replace(first, call=call, origin=first.origin if is_in_its_place else "fork")
        if self._on_undeclared != "realign":
            return _root(call, "undeclared")
        return self._realigned(call, named)

    def _is_first(self, call: Call) -> bool:
        """Whether only rejected calls and sub-agents came before it, none of whose prompts it was made from."""
        return all(
            node.call.is_rejected or (is_aside and call.prompt_ids[: len(node.call.prompt_ids)] != node.call.prompt_ids)
            for node, is_aside in zip(self._nodes, self._is_of_subagent, strict=True)
        )

    def _named_parent(self, call: Call) -> int | None:
        """The parent that a call names; where that one was rejected and the prompt is without it, the one before."""
        if call.parent is None:
            return None
        index = self._index_of_order.get(call.parent)
        if index is None or call.parent >= call.order:
            raise SegmentationError(
                f"rollout {self._rollout.rollout_id!r}, call {call.order}: parent must be the order of an earlier "
                f"call, found {call.parent} (orders: {sorted(self._index_of_order)[:12]}); name the call it continues, "
                f"or None to have it found"
            )
        while index is not None and self._calls[index].is_rejected and not _continues(call, self._calls[index]):
            index = self._nodes[index].parent
        return index

    def _found(self, call: Call) -> list[int]:
        """The nodes with the longest completed view that the prompt begins with; more than one: ambiguous."""
        while len(self._views) < len(self._nodes):
            node = self._nodes[len(self._views)]
            self._views.add(node.call)
            if (
                node.parent is not None
                and node.num_kept_tokens == node.num_tokens == self._nodes[node.parent].num_tokens
            ):
                self._views.hide(node.parent)  # nothing was added: the later call of the chain stands for both
        found = self._views.longest(call)
        return [index for index in found if not self._calls[index].is_rejected] or found

    def _realigned(self, call: Call, named: int | None) -> CallNode:
        closest, num_kept = ([named], self._common(call, named)) if named is not None else self._closest(call)
        closest = [index for index in closest if num_kept >= self._num_first_prompt(index)]
        if not closest:
            return _root(call, "undeclared")
        if len(closest) > 1:
            return _root(call, "quarantined")
        return _child(call, closest[0], num_kept, "undeclared")

    def _num_first_prompt(self, index: int) -> int:
        while (parent := self._nodes[index].parent) is not None:
            index = parent
        return len(self._calls[index].prompt_ids)

    def _closest(self, call: Call) -> tuple[list[int], int]:
        """The leaves that share most ids with a prompt, and how many they share."""
        closest: list[int] = []
        best = 0
        for index in self._leaves:
            if not self._shares(call, index, best):
                continue
            if self._shares(call, index, best + 1):
                closest, best = [], self._common(call, index)
            closest.append(index)
        return closest, best

    def _shares(self, call: Call, index: int, count: int) -> bool:
        before = self._calls[index]
        num_prompt = len(before.prompt_ids)
        prompt = call.prompt_ids
        if count <= num_prompt:
            return prompt[:count] == before.prompt_ids[:count]
        return (
            prompt[:num_prompt] == before.prompt_ids
            and prompt[num_prompt:count] == before.output_ids[: count - num_prompt]
        )

    def _common(self, call: Call, index: int) -> int:
        """How many ids a prompt shares with the completed view of a node, from the first on."""
        low, high = 0, min(len(call.prompt_ids), self._nodes[index].num_tokens)
        while low < high:
            middle = (low + high + 1) // 2
            if self._shares(call, index, middle):
                low = middle
            else:
                high = middle - 1
        return low

    def _refuse_undeclared(self) -> None:
        """Raise for the first undeclared break that something not rejected depends on."""
        nodes, is_kept = self._nodes, has_kept(self._nodes)
        self._nodes, self._is_of_subagent, self._leaves = [], [], {}
        for node, kept in zip(nodes, is_kept, strict=True):
            if node.origin == "undeclared" and kept:
                raise self._undeclared(node.call)
            if kept:
                self._add(node)
            else:
                self._nodes.append(node)  # nothing is compared with it
                self._is_of_subagent.append(False)

    def _undeclared(self, call: Call) -> SegmentationError:
        named = self._named_parent(call)
        index = named if named is not None else self._closest(call)[0][-1]
        before, at = self._calls[index], self._common(call, index)
        ids = (*before.prompt_ids, *before.output_ids)
        found = _named(call.prompt_ids[at]) if at < len(call.prompt_ids) else "the prompt's end"
        return SegmentationError(
            f"rollout {self._rollout.rollout_id!r}, call {call.order}: its prompt ({len(call.prompt_ids)} tokens) does "
            f"not continue the {len(ids)} tokens up to call {before.order}: token {at} is {found}, expected "
            f"{_named(ids[at])}; if the agent rewrote its history on purpose, set break_reason to "
            f"compaction, template or subagent, otherwise keep the exact ids, or set rollout.on_undeclared to segment "
            f"or realign"
        )


def _named(token_id: int) -> str:
    return str(token_id) if token_id >= 0 else f"of image {-2 - token_id} of the rollout"


def has_kept(nodes: Sequence[CallNode]) -> list[bool]:
    """For each node, whether it or a call that continues it was not rejected."""
    kept = [not node.call.is_rejected for node in nodes]
    for index in range(len(nodes) - 1, -1, -1):
        parent = nodes[index].parent
        if kept[index] and parent is not None:
            kept[parent] = True
    return kept


class _Views:
    """Completed views, found by the hash of a prompt's prefix in time linear in the prompt.

    The hash of a prefix is ``Σ (id + 1) · b^i mod 2^64``, so one pass gives those of all prefixes. What it finds is
    compared id for id, so an accident of the hash changes nothing.
    """

    _BASE = 0x9E3779B97F4A7C15  # odd, so that no id's part vanishes
    _HIDDEN = np.iinfo(np.int64).max  # a length that no prompt has

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._views_N2 = np.zeros((64, 2), dtype=np.uint64)  # length and hash of each completed view
        self._prompts_N2 = np.zeros((64, 2), dtype=np.uint64)  # the same of each prompt
        self._powers_T = np.ones(1, dtype=np.uint64)

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Call) -> None:
        count, num_prompt = len(self._calls), len(call.prompt_ids)
        if count == len(self._views_N2):
            self._views_N2 = np.concatenate([self._views_N2, np.zeros_like(self._views_N2)])
            self._prompts_N2 = np.concatenate([self._prompts_N2, np.zeros_like(self._prompts_N2)])
        self._calls.append(call)
        hashes_T = self._prefix_hashes((*call.prompt_ids, *call.output_ids))
        self._views_N2[count] = len(hashes_T) - 1, hashes_T[-1]
        self._prompts_N2[count] = self._HIDDEN if call.is_rejected else num_prompt, hashes_T[num_prompt]

    def hide(self, index: int) -> None:
        """Forget a view."""
        self._views_N2[index, 0] = self._HIDDEN

    def longest(self, call: Call) -> list[int]:
        """Indices of the longest views that a prompt begins with, all equal; none where the history drifted."""
        count = len(self._calls)
        hashes_T = self._prefix_hashes(call.prompt_ids)
        found: list[int] = []
        alike = _alike(self._views_N2[:count], hashes_T)
        while alike.size and not found:
            lengths = self._views_N2[alike, 0]
            longest = alike[lengths == lengths.max()]
            found = [index for index in longest.tolist() if _continues(call, self._calls[index])]
            alike = alike[lengths < lengths.max()]
        num_found = int(self._views_N2[found[0], 0]) if found else 0
        for index in _alike(self._prompts_N2[:count], hashes_T[:-1], above=num_found).tolist():
            prompt = self._calls[index].prompt_ids
            if prompt == call.prompt_ids[: len(prompt)]:
                return []
        return found

    def _prefix_hashes(self, ids: Sequence[int]) -> npt.NDArray[np.uint64]:
        """[T + 1] Hash of the first t ids."""
        while len(self._powers_T) < len(ids):
            last = self._powers_T[-1:] * np.uint64(self._BASE)
            self._powers_T = np.concatenate([self._powers_T, self._powers_T * last])
        ids_T = np.fromiter(ids, dtype=np.int64, count=len(ids)).astype(np.uint64) + np.uint64(1)
        hashes_T = np.zeros(len(ids) + 1, dtype=np.uint64)
        np.cumsum(ids_T * self._powers_T[: len(ids)], out=hashes_T[1:])
        return hashes_T


def _alike(known_N2: npt.NDArray[np.uint64], hashes_T: npt.NDArray[np.uint64], above: int = 0) -> npt.NDArray[np.intp]:
    """Indices of the known (length, hash) that a prompt's prefix hashes hold, of a length above ``above``."""
    lengths_N, hashes_N = known_N2[:, 0], known_N2[:, 1]
    fits = np.flatnonzero((lengths_N > above) & (lengths_N < len(hashes_T)))
    return fits[hashes_T[lengths_N[fits]] == hashes_N[fits]]
