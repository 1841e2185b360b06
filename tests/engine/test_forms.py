"""Which form of the kernels (gluon, descriptors or pointers) a call gets on a Hopper GPU, tested without such a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are Triton's")
import ringattn.engine.triton as engine_module
from ringattn.core.geometry import CAUSAL, StridedRange, Tile
from ringattn.engine import forms
from ringattn.engine.base import KV, BackwardInputs, Output, Softmax
from ringattn.engine.triton import TritonEngine
from ringattn.errors import InputError, UnsupportedError
from ringattn.kernels import attention_gluon
from ringattn.kernels.attention_gluon import CONFIG, TENSOR_MEMORY_CONFIGS, gluon_configs, gluon_missing
from ringattn.kernels.configs import configs_for
from ringattn.kernels.launch import Config, LaunchCall
from tests.contract.engine_scenarios import strip

HALF = torch.bfloat16
TILES = (Tile(strip(0, 256), strip(0, 256), CAUSAL, StridedRange(0, 2)),)


class Recorded:
    """A stand-in for the cache of compiled kernels, which records launches instead of running them."""

    def __init__(self) -> None:
        self.calls: list[LaunchCall] = []

    def repeat(self, call: LaunchCall, operands: Any, sm_margin: int) -> Callable[..., None]:
        self.calls.append(call)
        return lambda *_: None


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    """Let the engine choose kernels as on sm_90. Yield a record of the launches, none of which runs."""
    recorded = Recorded()
    monkeypatch.setattr(engine_module, "kept", recorded)
    monkeypatch.setattr(engine_module, "architecture", lambda device: 90)
    gluon_missing.cache_clear()
    if why := gluon_missing(90):
        pytest.skip(why)
    yield recorded
    gluon_missing.cache_clear()


def rows(dim: int = 128, dtype: torch.dtype = HALF, pad: int = 0) -> Tensor:
    return torch.zeros(256, 1, 2, dim + pad, dtype=dtype)[..., :dim]


WIDE = {"q": rows(192), "k": rows(192), "v": rows(128)}
"""Tensors of latent attention, with wide keys."""


def run_forward(engine: TritonEngine, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """Run a forward pass of two steps, so that a state is carried between them."""
    works = engine.prepare([TILES, TILES], Softmax(0.1, **options), 256, 2)
    state = engine.begin(works, q, v.shape[3], None)
    for work in works:
        engine.attend(q, KV(k, v), state, work)


def form_of(call: LaunchCall) -> str:
    if call.kernel.fn.__name__ == "forward_kernel":
        return "gluon"
    return "descriptors" if call.meta["DESCRIBED"] else "pointers"


@pytest.mark.parametrize(
    ("case", "form"),
    [
        ({}, "gluon"),
        ({"q": rows(64), "k": rows(64), "v": rows(64)}, "gluon"),
        ({"q": rows(dtype=torch.float16), "k": rows(dtype=torch.float16), "v": rows(dtype=torch.float16)}, "gluon"),
        ({"softcap": 30.0}, "gluon"),
        ({"alibi_slopes": (0.5, 0.25)}, "gluon"),
        ({"dropout_p": 0.1}, "descriptors"),
        ({"softcap": 30.0, "dropout_p": 0.1}, "descriptors"),
        *(({"q": rows(dim), "k": rows(dim), "v": rows(dim)}, "descriptors") for dim in (80, 96)),
        ({name: rows(256) for name in "qkv"} | {"softcap": 30.0}, "gluon"),
        ({name: rows(256) for name in "qkv"} | {"alibi_slopes": (0.5, 0.25)}, "descriptors"),
        (WIDE, "gluon"),
        (WIDE | {"softcap": 30.0}, "descriptors"),
        (WIDE | {"v": rows(192)}, "descriptors"),
        ({"v": rows(64)}, "descriptors"),
        ({"q": rows(pad=1)}, "descriptors"),
        ({"k": rows(pad=1)}, "pointers"),
        ({"v": rows(pad=1)}, "pointers"),
        ({name: rows(dtype=torch.float32) for name in "qkv"}, "pointers"),
    ],
)
def test_a_call_gets_the_best_form_that_takes_it(case: dict[str, Any], form: str, launched: Recorded) -> None:
    run_forward(TritonEngine(), **({name: rows() for name in "qkv"} | case))
    assert [form_of(call) for call in launched.calls] == [form, form]


def test_another_form_for_a_tensor_has_the_tables_of_the_pass(launched: Recorded) -> None:
    """A call whose tensors need another form keeps the block sizes of the pass.

    The flags of first blocks are set for these sizes. With others, a launch could read a state that is not initialised.
    """
    run_forward(TritonEngine(), rows(), rows(), rows())
    run_forward(TritonEngine(), rows(), rows(pad=1), rows())
    first, second = launched.calls[0], launched.calls[2]
    assert form_of(first) == "gluon" and form_of(second) == "pointers"
    assert all(first.meta[name] == second.meta[name] for name in ("BLOCK_M", "BLOCK_N"))


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ({"alibi_slopes": (0.5, 0.25), "dropout_p": 0.1}, "has no dropout_p"),
        ({"dropout_p": 0.1}, "has no dropout_p"),
        ({"q": rows(80), "k": rows(80), "v": rows(80)}, "not 80 and 80"),
        ({name: rows(256) for name in "qkv"} | {"alibi_slopes": (0.5, 0.25)}, "to 128, not 256"),
        ({"v": rows(64)}, "not 128 and 64"),
        (WIDE | {"v": rows(192)}, "not 192 and 192"),
        (WIDE | {"softcap": 30.0}, "has no softcap for keys of 192"),
        ({name: rows(dtype=torch.float32) for name in "qkv"}, "not torch.float32"),
        ({"q": rows(pad=1)}, "multiples of 16 bytes"),
        ({"k": rows(pad=1)}, "multiples of 16 bytes"),
    ],
)
def test_gluon_by_name_refuses_unsupported_calls(case: dict[str, Any], why: str, launched: Recorded) -> None:
    for engine in (TritonEngine(form="gluon"), TritonEngine(configs_for(90, HALF, 128)._replace(forward=CONFIG))):
        with pytest.raises(UnsupportedError, match=f"form='gluon': .*{why}.*; leave form unset"):
            run_forward(engine, **({name: rows() for name in "qkv"} | case))
    assert not launched.calls


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(InputError, match=r"^form=nonsense: .*one of pointers, descriptors, gluon$"):
        TritonEngine(form="nonsense")


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 5), "does not run on sm_75: it needs sm_80"),
        ((8, 6), "on sm_86: pointers (the Gluon kernel is for sm_90 and sm_100, not sm_86)"),
        (
            (9, 0),
            "on sm_90: gluon for head dimensions 64, 128, 256, and keys of 192 with values of 128, without dropout, ",
        ),
        ((10, 3), "on sm_103: descriptors, or pointers for rows that TMA cannot describe (the Gluon kernels for"),
    ],
)
def test_the_forms_of_a_device(capability: tuple[int, int], expected: str) -> None:
    assert expected in forms.on_device(capability)


def test_a_form_or_blocks_by_name_are_not_replaced(launched: Recorded) -> None:
    blocks = configs_for(90, HALF, 128)._replace(forward=Config(64, 64, 4, 2, "pointers"))
    for engine in (TritonEngine(form="pointers"), TritonEngine(form="descriptors"), TritonEngine(blocks)):
        run_forward(engine, rows(), rows(), rows())
    assert [form_of(call) for call in launched.calls[::2]] == ["pointers", "descriptors", "pointers"]
    assert launched.calls[-1].meta["BLOCK_M"] == 64


def test_a_triton_without_gluon_runs_descriptors(launched: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_gluon.triton, "__version__", "3.10.0")
    gluon_missing.cache_clear()
    run_forward(TritonEngine(), rows(), rows(), rows())
    assert form_of(launched.calls[0]) == "descriptors"
    assert "forward uses form descriptors (the Gluon kernel needs Triton" in forms.describe_forms(
        90, HALF, (128, 128), ()
    )
    assert "on sm_90: descriptors, or" in forms.on_device((9, 0)) and "not 3.10.0" in forms.on_device((9, 0))


@pytest.mark.parametrize("arch", [80, 86, 89, 100, 120])
def test_other_architectures_keep_their_table(arch: int, launched: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "architecture", lambda device: arch)
    run_forward(TritonEngine(), rows(), rows(), rows())
    table = configs_for(arch, HALF, 128).forward
    assert form_of(launched.calls[0]) == table.form and launched.calls[0].meta["BLOCK_M"] == table.block_m


def test_gluon_by_name_on_blackwell_has_kernels_of_its_own(launched: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """On sm_100 only its name chooses Gluon. A fused backward keeps its form. Blocks of sm_90 are refused."""
    monkeypatch.setattr(engine_module, "architecture", lambda device: 100)
    run_forward(TritonEngine(form="gluon"), rows(), rows(), rows())
    assert [call.kernel.fn.__name__ for call in launched.calls] == ["tcgen05_forward_kernel"] * 2
    run_backward(TritonEngine(form="gluon"), *[rows()] * 4)
    assert [call.kernel.fn.__name__ for call in launched.calls[2:]] == [
        "tcgen05_grad_q_kernel", "tcgen05_grad_kv_kernel"
    ]  # fmt: skip
    run_backward(TritonEngine(form="gluon", deterministic=False), *[rows()] * 4)
    run_backward(TritonEngine(), *[rows()] * 4)
    assert [gradient_form(call) for call in launched.calls[4:]] == ["descriptors"] * 3
    for refused, why in (({"softcap": 5.0}, "takes no options"), ({"alibi_slopes": (0.5, 0.25)}, "takes no options")):
        with pytest.raises(UnsupportedError, match=why):
            run_backward(TritonEngine(form="gluon"), *[rows()] * 4, **refused)
    with pytest.raises(UnsupportedError, match="head dimensions of 64 or 128"):
        run_backward(TritonEngine(form="gluon"), *[rows(256)] * 4)
    for arch, config in ((100, CONFIG), (90, TENSOR_MEMORY_CONFIGS.forward)):
        monkeypatch.setattr(engine_module, "architecture", lambda device, arch=arch: arch)
        with pytest.raises(UnsupportedError, match=f"another architecture than sm_{arch}"):
            run_forward(TritonEngine(configs_for(100, HALF, 128)._replace(forward=config)), rows(), rows(), rows())
    monkeypatch.setattr(engine_module, "architecture", lambda device: 100)
    gluon = gluon_configs(128)._replace(forward=configs_for(100, HALF, 128).forward)
    with pytest.raises(UnsupportedError, match="another architecture than sm_100"):
        run_backward(TritonEngine(gluon), *[rows()] * 4)
    with pytest.raises(UnsupportedError, match="adds to dQ is for sm_90, not sm_100"):
        run_backward(TritonEngine(gluon, deterministic=False), *[rows()] * 4)
    assert "forward uses form descriptors (the Gluon kernels for sm_100 have not run" in forms.describe_forms(
        100, HALF, (128, 128), ()
    )


def run_backward(
    engine: TritonEngine, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dq_pad: int = 0, **options: Any
) -> None:  # fmt: skip
    """Run the backward pass of a single step. `dq_pad`: floats between the rows of dQ, of a fused backward."""
    works, per_row = engine.prepare([TILES], Softmax(0.1, **options), 256, 2), torch.zeros(1, 2, 256)
    dq = engine.begin_grad(works, q, v.shape[3])
    if dq_pad:
        dq = Output(rows(q.shape[3], torch.float32, dq_pad))
    dkv = KV(torch.zeros(k.shape), torch.zeros(v.shape))
    engine.attend_grad(q, KV(k, v), BackwardInputs(dout, dout, per_row, None, per_row), dq, dkv, works[0])


def gradient_form(call: LaunchCall) -> str:
    if "gluon" in call.kernel.fn.__module__:
        return "gluon"
    return "descriptors" if call.meta["DESCRIBED"] else "pointers"


GRADIENTS = {
    "": ({}, ["gluon", "gluon"]),
    "64": ({name: rows(64) for name in ("q", "k", "v", "dout")}, ["gluon", "gluon"]),
    "256": ({name: rows(256) for name in ("q", "k", "v", "dout")}, ["gluon", "gluon"]),
    "softcap": ({"softcap": 30.0}, ["gluon", "gluon"]),
    "alibi": ({"alibi_slopes": (0.5, 0.25)}, ["gluon", "gluon"]),
    "dropout": ({"dropout_p": 0.1}, ["descriptors", "descriptors"]),
    "80": ({name: rows(80) for name in ("q", "k", "v", "dout")}, ["descriptors", "descriptors"]),
    "192": (WIDE | {"dout": rows(128)}, ["gluon", "gluon"]),
    "192 with softcap": (WIDE | {"dout": rows(128), "softcap": 30.0}, ["descriptors", "descriptors"]),
    "unequal": ({"v": rows(64), "dout": rows(64)}, ["descriptors", "descriptors"]),
    "dout": ({"dout": rows(pad=1)}, ["descriptors", "pointers"]),
    "k": ({"k": rows(pad=1)}, ["pointers", "descriptors"]),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_get_the_best_form_that_takes_them(name: str, launched: Recorded) -> None:
    case, expected = GRADIENTS[name]
    run_backward(TritonEngine(), **({name: rows() for name in ("q", "k", "v", "dout")} | case))
    assert [gradient_form(call) for call in launched.calls] == expected


@pytest.mark.parametrize("form", [None, "gluon"])
def test_wide_keys_have_their_blocks(form: str | None, launched: Recorded) -> None:
    run_forward(TritonEngine(form=form), **WIDE)
    run_backward(TritonEngine(form=form), **WIDE, dout=rows())
    forward, grad_q, grad_kv, _ = gluon_configs(192)
    blocks = [(call.meta["BLOCK_M"], call.meta["BLOCK_N"]) for call in launched.calls]
    assert blocks == [config[:2] for config in (forward, forward, grad_q, grad_kv)]


def test_gluon_gradients_by_name_refuse_unsupported_calls(launched: Recorded) -> None:
    q = rows()
    with pytest.raises(UnsupportedError, match=r"form=.gluon.: the Gluon kernel .* multiples of 16 bytes"):
        run_backward(TritonEngine(form="gluon"), q, q, q, rows(pad=1))
    assert not launched.calls
    for engine in (TritonEngine(form="descriptors"), TritonEngine(configs_for(90, HALF, 128))):
        run_backward(engine, q, q, q, q)
    assert [gradient_form(call) for call in launched.calls] == ["descriptors"] * 4


def test_the_fused_backward_takes_gluon_where_it_can(launched: Recorded) -> None:
    """One launch with dQ, in the form that can read the rows and add to dQ; a form by name is taken or refused."""
    q, odd = rows(), rows(pad=1)
    for dout, dq_pad in ((q, 0), (q, 4), (q, 1), (odd, 0)):
        run_backward(TritonEngine(deterministic=False), q, q, q, dout, dq_pad)
    run_backward(TritonEngine(deterministic=False), q, q, q, q, softcap=30.0)
    run_backward(TritonEngine(deterministic=False), **WIDE, dout=q)
    run_backward(TritonEngine(form="descriptors", deterministic=False), q, q, q, q)
    forms = ["gluon", "gluon", "descriptors", "pointers", *["descriptors"] * 3]
    assert [gradient_form(call) for call in launched.calls] == forms
    with pytest.raises(UnsupportedError, match="adds to dQ takes no options, and head dimensions of 64 or 128"):
        run_backward(TritonEngine(form="gluon", deterministic=False), **WIDE, dout=q)
    for dout, dq_pad in ((q, 1), (odd, 0)):
        with pytest.raises(UnsupportedError, match=r"form=.gluon.: the Gluon kernel .* multiples of 16 bytes"):
            run_backward(TritonEngine(form="gluon", deterministic=False), q, q, q, dout, dq_pad)
    assert len(launched.calls) == len(forms)


@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_another_form_for_a_tensor_has_the_flags_of_the_pass(dim: int, value_dim: int, launched: Recorded) -> None:
    """Both backward forms have the same number of queries per block, so the flags of a pass suit both."""
    q = rows(dim)
    for dout in (rows(value_dim), rows(value_dim, pad=1)):
        run_backward(TritonEngine(), q, q, rows(value_dim), dout)
    assert [gradient_form(call) for call in launched.calls] == ["gluon", "gluon", "descriptors", "pointers"]
    assert launched.calls[0].meta["BLOCK_M"] == launched.calls[2].meta["BLOCK_M"]
