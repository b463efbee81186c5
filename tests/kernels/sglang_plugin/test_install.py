"""Hooks are registered, verified, and a hook that did not take stops the server."""

import pkgutil

import pytest
import torch
from difftest.kernels.sglang_plugin import checks, install
from difftest.kernels.sglang_plugin.flags import Flags
from difftest.kernels.sglang_plugin.switch import PluginError, guarded, is_on, switched
from difftest.kernels.sglang_plugin.targets import BF16_TARGETS

ON = Flags(bf16_index_k=True)


def test_every_target_is_patched(sglang) -> None:
    install.install(ON)
    assert is_on() and not any(install.is_patched(target) for target in BF16_TARGETS)
    sglang.registry.apply_hooks()
    assert all(install.is_patched(target) for target in BF16_TARGETS)


@pytest.mark.parametrize("target", BF16_TARGETS, ids=lambda target: target.path.rsplit(".", 1)[1])
def test_a_missing_target_is_named_and_refused(sglang, target) -> None:
    owner, name = target.path.rsplit(".", 1)
    delattr(pkgutil.resolve_name(owner), name)
    with pytest.raises(SystemExit, match=target.path.replace(".", r"\.")) as refused:
        install.install(ON)
    assert "\n" not in str(refused.value)


def test_a_target_that_takes_other_arguments_is_refused(sglang) -> None:
    sglang.indexer.C4Indexer.compute_q = lambda self, everything: None
    with pytest.raises(SystemExit, match="takes no q_lora, positions, weight, q_lora_quant"):
        install.install(ON)


def test_a_hook_that_sglang_skipped_is_named_and_refused(sglang) -> None:
    sglang.registry.skip = {"deep_gemm.fp8_paged_mqa_logits"}
    install.install(ON)
    with pytest.raises(SystemExit, match=r"did not apply the hooks of deep_gemm\.fp8_paged_mqa_logits"):
        sglang.registry.apply_hooks()


def test_a_subclass_that_overrides_a_target_is_refused(sglang) -> None:
    backend = sglang.modules["sglang.srt.layers.attention.deepseek_v4_backend"].DeepseekV4AttnBackend
    backend._gather_nonpaged_index_k = staticmethod(lambda **_: None)
    with pytest.raises(SystemExit, match="DeepseekV4AttnBackend overrides"):
        install.install(ON)


def test_an_error_of_ours_carries_package_part_and_layer() -> None:
    def broken(layer: int) -> None:
        raise ValueError("out of pages")

    hook = guarded("the store", lambda layer: layer)(broken)
    with switched(True), pytest.raises(PluginError, match=r"difftest\.kernels\.sglang_plugin: the store of layer 14 "):
        hook(lambda layer: None, 14)
    assert hook(lambda layer: "sglang", 14) == "sglang"


@pytest.mark.parametrize(
    ("found", "says"), [(None, "not installed"), ("0.5.22", "SGLang is 0.5.22"), ("0.5.24", "0.5.24")]
)
def test_an_untested_sglang_is_refused(found, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "sglang_version", lambda: found)
    with pytest.raises(checks.Unsupported, match=f"{says}.*tested with 0.5.23"):
        checks.check_version()


def test_a_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(checks.Unsupported, match="needs an NVIDIA GPU"):
        checks.check_device()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(checks.Unsupported, match="HIP"):
        checks.check_device()


@pytest.mark.parametrize("name", checks.OTHER_SCORERS)
def test_another_scorer_is_refused(name: str) -> None:
    with pytest.raises(checks.Unsupported, match=name):
        checks.check_scorers({name: "1"})
    checks.check_scorers({name: "0"})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"enable_deepseek_v4_fp4_indexer": True}, "fp4"),
        ({"device": "npu"}, "--device npu"),
        ({"hicache_storage_backend": "file"}, "hicache-storage-backend file"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(on, given: dict, says: str) -> None:
    assert on.server_args().check_server_args() == "checked"
    with pytest.raises(SystemExit, match=says):
        on.server_args(**given).check_server_args()


def test_another_model_is_refused(on) -> None:
    arguments = on.server_args()
    arguments.hf_config.architectures = ["LlamaForCausalLM"]
    with pytest.raises(SystemExit, match="LlamaForCausalLM"):
        arguments.check_server_args()
    arguments.hf_config.architectures, arguments.hf_config.compress_ratios = ["DeepseekV4ForCausalLM"], [0, 128]
    with pytest.raises(SystemExit, match="no layer of compression ratio 4"):
        arguments.check_server_args()
