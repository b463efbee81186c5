import torch
from difftest.reference import oracle
from difftest.reference.formats import FORMATS
from difftest.reference.inputs import LayerInputs

from difftest.paths import _sglang_math as math_
from difftest.paths.sglang_fp4_model import SglangFp4Model

CODES_EQUAL = 0.999
"""Share of fp4 codes that fp32 preparation leaves as exact preparation makes them."""


def quantised(exact: torch.Tensor) -> torch.Tensor:
    """fp64 [..., D] through blocks of 32 with a power-of-two scale and thresholds that send ties down."""
    blocks = exact.double().unflatten(-1, (-1, 32))
    scale = torch.exp2((blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 6).log2().ceil())
    return (FORMATS["e2m1_ties_down"].round(blocks / scale) * scale).flatten(-2)


def test_keys_are_quantised_from_fp32(csa: LayerInputs) -> None:
    trace = SglangFp4Model().run(csa, "case", upto="index_k")
    want = quantised(oracle.index_k(csa, trace.value("compressed").double()))
    assert (trace.value("index_k") == want).double().mean() >= CODES_EQUAL


def test_queries_are_rounded_to_bf16_after_rope_and_after_the_transform(csa: LayerInputs) -> None:
    model = SglangFp4Model()
    assert csa.index_query is not None
    prepared = model.prepare_query(csa, csa.index_query.float())
    assert torch.equal(prepared.to(torch.bfloat16).float(), prepared)
    value = model.run(csa, "case", upto="index_q").value("index_q")
    assert torch.equal(value.double(), quantised(prepared))
    table = math_.rope_table(csa.config, csa.kind, csa.row_position).unsqueeze(1)
    once = math_.to_bf16(math_.hadamard(math_.rotate(csa.index_query.float(), table)))
    assert not torch.equal(once, prepared), "the rounding between rope and transform shows"


def test_an_entry_takes_68_bytes_with_the_even_code_in_the_low_bits(csa: LayerInputs) -> None:
    stored = SglangFp4Model().run(csa, "case", upto="index_k")["index_k"]
    assert stored["raw"].shape[1] == 64 * 68
    entry = 70
    slot = int(csa.entry_slot[entry])
    page, offset = stored["raw"][slot // 64], slot % 64
    packed, codes = page[offset * 64 : offset * 64 + 64], stored["codes"][entry]
    assert torch.equal(packed & 15, codes[0::2]) and torch.equal(packed >> 4, codes[1::2])
    exponents = page[64 * 64 + 4 * offset : 64 * 64 + 4 * offset + 4]
    assert torch.equal(torch.exp2(exponents.float() - 127), stored["scale"][entry])


def test_scores_take_no_scale_from_the_head_weight(csa: LayerInputs) -> None:
    trace = SglangFp4Model().run(csa, "case", upto="score")
    key, query, weight = (trace.value(stage).double() for stage in ("index_k", "index_q", "head_weight"))
    got, exact = trace.value("score"), oracle.score(csa, key, query, weight)
    seen = got.isfinite()
    assert torch.equal(seen, exact.isfinite())
    assert torch.allclose(got[seen].double(), exact[seen], rtol=1e-4, atol=1e-5)


def test_key_and_query_scales_have_their_floor(csa: LayerInputs) -> None:
    codes, scale = SglangFp4Model().quantise_key(torch.full((1, 128), 1e-9))
    assert bool((codes == 0).all()) and bool((scale == 2.0**-15).all()), "1e-4 / 6 rounded up to a power of two"
