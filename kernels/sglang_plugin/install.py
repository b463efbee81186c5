"""Registers the hooks with SGLang's registry and verifies that every one of them took."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from . import PACKAGE, capture
from .checks import Unsupported, check_device, check_scorers, check_version, warnings
from .flags import BF16_INDEX_K, CAPTURE, Flags
from .switch import turn_on
from .targets import BF16_TARGETS, CAPTURE_TARGETS, MissingTarget, Target

logger = logging.getLogger(__name__)


def install(flags: Flags) -> None:
    """Patches what `flags` ask for. Raises SystemExit with one sentence where it cannot be done.

    SGLang's registry logs a hook that fails to apply and goes on; serving would then fall back to fp8. So every target
    is resolved before it is registered, and once SGLang has applied its hooks, each is looked for where it is called.
    """
    try:
        check_version()
        if flags.bf16_index_k:
            check_device()
            check_scorers()
        targets = chosen(flags)
        for target in targets:
            target.resolve()
    except (Unsupported, MissingTarget) as error:
        raise SystemExit(f"{PACKAGE}: {error}") from error
    register(targets)
    if flags.capture is not None:
        capture.start(flags.capture)
        logger.warning("%s: %s=%s, eager prefills are captured", PACKAGE, CAPTURE, flags.capture.folder)
    if flags.bf16_index_k:
        turn_on()
        for warning in warnings():
            logger.warning("%s: %s", PACKAGE, warning)
        logger.warning("%s: %s=1, DeepSeek-V4 index keys are bf16, %d patches", PACKAGE, BF16_INDEX_K, len(targets))


def chosen(flags: Flags) -> tuple[Target, ...]:
    """The targets that `flags` need."""
    bf16 = BF16_TARGETS if flags.bf16_index_k else ()
    return bf16 + (CAPTURE_TARGETS if flags.capture is not None else ())


def register(targets: Iterable[Target]) -> None:
    """Registers AROUND hooks on `targets`, and a check of them behind the registry's next `apply_hooks`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    targets = tuple(targets)
    for target in targets:
        HookRegistry.register(target.path, target.hook, HookType.AROUND)
    apply_hooks = HookRegistry.apply_hooks

    def apply_and_verify() -> None:
        HookRegistry.apply_hooks = apply_hooks
        apply_hooks()
        verify(targets)

    HookRegistry.apply_hooks = apply_and_verify


def verify(targets: Iterable[Target]) -> None:
    """Raises SystemExit that names the targets whose hooks are not in place."""
    missing = [target.path for target in targets if not is_patched(target)]
    if missing:
        raise SystemExit(
            f"{PACKAGE}: SGLang did not apply the hooks of {', '.join(missing)} and would serve without them; see its "
            "log above for the reason"
        )


def is_patched(target: Target) -> bool:
    """Whether `target.hook` is among the wrappers of the function that SGLang would call."""
    try:
        found = target.resolve()
    except MissingTarget:
        return False
    return any(value is target.hook for layer in _wrappers(found) for value in _closure(layer))


def _wrappers(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _closure(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue
