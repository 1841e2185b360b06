"""Which engine is chosen, and the reason that users see."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from ringattn import Ring
from ringattn.engine import flash, select
from ringattn.engine.base import Softmax
from ringattn.engine.plain import PlainEngine
from ringattn.engine.select import ENGINES, choose
from ringattn.errors import InputError, UnsupportedError
from ringattn.explain import Explanation
from ringattn.planner.cluster import CLUSTERS
from ringattn.planner.simulate import duration
from ringattn.testing import run_ranks
from ringattn.transport.local import LocalTransport

HOST = torch.device("cpu")
CUDA = torch.device("cuda", 0)
HALF = torch.bfloat16
CAPPED, BIASED = Softmax(1.0, 1, 30.0), Softmax(1.0, 1, alibi_slopes=(0.5,))
DROPPED = Softmax(1.0, dropout_p=0.1)
DIMS_OF_GLUON = (
    "the Gluon kernel takes head dimensions of 64, 128 or 256, equal for both, or keys of 192 with values of 128"
)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Clear the caches before and after a test, so that no choice of an engine is kept for the next test."""
    select._choose.cache_clear()
    yield
    select._choose.cache_clear()
    architecture = getattr(sys.modules.get("ringattn.engine.triton"), "architecture", None)
    if architecture is not None:
        architecture.cache_clear()


@pytest.fixture
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake the properties of a Hopper GPU that the choice reads."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(select.aten, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)


def chosen_by_auto(
    device: torch.device, dtype: torch.dtype = HALF, d_k: int = 128, d_v: int = 128, softmax: Softmax | None = None
) -> tuple[str, str]:
    """Return the name of the engine that `engine="auto"` chooses, and the reason."""
    choice = choose("auto", device, dtype, d_k, d_v, softmax)
    name, reason = choice.why.split(": ", 1)
    assert choice.engine.name == name
    return name, reason


# --- by auto ---------------------------------------------------------------------------------------------------------


def test_on_a_cpu() -> None:
    assert chosen_by_auto(HOST) == ("aten", "the only fused kernels for cpu")
    assert chosen_by_auto(HOST, torch.float64, 13, 300) == ("aten", "the only fused kernels for cpu")
    assert chosen_by_auto(HOST, softmax=CAPPED) == ("plain", "no fused kernel supports a softcap on cpu")
    assert chosen_by_auto(HOST, softmax=BIASED) == ("plain", "no fused kernel supports alibi_slopes on cpu")
    assert chosen_by_auto(HOST, softmax=DROPPED) == ("plain", "no fused kernel supports this dropout on cpu")


@pytest.mark.usefixtures("_hopper")
def test_on_a_gpu() -> None:
    assert chosen_by_auto(CUDA, d_k=64, d_v=64) == (
        "aten", "torch has a fused kernel for bfloat16, head_dim 64 on NVIDIA H200"
    )  # fmt: skip
    plainly = "torch has no fused kernel for {} on NVIDIA H200, so it uses the same operations as plain"
    assert chosen_by_auto(CUDA, torch.float32) == ("aten", plainly.format("float32, head_dim 128"))
    assert chosen_by_auto(CUDA, d_v=264) == ("aten", plainly.format("bfloat16, head_dim 264"))


@pytest.mark.usefixtures("_hopper")
def test_the_least_predicted_time_on_a_known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` compares aten, with the kernel that torch would run, and triton, with the multiprocessors that it uses."""
    least = "least predicted time on NVIDIA H200, head_dim 128, forward and backward, in TFLOP/s: "
    source = "(measured on one H200, full mask, 32,768 tokens)"
    assert chosen_by_auto(CUDA) == ("aten", f"{least}aten (cudnn) 564, triton (gluon) 527 {source}")
    margin = choose("auto", CUDA, HALF, 128, 128, None, 8)
    assert "aten (cudnn) 564, triton (gluon) 495 " in margin.why and margin.engine.name == "aten"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    repeats = f"{least}aten (cuda-flash) 322, triton (gluon) 527 {source}; forward uses form gluon, or descriptors for "
    assert chosen_by_auto(CUDA) == ("triton", f"{repeats}tensors that gluon cannot read")
    assert choose("auto", CUDA, HALF, 128, 128, None, 8).engine.sm_margin == 8
    assert chosen_by_auto(CUDA, torch.float32)[0] == chosen_by_auto(CUDA, d_v=64)[0] == "aten"
    for name, engine in (("NVIDIA H100 PCIe", "aten"), ("NVIDIA L4", "aten"), ("NVIDIA H100 80GB HBM3", "triton")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        select._choose.cache_clear()
        assert chosen_by_auto(CUDA)[0] == engine
    monkeypatch.setitem(sys.modules, "ringattn.engine.triton", None)
    select._choose.cache_clear()
    assert chosen_by_auto(CUDA) == (
        "aten",
        "torch has a fused kernel for bfloat16, head_dim 128 on NVIDIA H100 80GB HBM3",
    )


@pytest.mark.usefixtures("_hopper")
def test_a_softcap_on_a_gpu() -> None:
    refused = f"descriptors ({DIMS_OF_GLUON}, not 256 and 16)"
    single = "pointers (the Gluon kernel takes float16 and bfloat16, not torch.float32)"
    for dtype, form in ((torch.float32, single), (torch.float16, refused), (HALF, refused)):
        forms = f"forward uses form {form}"
        assert chosen_by_auto(CUDA, dtype, 256, 16, CAPPED) == (
            "triton",
            f"the only fused kernels with a softcap; {forms}",
        )
    expected = "no fused kernel here supports a softcap (engine='triton' {})"
    assert chosen_by_auto(CUDA, torch.float64, softmax=CAPPED) == (
        "plain", expected.format("does not support torch.float64; use engine='plain'")
    )  # fmt: skip
    assert chosen_by_auto(CUDA, d_k=257, softmax=CAPPED) == (
        "plain", expected.format("takes head dimensions to 256, not 257; use engine='plain'")
    )  # fmt: skip


@pytest.mark.usefixtures("_hopper")
def test_alibi_and_dropout_on_a_gpu() -> None:
    """For ALiBi and dropout auto chooses `triton` on a GPU, with or without a softcap. The Gluon kernel has no dropout.

    For slopes that are too steep for these kernels, it chooses `plain`.
    """
    expected = "the only fused kernels with {}; forward uses form {}"
    gluon = "gluon, or descriptors for tensors that gluon cannot read"
    both = BIASED._replace(softcap=30.0)
    refused = "descriptors (the Gluon kernel has no dropout_p)"
    assert chosen_by_auto(CUDA, softmax=BIASED) == ("triton", expected.format("alibi_slopes", gluon))
    assert chosen_by_auto(CUDA, softmax=both) == ("triton", expected.format("a softcap and alibi_slopes", gluon))
    assert chosen_by_auto(CUDA, softmax=DROPPED) == ("triton", expected.format("this dropout", refused))
    name, reason = chosen_by_auto(CUDA, softmax=Softmax(1.0, alibi_slopes=(0.5, -1e10)))
    assert name == "plain" and "takes alibi_slopes to 4294967296, of either sign, not 1e+10" in reason


@pytest.mark.usefixtures("_hopper")
def test_a_softcap_on_an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    name, reason = chosen_by_auto(CUDA, softmax=CAPPED)
    assert name == "plain" and "from sm_80 on, not sm_75" in reason


@pytest.mark.usefixtures("_hopper")
def test_a_softcap_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ringattn.engine.triton", None)
    name, reason = chosen_by_auto(CUDA, softmax=CAPPED)
    assert name == "plain" and "needs the package triton, which is not installed" in reason


# --- by name ---------------------------------------------------------------------------------------------------------


def test_a_named_engine_is_chosen_or_refused() -> None:
    assert choose("plain", HOST, torch.float64, 8, 8, CAPPED).why == "plain: chosen by name"
    assert choose("aten", HOST, HALF, 8, 8, None).engine.name == "aten"
    for option, softmax in (("softcap", CAPPED), ("alibi_slopes", BIASED), ("dropout_p", DROPPED)):
        for name in ("aten", "fa3", "fa4"):
            with pytest.raises(UnsupportedError, match=f"engine='{name}' has no {option}; use engine='auto'"):
                choose(name, HOST, HALF, 8, 8, softmax)
    for name in ("fa3", "fa4", "triton"):
        with pytest.raises(UnsupportedError, match=f"engine='{name}' needs a .*, not cpu"):
            choose(name, HOST, HALF, 8, 8, None)


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize(
    ("dtype", "dims", "forms"),
    [
        (HALF, (128, 128), "gluon, or descriptors for tensors that gluon cannot read"),
        (torch.float16, (64, 64), "gluon, or descriptors for tensors that gluon cannot read"),
        (HALF, (192, 128), "gluon, or descriptors for tensors that gluon cannot read"),
        (HALF, (80, 80), f"descriptors ({DIMS_OF_GLUON}, not 80 and 80)"),
        (HALF, (128, 64), f"descriptors ({DIMS_OF_GLUON}, not 128 and 64)"),
        (torch.float32, (64, 64), "pointers (the Gluon kernel takes float16 and bfloat16, not torch.float32)"),
    ],
)  # fmt: skip
def test_the_reason_names_the_kernels_of_triton(dtype: torch.dtype, dims: tuple[int, int], forms: str) -> None:
    reason = choose("triton", CUDA, dtype, *dims, None).why
    assert reason == f"triton: chosen by name; forward uses form {forms}"


@pytest.mark.usefixtures("_hopper")
def test_triton_refuses_unsupported_calls_before_a_pass() -> None:
    assert choose("triton", CUDA, torch.float32, 8, 256, CAPPED).engine.name == "triton"
    with pytest.raises(UnsupportedError, match=r"does not support torch\.float64"):
        choose("triton", CUDA, torch.float64, 8, 8, None)
    with pytest.raises(UnsupportedError, match="to 256, not 300"):
        choose("triton", CUDA, HALF, 8, 300, None)


@pytest.mark.usefixtures("_hopper")
def test_a_margin_reaches_every_engine_that_supports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "_import_first", lambda name, need: None)
    margins = {name: choose(name, CUDA, HALF, 8, 8, None, 5).engine.sm_margin for name in ENGINES}
    assert margins == {"auto": 0, "aten": 0, "plain": 0, "triton": 5, "fa3": 5, "fa4": 0}


@pytest.mark.usefixtures("_hopper")
def test_an_engine_that_leaves_nothing_free_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring warns once if its engine leaves no multiprocessors free for exchanges on a GPU that need them."""
    monkeypatch.setattr(LocalTransport, "sm_margin", 8)
    with Ring() as ring, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ring.engine = "triton"
        ring.engine_for(CUDA, HALF, 8, 8, None)
        ring.engine = "auto"
        ring.choice(CUDA, HALF, 8, 8, None)
        ring.engine_for(HOST, HALF, 8, 8, None)
        assert not warned
        for _ in range(3):
            ring.engine_for(CUDA, HALF, 8, 8, None)
        (warning,) = warned
        expected = "engine 'aten' leaves no multiprocessor free"
        assert expected in str(warning.message) and "NcclOptions(sm_margin=0)" in str(warning.message)
    monkeypatch.setattr(LocalTransport, "sm_margin", 0)
    with Ring() as ring, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ring.engine_for(CUDA, HALF, 8, 8, None).name == "aten"


# --- what a user reads -----------------------------------------------------------------------------------------------


def test_explain_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with Ring() as ring:
        monkeypatch.setattr(Ring, "device", HOST)
        seq, facts = ring.sequence(64), {"q_heads": 2, "head_dim": 16}
        explanation = ring.explain(seq, **facts)
        assert (explanation.engine, explanation.engine_why) == ("aten", "aten: the only fused kernels for cpu")
        assert "engine aten: the only fused kernels for cpu" in str(explanation).splitlines()
        named = ring.explain(seq, cluster="h100", **facts).engine_why
        assert named.startswith("aten: the only fused kernels for cpu; kernel times are those on H100")
        assert ring.explain(seq, softcap=3.0, **facts).engine == "plain"
        explanation = ring.explain(seq, alibi_slopes=[0.5, 0.25], **facts)
        assert "engine plain: no fused kernel supports alibi_slopes on cpu" in str(explanation).splitlines()
        explanation = ring.explain(seq, **facts)
        q = torch.zeros(1, 64, 2, 16)
        assert ring.explain(seq, q=q, k=q, v=q).engine_why == explanation.engine_why


def test_an_engine_may_be_given_as_an_object() -> None:
    class CustomEngine(PlainEngine):
        name = "custom"

    engine, q = CustomEngine(), torch.zeros(1, 64, 2, 16)
    with Ring(engine=engine) as ring:
        assert ring.choice(HOST, torch.float32, 16, 16, None).engine is engine
        assert ring.explain(ring.sequence(64), q=q, k=q, v=q).engine_why == "custom: passed as an object"


def test_explain_says_what_a_margin_costs() -> None:
    # `message_sms` is 0: otherwise messages would use the reserved SMs, and the margin would save what they cost else.
    apart = replace(CLUSTERS["h100"], message_sms=0.0)
    facts = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "cluster": apart}

    def body(ring: Ring) -> list[Explanation]:
        if ring.rank:  # an explanation contains the plans of all ranks
            return []
        return [ring.explain(ring.sequence(1 << 17), sm_margin=margin, **facts) for margin in (0, 4, 8, None)]

    none, four, eight, default = run_ranks(8, body)[0]
    assert (none.sm_margin, none.margin_us) == (default.sm_margin, default.margin_us) == (0, 0.0)
    assert "multiprocessors" not in str(none)
    for explanation, share in ((four, 4 / 132), (eight, 8 / 132)):
        assert explanation.predicted_us - explanation.margin_us == pytest.approx(none.predicted_us)
        # A long ring spends nearly all its time on arithmetic, so its time grows by nearly the share of reserved SMs.
        assert 0.95 * share < explanation.margin_us / explanation.predicted_us <= share
    cost = duration(eight.margin_us / 1e6)
    line = f"8 of 132 multiprocessors are reserved for exchanges. This costs 6.1% of the arithmetic rate, {cost} of the"
    assert line in str(eight)
    with Ring() as ring, pytest.raises(InputError, match="of an unknown number"):
        ring.explain(ring.sequence(64), q_heads=1, head_dim=8, cluster="cpu", sm_margin=8)


@pytest.mark.usefixtures("_hopper")
def test_explain_takes_the_margin_that_the_engine_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalTransport, "sm_margin", 8)
    monkeypatch.setattr(Ring, "device", CUDA)
    for engine, margin in (("triton", 8), ("aten", 0)):
        with Ring(engine=engine) as ring:
            explanation = ring.explain(ring.sequence(64), q_heads=1, head_dim=8)
            assert explanation.sm_margin == margin
            assert explanation.engine_why.endswith("it leaves no multiprocessor free for exchanges") == (not margin)
