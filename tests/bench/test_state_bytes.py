"""The tables of states in the documentation follow from the exchanges that run, and sizes from configurations."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import KimiLinearConfig, NemotronHConfig, Qwen3NextConfig

from ringattn.bench import state_bytes
from ringattn.bench.state_bytes import LAYERS, StateBytesOptions, gathered, main, received, tables
from ringattn.errors import InputError

PAGE = Path(__file__).resolve().parents[2] / "docs/hybrid.md"


def test_the_page_has_the_current_tables(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert "\n\n".join(table.markdown() for table in tables(StateBytesOptions())) in text
    copy = tmp_path / "page.md"
    copy.write_text(text.replace("52.0", "53.0"), encoding="utf-8")
    main([f"page={copy}"])
    assert copy.read_text(encoding="utf-8") == text


def test_a_page_without_tables_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n", encoding="utf-8")
    with pytest.raises(InputError, match="has no lines"):
        state_bytes.replace_tables(page, "")


@pytest.mark.parametrize("name", LAYERS)
def test_direct_exchanges_have_the_bytes_of_their_formula(name: str) -> None:
    layer = LAYERS[name]
    for ranks in (2, 4, 8):
        assert received(layer, ranks, "contiguous") == gathered(layer, ranks, "contiguous")
        assert received(layer, ranks, "zigzag") <= gathered(layer, ranks, "zigzag")


def test_sizes_are_those_of_the_models() -> None:
    qwen, kimi, nemotron = Qwen3NextConfig(), KimiLinearConfig(), NemotronHConfig()
    rule, kimi_rule, selective = LAYERS["Qwen3-Next"], LAYERS["Kimi-Linear"], LAYERS["Nemotron-H"]
    keys, values = qwen.linear_num_key_heads * qwen.linear_key_head_dim, qwen.linear_num_value_heads
    assert (values, qwen.linear_key_head_dim, qwen.linear_value_head_dim) == (rule.heads, 128, 128)
    assert 2 * keys + values * 128 == rule.channels
    assert (kimi.linear_num_heads, kimi.linear_head_dim) == (kimi_rule.heads, kimi_rule.d_k)
    assert 3 * kimi.linear_num_heads * kimi.linear_head_dim == kimi_rule.channels
    sizes = nemotron.mamba_num_heads, nemotron.ssm_state_size, nemotron.mamba_head_dim, nemotron.n_groups
    assert sizes == (selective.heads, selective.d_k, selective.d_v, selective.key_heads)
    assert sizes[0] * sizes[2] + 2 * sizes[3] * sizes[1] == selective.channels
    taps = qwen.linear_conv_kernel_dim, kimi.linear_conv_kernel_dim, nemotron.conv_kernel
    assert taps == tuple(layer.taps for layer in LAYERS.values())
