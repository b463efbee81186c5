"""`python -P -m difftest.kernels.sglang_plugin --check`: what is patched, where, and whether flags and versions fit."""

import argparse
import sys
from collections.abc import Iterator

from . import PACKAGE
from .checks import TESTED_SGLANG, Unsupported, check_device, check_scorers, check_version, sglang_version
from .flags import BF16_INDEX_K, CAPTURE, FlagError, Flags, read_flags

FITS, REFUSED, CANNOT_JUDGE = 0, 1, 125
GROUP = "sglang.srt.plugins"


def main(arguments: list[str] | None = None) -> int:
    """Runs the check and returns its exit code: 0 fits, 1 refused, 125 cannot judge."""
    parser = argparse.ArgumentParser(prog=f"python -P -m {PACKAGE}", description=__doc__)
    parser.add_argument("--check", action="store_true", help="report and exit; nothing is served")
    if not parser.parse_args(arguments).check:
        parser.print_help()
        return FITS
    try:
        flags = read_flags()
    except FlagError as error:
        print(f"refused     {error}")
        return REFUSED
    for line in _facts(flags):
        print(line)
    if sglang_version() is None:
        print(f"cannot say  SGLang is not installed here: pip install sglang=={TESTED_SGLANG[-1]}, then check again")
        return CANNOT_JUDGE
    return _report(flags)


def _facts(flags: Flags) -> Iterator[str]:
    import torch

    capture = f"{CAPTURE}={flags.capture.folder}" if flags.capture else f"{CAPTURE} unset"
    yield f"flags       {BF16_INDEX_K}={int(flags.bf16_index_k)}, {capture}"
    yield f"SGLang      {sglang_version() or 'absent'} (tested: {', '.join(TESTED_SGLANG)})"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    yield f"torch       {torch.__version__}, GPU {gpu}"
    yield f"plugin      {'registered' if _registered() else 'not registered: reinstall the package'} in {GROUP}"


def _registered() -> bool:
    from importlib.metadata import entry_points

    return any(point.value.startswith(PACKAGE) for point in entry_points(group=GROUP))


def _report(flags: Flags) -> int:
    """Prints each target and each reason not to serve; returns the exit code."""
    wanted = flags.bf16_index_k or flags.capture is not None
    trouble = [*_refusals()]
    from .install import chosen
    from .targets import MissingTarget

    targets = chosen(flags) if wanted else chosen(Flags(bf16_index_k=True))
    patched = wanted and not trouble and _load()
    for target in targets:
        try:
            target.resolve()
            state = _state(target, patched)
        except MissingTarget as error:
            trouble.append(str(error))
            state = "missing"
        print(f"{state:<11} {target.path}\n            {target.says}")
    for reason in trouble:
        print(f"refused     {reason}")
    if not wanted:
        print(f"conclusion  {BF16_INDEX_K} is unset or 0: SGLang runs as it is, and nothing above is patched")
        return FITS
    refused = bool(trouble) or not patched
    print(f"conclusion  {'refused: a server would not start' if refused else f'{len(targets)} patches in place'}")
    return REFUSED if refused else FITS


def _refusals() -> Iterator[str]:
    for check in (check_version, check_device, check_scorers):
        try:
            check()
        except Unsupported as error:
            yield str(error)


def _load() -> bool:
    """Whether SGLang's own loader leaves every hook in place."""
    from sglang.srt.plugins import load_plugins

    try:
        load_plugins()
    except SystemExit as error:
        print(f"refused     {error}")
        return False
    return True


def _state(target: object, patched: bool) -> str:
    from .install import is_patched
    from .targets import Target

    assert isinstance(target, Target)
    if patched:
        return "patched" if is_patched(target) else "NOT PATCHED"
    return "found"


if __name__ == "__main__":
    sys.exit(main())
