"""Why a request is refused, in the shape that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

__all__ = ["RefusedError"]

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class RefusedError(Exception):
    """A request cannot be served.

    >>> RefusedError(404, "no such rollout", code="unknown_rollout").body()["error"]["code"]
    'unknown_rollout'
    """

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status  # of HTTP
        self.message = message
        self.code = code
        self.param = param  # the field it is about

    def body(self) -> dict[str, Any]:
        """The JSON of the response."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Whether a client should try again: only where waiting helps."""
        if self.status == 429:
            return {"retry-after": "1"}
        return {"x-should-retry": "false"}
