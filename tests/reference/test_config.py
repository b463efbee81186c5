import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from difftest.reference.config import SHIPPED, config_from_dict, load_config
from difftest.reference.inputs import LayerInputs

FLASH, PRO = load_config("v4-flash"), load_config("v4-pro")


def shipped_file(name: str) -> Path:
    import difftest.reference.config as module

    return Path(str(module.__file__)).parent / "configs" / SHIPPED[name]


@pytest.mark.parametrize(
    ("config", "swa", "csa", "hca"),
    [
        (FLASH, [0, 1, 43], list(range(2, 43, 2)), list(range(3, 42, 2))),
        (PRO, [61], list(range(2, 61, 2)), [0, *range(1, 60, 2)]),
    ],
    ids=["flash", "pro"],
)
def test_layer_kinds_of_the_shipped_models(config: object, swa: list[int], csa: list[int], hca: list[int]) -> None:
    """Flash: 21 csa, 20 hca, the last entry the draft layer. Pro: 30 csa, 31 hca."""
    model = config
    assert [model.layers(kind) for kind in ("swa", "csa", "hca")] == [swa, csa, hca]  # type: ignore[attr-defined]


def test_constants_differ_where_the_models_do() -> None:
    assert (FLASH.index_topk, PRO.index_topk) == (512, 1024)
    assert (FLASH.num_attention_heads, PRO.num_attention_heads) == (64, 128)
    assert FLASH.index_scale == pytest.approx(0.011048543456039806, rel=1e-15)
    assert FLASH.softmax_scale == pytest.approx(512**-0.5, rel=1e-15)
    assert (FLASH.rope_factor, FLASH.rope_original_max_position) == (16, 65536)
    assert (FLASH.rope_theta, FLASH.compress_rope_theta) == (10000, 160000)


def test_any_config_json_can_be_read(tmp_path: Path) -> None:
    raw = json.loads(shipped_file("v4-flash").read_text()) | {"index_topk": 64}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_config(tmp_path / "config.json").index_topk == 64


def test_missing_files_keys_and_layers_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no model config v5: give one of"):
        load_config("v5")
    raw = json.loads(shipped_file("v4-flash").read_text())
    del raw["index_topk"]
    with pytest.raises(KeyError, match="index_topk"):
        config_from_dict(raw)
    with pytest.raises(ValueError, match="layer 44 does not exist"):
        FLASH.kind(44)
    odd = config_from_dict(json.loads(shipped_file("v4-flash").read_text()) | {"compress_ratios": [2]})
    with pytest.raises(ValueError, match="compress ratio 2"):
        odd.kind(0)


# ---- what follows from a layer's inputs


def test_visible_counts_complete_blocks(make_layer: Callable[..., LayerInputs]) -> None:
    inputs = make_layer("csa", (9,), rows=0)
    assert inputs.row_position.tolist() == list(range(9))
    assert inputs.visible.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert (make_layer("swa", (9,)).visible == 0).all()


def test_packed_entries_know_position_and_slot(make_layer: Callable[..., LayerInputs]) -> None:
    inputs = make_layer("csa", (300, 7))
    assert inputs.entries == (75, 1) and inputs.entry_offset == (0, 75, 76)
    assert inputs.entry_position.tolist() == [4 * entry for entry in range(75)] + [0]
    page = inputs.page_table
    expected = [int(page[0, e // 64]) * 64 + e % 64 for e in range(75)] + [int(page[1, 0]) * 64]
    assert inputs.entry_slot.tolist() == expected


def test_given_prefix_keeps_the_overlap_block(make_layer: Callable[..., LayerInputs]) -> None:
    inputs = make_layer("csa", (90,), mode="decode", pooled_prefix=10)
    given = inputs.prefix_entries[0]
    assert inputs.first_token(0) == 4 * (given - 1)
    assert inputs.index is not None and len(inputs.index.kv_score) == inputs.token_offset[-1] == 90 - 4 * (given - 1)


def test_moving_keeps_everything(make_layer: Callable[..., LayerInputs]) -> None:
    inputs = make_layer("csa")
    moved = inputs.to("meta")
    assert moved.lengths == inputs.lengths and moved.main is not None
    for tensor in (moved.row_position, moved.attn_query, moved.main.kv_score, moved.page_table):
        assert tensor.device == torch.device("meta")
