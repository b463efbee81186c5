"""What can go wrong between client and server, and which of it is worth asking again."""

import email.utils
import time
from typing import Any

import httpx

RETRIED_STATUS = frozenset({408, 409, 425, 429})
"""Client-side status codes that mean "later"; every 5xx is retried too."""
SHOWN = 200
"""Characters of a server's own error text that are shown."""
TOO_LONG = (
    "context length",
    "context_length",
    "max_model_len",
    "maximum context",
    "too long",
    "longer than",
    "max_position",
)


class Failure(Exception):
    """One failed attempt.

    kind   a stable word for counts: `unreachable`, `timeout`, `stalled`, `broken stream`, `malformed`, `http 429`, ...
    retry  whether the same request may succeed later.   wait  seconds the server asked for (Retry-After), if it did.
    status HTTP status, 0 when there was none.
    """

    def __init__(self, kind: str, message: str, *, retry: bool, wait: float | None = None, status: int = 0) -> None:
        super().__init__(message)
        self.kind, self.retry, self.wait, self.status = kind, retry, wait, status

    @property
    def too_long(self) -> bool:
        """Whether the server refused because the prompt does not fit its context."""
        return self.status in (400, 413, 422) and any(words in str(self).lower() for words in TOO_LONG)


def as_failure(error: Exception) -> Failure:
    """The failure behind an exception of httpx, of a time limit or of decoding; any other exception is raised again."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, UnicodeDecodeError):
        return Failure("malformed", f"malformed response: not UTF-8 ({error.reason})", retry=True)
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return Failure("unreachable", f"no server answers ({error or type(error).__name__})", retry=True)
    if isinstance(error, httpx.ReadTimeout):
        return Failure("stalled", "the server sent nothing for the stall limit", retry=True)
    if isinstance(error, TimeoutError | httpx.TimeoutException):
        return Failure("timeout", "the request took longer than its time limit", retry=True)
    if isinstance(error, httpx.TransportError):
        return Failure("broken stream", f"the connection broke ({error or type(error).__name__})", retry=True)
    raise error


def from_status(response: httpx.Response, text: str) -> Failure:
    """The failure behind a status of 400 or more; `text` is the body."""
    status = response.status_code
    shown = " ".join(_error_text(text).split())[:SHOWN] or response.reason_phrase
    retry = status in RETRIED_STATUS or status >= 500
    wait = retry_after(response.headers.get("retry-after"))
    return Failure(f"http {status}", f"HTTP {status}: {shown}", retry=retry, wait=wait, status=status)


def _error_text(text: str) -> str:
    """The message inside an OpenAI-form error body, else the body."""
    try:
        body: Any = httpx.Response(200, text=text).json()
    except ValueError:
        return text
    for name in ("error", "message", "detail"):
        if isinstance(body, dict) and name in body:
            body = body[name]
    return body if isinstance(body, str) else str(body)


def retry_after(value: str | None) -> float | None:
    """Seconds in a Retry-After header (a number or an HTTP date); None when absent or unreadable."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
