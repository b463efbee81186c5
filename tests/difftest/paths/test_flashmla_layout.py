import torch

from difftest.paths import flashmla_layout as flashmla
from difftest.paths.planar_pages import POISON, PlanarPages


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(7)
    codes = torch.randint(0, 0x7F, (count, flashmla.NOPE_DIMS), generator=draw, dtype=torch.uint8)
    exponents = torch.randint(100, 140, (count, flashmla.BLOCKS), generator=draw, dtype=torch.uint8)
    return codes, exponents, torch.randn((count, flashmla.ROPE_DIMS), generator=draw).to(torch.bfloat16)


def test_page_sizes_are_the_published_ones() -> None:
    assert [flashmla.flashmla_pages(size).page_bytes for size in (64, 2, 256)] == [37_440, 1_728, 149_760]
    assert PlanarPages(64, 128, 4).page_bytes == 8_448
    assert PlanarPages(64, 64, 4).page_bytes == 4_352


def test_tokens_survive_shuffled_slots() -> None:
    layout, slots = flashmla.flashmla_pages(64), torch.randperm(192, generator=torch.Generator().manual_seed(3))[:100]
    pool, written = layout.poisoned(3), tokens(100)
    flashmla.pack(layout, pool, slots, *written)
    for got, want in zip(flashmla.unpack(layout, pool, slots), written, strict=True):
        assert torch.equal(got, want)


def test_bytes_lie_where_the_layout_says() -> None:
    layout, pool = flashmla.flashmla_pages(64), flashmla.flashmla_pages(64).poisoned(2)
    codes, exponents, rope = tokens(1)
    flashmla.pack(layout, pool, torch.tensor([64 + 5]), codes, exponents, rope)
    page, data, scale = pool[1], 5 * 576, 64 * 576 + 5 * 8
    assert torch.equal(page[data : data + 448], codes[0])
    assert torch.equal(page[data + 448 : data + 576].view(torch.bfloat16), rope[0])
    assert torch.equal(page[scale : scale + 7], exponents[0])
    page[data : data + 576] = POISON
    page[scale : scale + 7] = POISON
    assert bool((pool == POISON).all()), "nothing else was written, the padding byte of the scale row included"


def test_unwritten_memory_reads_as_nan() -> None:
    layout = flashmla.flashmla_pages(64)
    parts = flashmla.unpack(layout, layout.poisoned(1), torch.tensor([3]))
    assert flashmla.dequantise(*parts).isnan().all()


def test_dequantised_latents_are_exact_in_bf16() -> None:
    codes, exponents, rope = tokens(50)
    value = flashmla.dequantise(codes, exponents, rope)
    assert torch.equal(value.to(torch.bfloat16).float(), value)
    want = codes.view(torch.float8_e4m3fn).double()[3, 64] * 2.0 ** (int(exponents[3, 1]) - 127)
    assert value[3, 64].item() == want.item()
