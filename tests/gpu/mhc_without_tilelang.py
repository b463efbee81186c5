"""For a host without TileLang: SGLang's hyper-connections by SGLang's own Triton port, through its plugin registry."""


def load() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def split(mixes, hc_scale, hc_base, hc_mult=4, sinkhorn_iters=20, eps=1e-6):
        from sglang.kernels.ops.layernorm import mhc

        return mhc._hc_split_sinkhorn_triton(mixes, hc_scale, hc_base, hc_mult, sinkhorn_iters, eps)

    HookRegistry.register("sglang.kernels.ops.layernorm.mhc.hc_split_sinkhorn", split, HookType.REPLACE)
