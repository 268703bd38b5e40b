"""Which rollouts there are, by key and by name, and where they go when they have ended."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import time
from hashlib import sha256
from typing import Protocol

from evenstep.errors import FileFormatError
from evenstep.rollout.agent import RolloutIdentity
from evenstep.serve.capture import Capture, random_identity
from evenstep.serve.captured import CapturedRollout
from evenstep.serve.log import LOGGER, log_event
from evenstep.serve.refusals import RefusedError
from evenstep.serve.schemas import NewRolloutBody, RewardBody
from evenstep.types import Rollout

__all__ = ["Registry", "RolloutSink", "is_name"]

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")  # a path's segment; never . or ..


def is_name(name: str) -> bool:
    """Whether a rollout can be called so: a path names it.

    >>> is_name("task-3.1"), is_name(".."), is_name("a/b")
    (True, False, False)
    """
    return _NAME.fullmatch(name) is not None


class RolloutSink(Protocol):
    """Where ended rollouts are kept."""

    def append(self, rollouts: list[Rollout]) -> None: ...


class Registry:
    """The rollouts of a server; each is reached with its own key alone.

    Args:
        capture: what they share.
        sink: keeps those that have ended, as a `RolloutWriter` does; None: whoever added them does.
        admin_key: makes rollouts; None: nobody can over HTTP.
        is_open: no keys: a rollout begins when it is first named. For one user on one machine.
        max_open: rollouts that have not ended.
        used_ids: names that are taken, as in a file that is appended to.
    """

    def __init__(
        self,
        capture: Capture,
        *,
        sink: RolloutSink | None = None,
        admin_key: str | None = None,
        is_open: bool = False,
        max_open: int = 4096,
        used_ids: frozenset[str] = frozenset(),
    ) -> None:
        self.capture = capture
        self.is_open = is_open
        self._sink = sink
        self._admin_digest = None if admin_key is None else _digest(admin_key)
        self._max_open = max_open
        self._used_ids = used_ids
        self._by_digest: dict[bytes, tuple[str, CapturedRollout]] = {}  # key's digest -> name, rollout
        self._by_name: dict[str, CapturedRollout] = {}
        self._unwritten: list[Rollout] = []
        self._writing = asyncio.Lock()

    def is_admin(self, key: str) -> bool:
        """Whether this is the key that makes rollouts."""
        return self._admin_digest is not None and hmac.compare_digest(_digest(key), self._admin_digest)

    def owned_by(self, key: str) -> tuple[str, CapturedRollout] | None:
        """The name and rollout that a key belongs to.

        Looked up by the key's digest: how long it takes says nothing about any key.
        """
        return self._by_digest.get(_digest(key))

    def add(self, identity: RolloutIdentity, name: str, *, mixes_seeds: bool = False) -> tuple[CapturedRollout, str]:
        """A new rollout and its key."""
        rollout, key = CapturedRollout(identity, self.capture, mixes_seeds=mixes_seeds), secrets.token_urlsafe(32)
        self._by_name[name] = rollout
        self._by_digest[_digest(key)] = name, rollout
        return rollout, key

    def remove(self, name: str, key: str) -> None:
        """Forget a rollout that whoever added it has taken."""
        del self._by_name[name], self._by_digest[_digest(key)]

    def create(self, body: NewRolloutBody) -> tuple[str, str]:
        """Make a rollout as an administrator asks; its name and key.

        Raises:
            RefusedError: its name is no name or taken, or too many have not ended.
        """
        name = body.rollout_id or f"rollout-{secrets.token_hex(8)}"
        self._check_new(name)
        group_id = body.group_id or name
        identity = random_identity(name, group_id=group_id, prompt_id=body.prompt_id or group_id)
        _, key = self.add(identity, name)
        log_event("begin", rollout=name)
        return name, key

    def named(self, name: str, *, begins: bool = True) -> CapturedRollout:
        """Without keys: the rollout of this name, which begins now if there was none and it ``begins``.

        Raises:
            RefusedError: it cannot be called so, is in the file already, or too many have not ended.
        """
        if name not in self._by_name:
            if not begins:
                raise RefusedError(404, "there is no such rollout", code="unknown_rollout")
            self._check_new(name)
            self._by_name[name] = CapturedRollout(random_identity(name, group_id=name, prompt_id=name), self.capture)
            log_event("begin", rollout=name)
        return self._by_name[name]

    def _check_new(self, name: str) -> None:
        if not is_name(name):
            raise RefusedError(404, "there is no such rollout", code="unknown_rollout")
        if name in self._by_name or name in self._used_ids:
            raise RefusedError(409, "this rollout_id is taken; give each rollout its own", code="rollout_exists")
        if sum(rollout.rollout is None for rollout in self._by_name.values()) >= self._max_open:
            raise RefusedError(
                429,
                f"at most {self._max_open} rollouts are open at a time; report the rewards of some",
                code="too_many_rollouts",
            )

    async def report(self, rollout: CapturedRollout, body: RewardBody) -> None:
        """End a rollout with its reward and wait until it is kept."""
        rollout.report(body)
        await self._keep([rollout])

    async def end_overdue(self) -> None:
        """End the rollouts whose time is over as ``failed``."""
        limit_s = self.capture.limits.timeout_s
        overdue = [
            rollout
            for rollout in self._by_name.values()
            if rollout.rollout is None and time.monotonic() - rollout.started_s > limit_s
        ]
        await self._fail(overdue, f"no reward within {limit_s:g} seconds: abandoned")

    @property
    def unwritten_ids(self) -> list[str]:
        """Rollouts that are open, or have ended and could not be written so far."""
        is_open = [rollout.identity.rollout_id for rollout in self._by_name.values() if rollout.rollout is None]
        return [rollout.rollout_id for rollout in self._unwritten] + is_open

    async def end_all(self, reason: str) -> None:
        """End every rollout that is open as ``failed``.

        Raises:
            RefusedError: they could not be written; ``unwritten_ids`` has their names.
        """
        await self._fail([rollout for rollout in self._by_name.values() if rollout.rollout is None], reason)

    async def _fail(self, rollouts: list[CapturedRollout], reason: str) -> None:
        for rollout in rollouts:
            try:
                rollout.end("failed", None, reason=reason)
            except Exception:  # noqa: BLE001 -- one that cannot be ended must not keep the others from the disk
                LOGGER.exception("rollout %s could not be ended", rollout.identity.rollout_id)
        ended = [rollout for rollout in rollouts if rollout.rollout is not None]
        if ended or self._unwritten:
            await self._keep(ended)

    async def _keep(self, ended: list[CapturedRollout]) -> None:
        for captured in ended:
            assert captured.rollout is not None, "it was ended"
            log_event("end", **captured.summary())
            if self._sink is not None:
                self._unwritten.append(captured.rollout)
        if self._sink is None:
            return
        # whoever waits may be cancelled while a thread writes: what it writes must be known all the same, or it would
        # be written twice
        error = await asyncio.shield(asyncio.create_task(self._written(self._sink)))
        if error is not None:
            raise RefusedError(
                500, "the rollout could not be written; the server tries again", code="not_written"
            ) from error
        for captured in ended:
            captured.release()

    async def _written(self, sink: RolloutSink) -> Exception | None:
        """Write all that is not written yet; why it could not be."""
        async with self._writing:
            batch = list(self._unwritten)
            try:
                await asyncio.to_thread(sink.append, batch)
            except (OSError, FileFormatError) as error:
                log_event("write_failed", error=str(error), num_rollouts=len(batch))
                return error
            self._unwritten = self._unwritten[len(batch) :]
            return None


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
