"""Functions of flex_attention that read what can change, masks and biases with holes, and the limit of evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ringattn import Ring, UnsupportedError
from ringattn.adapters import flex, flex_functions
from ringattn.adapters.flex import FoundMask, FoundScore, flex_attention, found_masks, found_score
from ringattn.adapters.flex_functions import PairFunction, record
from tests.adapters.test_flex import TOKENS, Mod, block_mask, causal, dense, drawn

CPU = torch.device("cpu")
CAUSAL = FoundMask(True, None, None)
Variable = tuple[Callable[[], Any], Callable[[float], None]]

# --- what a function reads -------------------------------------------------------------------------------------------


def class_attribute() -> Variable:
    class Config:
        value = 3.0

    return lambda: Config.value, lambda new: setattr(Config, "value", new)


def module_attribute() -> Variable:
    module = ModuleType("config")
    module.value = 3.0  # type: ignore[attr-defined]
    return lambda: module.value, lambda new: setattr(module, "value", new)


def function_attribute() -> Variable:
    def read() -> Any:
        return read.value  # type: ignore[attr-defined]

    read.value = 3.0  # type: ignore[attr-defined]
    return read, lambda new: setattr(read, "value", new)


def object_attribute() -> Variable:
    config = SimpleNamespace(inner=SimpleNamespace(value=3.0))
    return lambda: config.inner.value, lambda new: setattr(config.inner, "value", new)


def closure() -> Variable:
    value = 3.0

    def write(new: float) -> None:
        nonlocal value
        value = new

    return lambda: (lambda: value)(), write


def looked_up_by_name() -> Variable:
    values = {"value": [3.0]}
    return lambda: getattr(SimpleNamespace(**values), "value")[0], lambda new: values.update(value=[new])  # noqa: B009


def numpy_memory() -> Variable:
    array = np.full(1, 3.0)
    tensor = torch.from_numpy(array)
    return lambda: tensor[0], lambda new: array.fill(new)


def numpy_array() -> Variable:
    array = np.full(1, 3.0)
    return lambda: torch.from_numpy(array)[0], lambda new: array.fill(new)


def replaced_data() -> Variable:
    tensor = torch.tensor(3.0, dtype=torch.float64)
    return lambda: tensor, lambda new: setattr(tensor, "data", torch.tensor(new, dtype=torch.float64))


def written_data() -> Variable:
    tensor = torch.tensor(3.0, dtype=torch.float64)

    def write(new: float) -> None:
        tensor.data.fill_(new)

    return lambda: {"values": (tensor,)}["values"][0], write


def inference_tensor() -> Variable:
    with torch.inference_mode():
        tensor = torch.tensor(3.0, dtype=torch.float64)

    def write(new: float) -> None:
        with torch.inference_mode():
            tensor.fill_(new)

    return lambda: tensor, write


VARIABLES = [
    class_attribute, module_attribute, function_attribute, object_attribute, closure, looked_up_by_name, numpy_memory,
    numpy_array, replaced_data, written_data, inference_tensor,
]  # fmt: skip


class Counted:
    """Counts analyses of masks and score_mods."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("found_masks", "found_score"):
            monkeypatch.setattr(flex, name, self.counted(getattr(flex, name)))

    def counted(self, analyse: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.count += arguments[0] is not None
            return analyse(*arguments)

        return call


@pytest.fixture
def active() -> Iterator[None]:
    with Ring() as ring, ring.activate(ring.sequence(TOKENS)):
        yield


def check(mask_mod: Mod, score_mod: Mod | None, mask: BlockMask) -> None:
    q, k, v, _ = drawn(kv_heads=4)
    out = flex_attention(q, k, v, score_mod, mask)
    torch.testing.assert_close(out, dense(q, k, v, mask_mod, score_mod)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("variable", VARIABLES)
def test_a_changed_value_is_read(variable: Callable[[], Variable], monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask_mod's window, a score_mod's softcap and its slopes; nothing is analysed again without a change."""
    (left, set_left), (cap, set_cap), (slope, set_slope) = variable(), variable(), variable()
    changes = [(set_left, 7.0), (set_cap, 0.5), (set_slope, 0.25), (set_left, 2.0)]
    counted = Counted(monkeypatch)

    def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k <= left())

    def capped(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(s / cap()) * cap() - slope() * (q - k).abs()

    mask = block_mask(window, BLOCK_SIZE=64)  # its table of one block stays right
    for write, value in [(set_left, 3.0), *changes]:
        write(value)
        check(window, capped, mask)
        count = counted.count
        check(window, capped, mask)
        assert counted.count == count


class Bias:
    """A score_mod as a method and as an object."""

    def __init__(self, slope: float) -> None:
        self.slope = slope

    def method(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s - self.slope * (q - k).abs()

    def __call__(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.method(s, b, h, q, k)


@pytest.mark.usefixtures("active")
def test_methods_objects_and_compiled_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers with one method take turns."""
    layers, mask, counted = [Bias(0.5), Bias(0.25)], block_mask(causal), Counted(monkeypatch)
    compiled = [torch.compile(layer.method, backend="eager") for layer in layers]
    for slope in (0.5, 2.0):
        layers[0].slope = slope
        for _ in range(2):
            mods: list[Mod] = [*layers, *(layer.method for layer in layers), *compiled]
            for mod in mods:
                check(causal, mod, mask)
    # The mask; of each method, object and compiled function its first slope, and the other one of the first layer. The
    # two layers' methods are one function. Dynamo may compile a method again, with the slope as an input: its operators
    # are others then, and each of the two compiled functions is analysed once more.
    assert 1 + 3 * 3 <= counted.count <= 1 + 3 * 3 + 2


@pytest.mark.usefixtures("active")
def test_a_slope_that_now_requires_a_gradient_is_refused() -> None:
    slope, (q, k, v, _) = torch.tensor(0.5), drawn(kv_heads=4)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s - slope * (q - k).abs()

    flex_attention(q, k, v, mod)
    slope.requires_grad_()
    with pytest.raises(UnsupportedError, match="learned parameter"):
        flex_attention(q, k, v, mod)


@pytest.mark.usefixtures("active")
def test_replaced_tables_and_mask_mod_are_read() -> None:
    q, k, v, _ = drawn(kv_heads=4)
    mask = block_mask(causal)
    flex_attention(q, k, v, block_mask=mask)
    mask.kv_num_blocks.data.zero_()
    with pytest.raises(UnsupportedError, match="tables of row 0"):
        flex_attention(q, k, v, block_mask=mask)
    whole = block_mask(causal, BLOCK_SIZE=64)
    check(causal, None, whole)
    whole.mask_mod = lambda b, h, q, k: (q >= k) & (q - k < 5)
    check(whole.mask_mod, None, whole)


def test_compiled_code_that_a_function_calls_is_recorded() -> None:
    table = torch.arange(7.0)
    recordings = []
    for factor in (2, 3):
        compiled = torch.compile(lambda x, factor=factor: x * factor, backend="aot_eager")
        compiled(table)
        recordings.append(record(lambda s, b, h, q, k, compiled=compiled: s * compiled(table)[q], CPU, True))
        recordings.append(record(torch.compile(lambda s, b, h, q, k, factor=factor: s * factor), CPU, True))
    closure_2, function_2, closure_3, function_3 = (found for found in recordings if found is not None)
    assert closure_2.is_same(closure_2) and not closure_2.is_same(closure_3)
    assert function_2.is_same(function_2) and not function_2.is_same(function_3)


def test_what_cannot_be_recorded() -> None:
    """A user's operator, random numbers, and branches on a position: such functions are analysed at each call."""
    state = SimpleNamespace(value=3.0)

    @torch.library.custom_op("ringattn_tests::scaled", mutates_args=())
    def scaled(x: Tensor) -> Tensor:
        return x * state.value

    torch.library.register_vmap(scaled, lambda info, dims, x: (scaled(x), dims[0]))
    table, generator = torch.ones(3), torch.Generator()
    opaque: list[Mod] = [
        lambda s, b, h, q, k: scaled(s),
        lambda s, b, h, q, k: s * torch.empty(1).normal_(generator=generator),
        lambda s, b, h, q, k: s * int(q),
    ]
    for mod in opaque:
        assert record(mod, CPU, True) is None

    def swallows(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        try:
            return scaled(s)
        except Exception:
            return s

    assert record(swallows, CPU, True) is None

    def hides_row(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        try:
            return q >= k + b
        except Exception:
            return q >= k

    assert PairFunction(hides_row, CPU, UnsupportedError).reads(0)
    assert not PairFunction(hides_row, CPU, UnsupportedError).reads(1)
    assert record(lambda s, b, h, q, k: s * table[q], CPU, True) is not None


# --- holes -----------------------------------------------------------------------------------------------------------


def with_hole(mod: Mod, query: int, key: int, queries: int = 8) -> Mod:
    return lambda b, h, q, k: mod(b, h, q, k) & ~((q >= query) & (q < query + queries) & (k == key))


@pytest.mark.parametrize(
    ("tokens", "query", "key", "how"),
    [
        (4096, 3000, 100, {}),
        (1500, 1001, 500, {}),
        (1500, 1001, 990, {}),
        (1500, 1001, 500, {"separate_full_blocks": False}),
        (1500, 1001, 990, {"BLOCK_SIZE": 4096}),
    ],
)
def test_a_hole_is_refused(tokens: int, query: int, key: int, how: dict[str, Any]) -> None:
    """One key hidden from eight queries, in a block that would be full, on the diagonal, and in one block of all."""
    mask = create_block_mask(with_hole(causal, query, key), None, None, tokens, tokens, device="cpu", **how)
    with pytest.raises(UnsupportedError, match=rf"says False at query {query}, key {key} of row 0, head 0"):
        found_masks(mask, tokens, 1, 4)
    mask = create_block_mask(causal, None, None, tokens, tokens, device="cpu", **how)
    assert found_masks(mask, tokens, 1, 4) == (CAUSAL,)


@pytest.mark.parametrize("where", ["row", "head"])
@pytest.mark.parametrize("has_tables", [True, False])
def test_a_hole_in_a_single_row_or_head_is_refused(where: str, has_tables: bool) -> None:
    """Also where the tables are those of the first row and head."""

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & ((q != 1400) | (k != 1200) | ((b if where == "row" else h) != 2))

    batch, heads = (3, 4) if has_tables else (None, None)
    mask = create_block_mask(mod, batch, heads, 1500, 1500, device="cpu", BLOCK_SIZE=1500)
    at = "row 2, head 0" if where == "row" else "row 0, head 2"
    with pytest.raises(UnsupportedError, match=f"says False at query 1400, key 1200 of {at}"):
        found_masks(mask, 1500, 3, 4)


POSITIONS = torch.arange(4096)
SLOPES = torch.tensor([0.5, 0.3, 2.0**-8, -0.1], dtype=torch.float64)


def by_table(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s - SLOPES[h] * (POSITIONS[q] - POSITIONS[k]).abs()


def test_a_hole_in_a_bias_is_refused() -> None:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return by_table(s, b, h, q, k) + 0.01 * ((h == 3) & (q == 1403) & (k == 77))

    with pytest.raises(UnsupportedError, match="at query 1403, key 77 of row 0, head 3"):
        found_score(mod, (CAUSAL,), 1500, 4, CPU)
    assert found_score(mod, (FoundMask(True, (1000, 0), None),), 1500, 4, CPU).alibi_slopes is not None


def test_a_bias_that_only_large_scores_have_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="neither the score itself"):
        found_score(lambda s, b, h, q, k: s.clamp(max=100.0) + 0 * q, (CAUSAL,), TOKENS, 4, CPU)
    with pytest.raises(UnsupportedError, match="where ALiBi"):
        found_score(lambda s, b, h, q, k: torch.where(q > 0, s.clamp(max=100.0), s), (CAUSAL,), TOKENS, 4, CPU)


# --- too many pairs --------------------------------------------------------------------------------------------------


def test_distances_are_enough_where_nothing_else_is_read() -> None:
    def alibi(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(q >= k, s - SLOPES[h] * (q - k), -torch.inf)

    wanted = FoundScore(None, tuple(SLOPES.tolist()))
    assert found_score(alibi, (CAUSAL, FoundMask(True, None, (0, 700, 100_000))), 100_000, 4, CPU) == wanted
    others: list[Mod] = [
        lambda s, b, h, q, k: alibi(s, b, h, q, k) - 1.0 * (q - k == 99_999),
        lambda s, b, h, q, k: alibi(s, b, h, q, k) - 1.0 * (q - k == 70_001) * (h == 3),
    ]
    for mod in others:
        with pytest.raises(UnsupportedError, match="where ALiBi"):
            found_score(mod, (CAUSAL,), 100_000, 4, CPU)
    read_more: list[Mod] = [
        lambda s, b, h, q, k: s - torch.sub(q, k, alpha=2),
        lambda s, b, h, q, k: s - (q - k) * (q > 5),
        lambda s, b, h, q, k: s - (POSITIONS[q] - POSITIONS[k]),
        lambda s, b, h, q, k: s - torch.stack([q, k]).sum(),
        lambda s, b, h, q, k: q,
    ]
    for mod in read_more:
        recording = record(mod, CPU, True)
        assert recording is not None and not recording.is_of_distance()


@pytest.mark.usefixtures("active")
def test_more_pairs_than_the_limit_need_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_functions, "MOST_PAIRS", 3 * TOKENS**2)
    monkeypatch.setattr(flex_functions, "SAMPLED_PAIRS", 3 * TOKENS**2)
    monkeypatch.setattr(flex_functions, "TILE_TOKENS", 4)
    monkeypatch.setattr(flex, "TILE_TOKENS", 4)
    q, k, v, _ = drawn(kv_heads=4)

    def of_all_heads(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (h >= 0)

    mask = block_mask(of_all_heads, BLOCK_SIZE=64)
    wanted = dense(q, k, v, causal)[0]
    for trust in (False, True, False):  # what is taken on trust is not kept for calls without
        if trust:
            out = flex_attention(q, k, v, block_mask=mask, trust=True)
            torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
            continue
        with pytest.raises(
            UnsupportedError, match=r"at 6,400 pairs of query and key, the limit is 4,107: .*trust=True"
        ):
            flex_attention(q, k, v, block_mask=mask)
    check(causal, None, block_mask(causal, BLOCK_SIZE=64))  # reads no head

    with pytest.raises(UnsupportedError, match=r"score_mod 'by_table' would have to be evaluated at .*trust=True"):
        flex_attention(q, k, v, by_table)
    out = flex_attention(q, k, v, by_table, mask, trust=True)
    torch.testing.assert_close(out, dense(q, k, v, causal, by_table)[0], rtol=1e-12, atol=1e-12)
    with pytest.raises(UnsupportedError, match="where ALiBi"):
        flex_attention(q, k, v, lambda s, b, h, q, k: s - q * k, trust=True)
