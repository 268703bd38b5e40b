"""Dumps of Prime Intellect's tools: prime-rl's ``token_exports`` and verifiers' ``traces.jsonl``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from evenstep.files.lines import LineError
from evenstep.imports.nemo import texts_of
from evenstep.imports.rows import FoundRow
from evenstep.imports.text_lines import as_ids, as_mask, optional_text, text_tokens
from evenstep.validation import shown

__all__ = ["looks_like_prime_rl", "looks_like_verifiers", "prime_rl_rows", "verifiers_rows"]

Node = Mapping[str, Any]


def looks_like_prime_rl(values: Mapping[str, Any]) -> bool:
    """Whether an object has tokens, their mask, and its place in an export."""
    place = ("export_sequence_idx", "micro_sequence_idx", "export_step")
    return "token_ids" in values and "loss_mask" in values and any(name in values for name in place)


def prime_rl_rows(values: Mapping[str, Any]) -> Iterator[FoundRow]:
    """One row: ``token_ids`` with ``loss_mask``; the step is ``export_step``, the rollout ``sample_id``."""
    token_ids = as_ids(values, "token_ids")
    step = next((values[name] for name in ("export_step", "step") if type(values.get(name)) is int), None)
    yield FoundRow(
        length=len(token_ids),
        rollout_id=optional_text(values, "sample_id"),
        step=step,
        num_trained=as_mask(values, "loss_mask", len(token_ids)),
        token_ids=token_ids,
    )


def looks_like_verifiers(values: Mapping[str, Any]) -> bool:
    """Whether an object has a graph of messages."""
    return isinstance(values.get("nodes"), list) and any(name in values for name in ("task", "agent", "calls", "id"))


def verifiers_rows(values: Mapping[str, Any], bytes_per_token: float) -> Iterator[FoundRow | str]:
    """One row for each branch of a trace, a path from a root to a leaf; a text says why one was left out.

    Each node holds the tokens that it adds (``token_ids``, ``mask``); where branches share a node, the one that goes on
    with its first child trains it. Traces without them are counted by what the provider reported for the branch's last
    call, else by their text.
    """
    agent = values.get("agent")
    if isinstance(agent, Mapping) and agent.get("trainable") is False:
        yield "traces of agents that are not trained left out"
        return
    nodes = _nodes(values)
    has_ids = any(node.get("token_ids") for node in nodes)
    rejected = _rejected_attempts(nodes)
    has_child = {node["parent"] for node in nodes if node.get("parent") is not None}
    task = values.get("task")
    leaves = [leaf for leaf in range(len(nodes)) if leaf not in has_child]
    paths = {leaf: _path(nodes, leaf) for leaf in leaves if leaf not in rejected}
    owner_of: dict[int, int] = {}  # node -> leaf of the branch that trains it
    for path in sorted(paths.values()):
        for at in path:
            owner_of.setdefault(at, path[-1])
    for leaf in leaves:
        if leaf in rejected:
            yield "attempts at compaction that the agent did not go on from left out"
            continue
        path = paths[leaf]
        found: dict[str, Any] = {
            "rollout_id": optional_text(values, "id"),
            "group_id": optional_text(task, "key", "hash") if isinstance(task, Mapping) else None,
        }
        if has_ids:
            token_ids = [token for at in path for token in _ids_of(nodes[at], at)]
            trained = sum(as_mask_of(nodes[at], at) for at in path if owner_of[at] == leaf)
            yield FoundRow(length=len(token_ids), token_ids=token_ids, num_trained=trained, **found)
        else:
            reported = _reported(values.get("calls"), set(path))
            texts = [text for at in path for text in texts_of(nodes[at].get("message"))]
            length = text_tokens(texts, bytes_per_token) if reported is None else reported
            yield FoundRow(length=length, is_approximate=True, **found)


def _nodes(values: Mapping[str, Any]) -> Sequence[Node]:
    nodes = values.get("nodes")
    if not isinstance(nodes, list) or not nodes:
        raise LineError("nodes", f"must be an array of messages, found {shown(nodes)}; write the whole trace")
    listed = cast("list[Any]", nodes)
    for at, node in enumerate(listed):
        if not isinstance(node, Mapping):
            raise LineError(f"nodes[{at}]", f"must be an object, found {shown(node)}; write the whole trace")
        parent = cast("Node", node).get("parent")
        if parent is not None and not (type(parent) is int and 0 <= parent < at):
            raise LineError(
                f"nodes[{at}].parent", f"must be null or the index of an earlier node (below {at}), found "
                f"{shown(parent)}; keep the nodes in the order they were added"
            )  # fmt: skip
    return listed


def _path(nodes: Sequence[Node], leaf: int) -> list[int]:
    path: list[int] = []
    at: int | None = leaf
    while at is not None:
        path.append(at)
        at = nodes[at].get("parent")
    return path[::-1]


def _ids_of(node: Node, at: int) -> list[int]:
    try:
        return as_ids(node, "token_ids")
    except LineError as problem:
        raise LineError(f"nodes[{at}].token_ids", problem.message) from None


def as_mask_of(node: Node, at: int) -> int:
    """Tokens of a node that were sampled."""
    try:
        return as_mask(node, "mask", len(_ids_of(node, at)))
    except LineError as problem:
        raise LineError(f"nodes[{at}].mask", problem.message) from None


def _rejected_attempts(nodes: Sequence[Node]) -> set[int]:
    """Nodes that are attempts at compaction and that no other node names as the compaction it went on from."""
    attempts: set[int] = set()
    accepted: set[Any] = set()
    for at, node in enumerate(nodes):
        links = node.get("semantic_parents")
        for link in cast("list[Any]", links) if isinstance(links, list) else []:
            if isinstance(link, Mapping):
                kind = cast("Node", link).get("type")
                if kind == "compaction_attempt":
                    attempts.add(at)
                elif kind == "compaction":
                    accepted.add(cast("Node", link).get("node"))
    return attempts - accepted


def _reported(calls: Any, path: set[int]) -> int | None:
    """Prompt and output tokens of the last call of a branch, as its provider counted them."""
    total: int | None = None
    for call in cast("list[Any]", calls) if isinstance(calls, list) else []:
        if not isinstance(call, Mapping) or call.get("node") not in path:
            continue
        usage = cast("Node", call).get("usage")
        if not isinstance(usage, Mapping):
            continue
        prompt, output = (
            next((usage[name] for name in names if type(usage.get(name)) is int), None)
            for names in (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens"))
        )
        if prompt is not None and output is not None and prompt + output > 0:
            total = prompt + output
    return total
