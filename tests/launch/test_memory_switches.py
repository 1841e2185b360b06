"""Switches that trade memory for time: the same training where promised, bounded elsewhere.

Threads in float64 for exactness, processes for FSDP.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from ringattn import Ring
from ringattn.errors import InputError
from ringattn.launch.train import config as train_config
from ringattn.launch.train import loop, train
from ringattn.launch.train import model as model_module
from ringattn.launch.train.config import ModelConfig, TrainConfig, check_switches
from ringattn.launch.train.data import BatchPart
from ringattn.launch.train.model import EIGHT_BIT, SavedActivations, Transformer, pack_rows, unpack_rows
from ringattn.layers import tiled
from ringattn.testing import run_ranks
from tests.launch.training import TINY, run, same

EXACT: list[dict[str, Any]] = [
    {"recompute": "selective"},
    {"recompute": "full"},
    {"chunked_loss_tokens": 7},
    {"chunked_loss_tokens": 1000},
    {"recompute": "full", "chunked_loss_tokens": 7},
    {"tiled_mlp_tokens": 7},
    {"tiled_mlp_tokens": 1000, "recompute": "selective"},
    {"tiled_mlp_tokens": 7, "recompute": "full", "chunked_loss_tokens": 7},
]
STEP = {"int8": 1 / 127, "fp8": 1 / 16}
"""One rounding step of the format: of a row's greatest element in int8, of each element in e4m3 (half of 2**-3)."""


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return run(TINY, 1)


# --- exact switches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("change", EXACT)
def test_recomputing_and_chunks_change_nothing(plain: dict[str, Any], world_size: int, change: dict[str, Any]) -> None:
    same(run(replace(TINY, **change), world_size), plain)


def test_exact_switches_with_ranks_that_have_no_tokens() -> None:
    few = replace(TINY, tokens=3, layout="contiguous")
    same(run(replace(few, recompute="full", chunked_loss_tokens=1, tiled_mlp_tokens=1), 5), run(few, 1))
    packed = replace(few, saved_activations="int8")
    same(run(packed, 5), run(packed, 1))


@pytest.mark.parametrize(("recompute", "passes"), [("none", 2), ("selective", 2), ("full", 3)])
def test_only_full_attends_again(recompute: str, passes: int) -> None:
    result = run(replace(TINY, recompute=recompute), 2)
    assert result["counters"]["passes"] == passes * TINY.steps * TINY.model.layers


def test_offload_goes_with_no_other_packing() -> None:
    with pytest.raises(InputError, match=r"^saved_activations=int8: .* recompute=offloaded"):
        check_switches(replace(TINY, recompute="offloaded", saved_activations="int8"), "cuda")


def test_threads_cannot_shard() -> None:
    with pytest.raises(InputError, match=r"^sharding: the ranks are threads"):
        run(replace(TINY, sharding="zero3"), 2)


# --- eight bits ------------------------------------------------------------------------------------------------------


@given(
    exponents=st.lists(st.floats(-30, 30), min_size=1, max_size=6),
    elements=st.integers(1, 40),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_packed_rows_stay_within_their_bound(
    exponents: list[float], elements: int, dtype: torch.dtype, seed: int
) -> None:
    drawn = torch.randn(len(exponents), elements, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = (drawn * torch.tensor(exponents, dtype=torch.float64)[:, None].exp()).to(dtype)
    greatest = x.double().abs().amax(-1, keepdim=True)
    # A few roundings of the scale's arithmetic, in float32 unless x is float64, and one to x's dtype.
    noise = greatest * (torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps)
    bounds = {
        torch.int8: greatest / 254,
        torch.float8_e4m3fn: torch.maximum(x.double().abs() / 16, greatest / 448 / 1024),
    }
    for narrow, bound in bounds.items():
        packed = pack_rows(x, narrow)
        assert packed.values.dtype == narrow and packed.scales.shape == (len(exponents), 1)
        back = unpack_rows(packed)
        assert back.dtype == dtype
        assert ((back.double() - x.double()).abs() <= bound + noise).all()


@pytest.mark.parametrize("narrow", EIGHT_BIT.values())
def test_packing_hides_nothing(narrow: torch.dtype) -> None:
    x = torch.tensor([[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0], [1e-44, 0.0], [3.0, -3.0]])
    back = unpack_rows(pack_rows(x, narrow))
    assert back[0].tolist() == [0.0, 0.0] and back[4].tolist() == [3.0, -3.0]
    assert back[1:3].isnan().any(-1).all()
    assert back[3].isfinite().all()


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("how", EIGHT_BIT)
def test_packed_activations_round_only_gradients(plain: dict[str, Any], how: str, recompute: str) -> None:
    result = run(replace(TINY, saved_activations=how, recompute=recompute), 1)
    assert result["losses"][0] == plain["losses"][0] and result["grad_norms"] != plain["grad_norms"]
    exact, rounded = gradients(TINY), gradients(replace(TINY, saved_activations=how, recompute=recompute))
    assert (rounded - exact).norm() <= STEP[how] * exact.norm()
    again = run(replace(TINY, saved_activations=how, recompute=recompute), 2)
    assert again["losses"] == pytest.approx(result["losses"], rel=1e-10)


def flat_gradients(ring: Ring, parts: list[BatchPart], model: Transformer, config: TrainConfig, how: str) -> Tensor:
    """All gradients of a step in one vector, with activations saved in this way; also left in the model."""
    model.zero_grad()
    loop.backward(ring, ring, parts, model, replace(config, saved_activations=how))
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


def gradients(config: TrainConfig) -> Tensor:
    """All gradients of a first step in one vector."""

    def of_rank(ring: Ring) -> Tensor:
        model, _ = loop.make_model(ring, config)
        parts = [BatchPart(ring.sequence(config.tokens), batch_of(config))]
        return flat_gradients(ring, parts, model, config, config.saved_activations)

    return run_ranks(1, of_rank)[0]


def batch_of(config: TrainConfig) -> Tensor:
    """Tokens for one step."""
    return torch.randint(0, 256, (config.batch, config.tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_only_activations_are_packed(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    # The number of tokens equals the width of the model, so a weight has one row per token.
    config = replace(TINY, batch=1, tokens=48, dtype=dtype, saved_activations="int8",
                     model=ModelConfig(1, 48, 4, 4, 48))  # fmt: skip
    packed: list[Tensor] = []
    pack = SavedActivations._pack

    def watched(self: SavedActivations, tensor: Tensor) -> Any:
        result = pack(self, tensor)
        if not isinstance(result, Tensor):
            packed.append(tensor.detach().clone())
        return result

    monkeypatch.setattr(SavedActivations, "_pack", watched)
    model = Transformer(config.model, 256, loop.DTYPES[dtype], config.seed)
    gradients(config)
    # Three norms save their input twice and the normalized rows; then the outputs of two, gate, up, silu, product.
    assert len(packed) == 3 * 3 + 2 + 4 and {one.shape[-1] for one in packed} == {48}
    for weight in model.parameters():
        for one in packed:
            assert all(not torch.equal(one.flatten().float().sort().values, cast.flatten().float().sort().values)
                       for cast in (weight.detach(), weight.detach().to(one.dtype)))  # fmt: skip


def test_weights_and_other_rows_are_left_alone() -> None:
    weight = nn.Parameter(torch.randn(5, 8))
    for weights, rows, shared in (([weight], 5, True), ([], 6, True), ([], 5, False)):
        with SavedActivations("int8", weights, rows, row_elements=8).packing():
            y = torch.ones(5, 8, requires_grad=True) * weight
        saved = y.grad_fn._saved_other  # type: ignore[union-attr]
        assert torch.equal(saved, weight) is shared


def test_offload_moves_activations_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    host = save_on_cpu

    def watched(**options: Any) -> Any:
        hooks = host(**options)
        pack = hooks.pack_hook
        hooks.pack_hook = lambda tensor: (moved.append(tensor.numel()), pack(tensor))[1]
        return hooks

    monkeypatch.setattr(model_module, "save_on_cpu", watched)
    assert torch.equal(gradients(replace(TINY, saved_activations="offload")), gradients(TINY))
    rows, (blocks, dim, hidden) = TINY.batch * TINY.tokens, (TINY.model.layers, 32, 48)
    assert sum(moved) == rows * (blocks * (8 * dim + 4 * hidden) + 3 * dim)  # as the test above counts them


def test_offloaded_checkpoints_move_inputs_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    to_host = tiled.to_host
    monkeypatch.setattr(tiled, "to_host", lambda x: (moved.append(x.numel()), to_host(x))[1])
    change = {"recompute": "offloaded", "tiled_mlp_tokens": 7, "chunked_loss_tokens": 7}
    torch.testing.assert_close(gradients(replace(TINY, **change)), gradients(TINY), rtol=1e-12, atol=1e-15)
    assert moved == [TINY.batch * TINY.tokens * TINY.model.dim] * TINY.model.layers


# --- optimizers ------------------------------------------------------------------------------------------------------


def test_state_of_the_optimizers() -> None:
    matrix, vector, count = nn.Parameter(torch.ones(24, 16)), nn.Parameter(torch.ones(16)), 24 * 16 + 16
    # A step counter each for the first and the last; Adafactor keeps rows and columns of a matrix, all of a vector.
    expected = {"adamw": 8 * count + 8, "sgd": 0, "adafactor": 4 * (24 + 16 + 16) + 8}
    for name, nbytes in expected.items():
        optimizer = model_module.make_optimizer(name, [matrix, vector], lr=0.1, weight_decay=0.0)
        before = matrix.detach().clone()
        matrix.grad, vector.grad = torch.ones_like(matrix), torch.ones_like(vector)
        optimizer.step()
        assert (matrix < before).all(), name
        assert model_module.state_bytes(optimizer) == nbytes, name


@pytest.mark.parametrize(("name", "packages"), [("adamw8bit", "torchao or bitsandbytes"), ("lion", "lion-pytorch")])
def test_an_optimizer_that_is_not_installed_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, packages: str
) -> None:
    monkeypatch.setattr(train_config, "find_spec", lambda package: None)
    with pytest.raises(InputError, match=f"^optimizer={name}: its package is missing; pip install {packages}$"):
        check_switches(replace(TINY, optimizer=name, dtype="fp32"), "cpu")
    assert train.main([f"optimizer={name}", "transport=gloo"]) == 2
    assert capsys.readouterr().err.startswith(f"ringattn train: optimizer={name}: its package is missing")


def test_optimizers_are_taken_from_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for packages: each has the class under its documented name, and gets the options of the run."""
    made: list[tuple[str, dict[str, Any]]] = []

    def package(module: str) -> Any:
        def kind(name: str) -> Any:
            return lambda weights, **options: made.append((f"{module}:{name}", options))

        return SimpleNamespace(AdamW8bit=kind("AdamW8bit"), Lion=kind("Lion"))

    monkeypatch.setattr(model_module, "import_module", package)
    for installed, name in (("torchao", "adamw8bit"), ("bitsandbytes", "adamw8bit"), ("lion_pytorch", "lion")):
        monkeypatch.setattr(train_config, "find_spec", lambda package, here=installed: here == package or None)
        model_module.make_optimizer(name, [], lr=0.1, weight_decay=0.2)
    options = {"lr": 0.1, "weight_decay": 0.2}
    assert made == [
        ("torchao.optim:AdamW8bit", {**options, "betas": (0.9, 0.95)}),
        ("bitsandbytes.optim:AdamW8bit", {**options, "betas": (0.9, 0.95)}),
        ("lion_pytorch:Lion", options),
    ]
    monkeypatch.setattr(train_config, "find_spec", lambda package: package == "torchao")
    with pytest.raises(InputError, match=r"^optimizer=adamw8bit: .* dtype=fp64"):
        check_switches(replace(TINY, optimizer="adamw8bit"), "cpu")


def test_the_learning_rate_warms_up_from_any_step() -> None:
    config = replace(TINY, learning_rate=0.5, warmup_steps=4)
    tensor = torch.tensor(0.1)  # as torchao has it
    for lr in (0.1, tensor):
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=lr)
        for step, rate in ((0, 0.125), (2, 0.375), (9, 0.5)):
            loop.set_learning_rate(optimizer, config, step)
            assert float(optimizer.param_groups[0]["lr"]) == rate
    assert float(tensor) == 0.5


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"saved_activations": "offload"}, "saved_activations=offload: .* on a CPU"),
        ({"recompute": "offloaded"}, "recompute=offloaded: .* on a CPU"),
        ({"sharding": "zero2", "optimizer": "adafactor"}, "optimizer=adafactor: .* sharding=zero2"),
    ],
)
def test_switches_that_do_not_go_together(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        run(replace(TINY, **change), 2)


def test_the_command_refuses_with_the_key_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "_run", lambda config: pytest.fail("ranks were started"))
    assert train.main(["saved_activations=offload", "transport=gloo"]) == 2
    assert capsys.readouterr().err.startswith("ringattn train: saved_activations=offload: ")
    assert train.main(["recompute=some"]) == 2
    assert capsys.readouterr().err.startswith(
        "ringattn train: recompute=some: choose one of none, selective, full, offloaded"
    )
