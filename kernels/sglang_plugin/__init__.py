"""Bf16 index keys inside an unmodified SGLang, as a plugin of its `sglang.srt.plugins` group.

With the package installed, `SGLANG_DSV4_BF16_INDEX_K=1` stores DeepSeek-V4's index keys as bf16 (256 bytes an entry)
and scores bf16 queries against them; unset or 0, nothing is patched. `DIFFTEST_CAPTURE=DIR` writes layer inputs of
eager steps. `python -P -m difftest.kernels.sglang_plugin --check` says what is patched, where, and whether it fits.

    flags      what the environment asks for
    checks     what cannot be supported, each refused in one sentence before serving
    targets    the table of everything that is patched
    install    registers the hooks with SGLang and verifies that each of them took
    switch     one switch for all hooks; an error of ours names the package and the layer
    pool       index pool, cache sizing, transfers       steps    store, query, scores
    capture    layer inputs of a running server          record   the file they are written to

SGLang is imported inside functions only.
"""

PACKAGE = "difftest.kernels.sglang_plugin"


def load() -> None:
    """The entry point: called by SGLang in every process it starts, before anything is served.

    Raises SystemExit with one sentence where what the environment asks for cannot be done.
    """
    from .flags import FlagError, read_flags

    try:
        flags = read_flags()
    except FlagError as error:
        raise SystemExit(f"{PACKAGE}: {error}") from error
    if flags.bf16_index_k or flags.capture is not None:
        from .install import install

        install(flags)
