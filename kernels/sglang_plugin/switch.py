"""The switch that every hook obeys, and how an error of ours is told from one of SGLang's."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from . import PACKAGE

UNKNOWN_LAYER = "an unknown layer"
PASS_ON: Any = object()
"""What a hook returns to have SGLang's own function called with the same arguments."""


class PluginError(RuntimeError):
    """Something of ours failed while serving; the message carries the package's name, the part and the layer."""


class _Switch:
    on = False


def is_on() -> bool:
    """Whether the hooks do anything; off, each of them calls SGLang's own function and no more."""
    return _Switch.on


@contextmanager
def switched(on: bool) -> Iterator[None]:
    """Turns the installed hooks on or off inside the block, for a process that compares the two."""
    before, _Switch.on = _Switch.on, on
    try:
        yield
    finally:
        _Switch.on = before


def turn_on() -> None:
    """Turns the hooks on for good, as a server has them."""
    _Switch.on = True


def guarded(part: str, layer_of: Callable[..., object]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes `hook(*arguments)` an AROUND hook of SGLang's registry: `call(original, *arguments)`.

    Off, or where the hook returns PASS_ON, `original` is called. An exception of the hook becomes a PluginError that
    names this package, `part` and the layer that `layer_of(*arguments)` finds. `call.part` keeps the name.
    """

    def wrap(hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def call(original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
            if not is_on():
                return original(*arguments, **keywords)
            try:
                result = hook(*arguments, **keywords)
            except PluginError:
                raise
            except Exception as error:
                layer = _layer(layer_of, arguments, keywords)
                raise PluginError(f"{PACKAGE}: {part} of {layer} failed: {error}") from error
            return original(*arguments, **keywords) if result is PASS_ON else result

        call.part = part  # type: ignore[attr-defined]
        return call

    return wrap


def _layer(layer_of: Callable[..., object], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> str:
    try:
        layer = layer_of(*arguments, **keywords)
    except Exception:
        layer = None
    return UNKNOWN_LAYER if layer is None else f"layer {layer}"
