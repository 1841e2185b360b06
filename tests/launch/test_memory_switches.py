"""Switches that save memory in training: exact ones give the same losses, 8-bit activations a bounded error.

Ranks are threads, and the dtype is float64 unless stated otherwise.
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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu

from ringattn import Ring
from ringattn.bench.storage_meter import StorageMeter
from ringattn.errors import InputError
from ringattn.launch.train import config as train_config
from ringattn.launch.train import loop, train
from ringattn.launch.train import model as model_module
from ringattn.launch.train.config import ModelConfig, TrainConfig, check_switches
from ringattn.launch.train.data import BatchPart
from ringattn.launch.train.model import EIGHT_BIT, SavedActivations, Transformer, pack_rows, unpack_rows
from ringattn.layers import tiled
from ringattn.testing import run_ranks
from tests.launch.training import TINY, alone, run, same

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
GROUPED: list[dict[str, Any]] = [
    {"head_groups": 2},
    {"head_groups": 2, "recompute": "selective"},
    {"head_groups": 2, "recompute": "full", "chunked_loss_tokens": 7, "tiled_mlp_tokens": 7},
    {"head_groups": 2, "pack_documents": True, "separator": "\n"},
]
STEP = {"int8": 1 / 127, "fp8": 1 / 16}
"""The relative rounding step of the format: of a row's largest element in int8, of each element in e4m3 (2**-3 / 2)."""


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return run(TINY, 1)


# --- exact switches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("change", EXACT)
def test_exact_switches_do_not_change_losses(plain: dict[str, Any], world_size: int, change: dict[str, Any]) -> None:
    same(run(replace(TINY, **change), world_size), plain)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("change", GROUPED)
def test_groups_of_heads_do_not_change_losses(world_size: int, change: dict[str, Any]) -> None:
    config = replace(TINY, **change)
    same(run(config, world_size), alone(config))


def test_switches_work_on_ranks_without_tokens() -> None:
    few = replace(TINY, tokens=3, layout="contiguous")
    same(run(replace(few, recompute="full", chunked_loss_tokens=1, tiled_mlp_tokens=1), 5), run(few, 1))
    packed = replace(few, saved_activations="int8")
    same(run(packed, 5), run(packed, 1))
    same(run(replace(few, steps=1, head_groups=2), 5), run(replace(few, steps=1), 1))


@pytest.mark.parametrize(("recompute", "passes"), [("none", 2), ("selective", 2), ("full", 3)])
def test_only_full_recomputation_repeats_attention(recompute: str, passes: int) -> None:
    result = run(replace(TINY, recompute=recompute), 2)
    assert result["counters"]["passes"] == passes * TINY.steps * TINY.model.layers


def test_offloaded_recomputation_with_packed_activations_is_refused() -> None:
    with pytest.raises(InputError, match=r"^saved_activations=int8: .* recompute=offloaded"):
        check_switches(replace(TINY, recompute="offloaded", saved_activations="int8"), "cuda")


def test_sharding_on_threads_is_refused() -> None:
    with pytest.raises(InputError, match=r"^sharding: needs ranks that are processes"):
        run(replace(TINY, sharding="zero3"), 2)


# --- eight bits ------------------------------------------------------------------------------------------------------


@given(
    exponents=st.lists(st.floats(-30, 30), min_size=1, max_size=6),
    elements=st.integers(1, 40),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_the_error_of_packed_rows_is_bounded(
    exponents: list[float], elements: int, dtype: torch.dtype, seed: int
) -> None:
    normal = torch.randn(len(exponents), elements, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = (normal * torch.tensor(exponents, dtype=torch.float64)[:, None].exp()).to(dtype)
    largest = x.double().abs().amax(-1, keepdim=True)
    # The scale is computed with a few roundings, in float32 unless x is float64, and the result is rounded once to the
    # dtype of x.
    noise = largest * (torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps)
    bounds = {
        torch.int8: largest / 254,
        torch.float8_e4m3fn: torch.maximum(x.double().abs() / 16, largest / 448 / 1024),
    }
    for narrow, bound in bounds.items():
        packed = pack_rows(x, narrow)
        assert packed.values.dtype == narrow and packed.scales.shape == (len(exponents), 1)
        back = unpack_rows(packed)
        assert back.dtype == dtype
        assert ((back.double() - x.double()).abs() <= bound + noise).all()


@pytest.mark.parametrize("narrow", EIGHT_BIT.values())
def test_packing_keeps_zeros_and_nonfinite_rows(narrow: torch.dtype) -> None:
    x = torch.tensor([[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0], [1e-44, 0.0], [3.0, -3.0]])
    back = unpack_rows(pack_rows(x, narrow))
    assert back[0].tolist() == [0.0, 0.0] and back[4].tolist() == [3.0, -3.0]
    assert back[1:3].isnan().any(-1).all()
    assert back[3].isfinite().all()


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("saved", EIGHT_BIT)
def test_packed_activations_round_only_gradients(plain: dict[str, Any], saved: str, recompute: str) -> None:
    config = replace(TINY, saved_activations=saved, recompute=recompute)
    result = run(config, 1)
    assert result["losses"][0] == plain["losses"][0] and result["grad_norms"] != plain["grad_norms"]
    exact, rounded = gradients(TINY), gradients(config)
    assert (rounded - exact).norm() <= STEP[saved] * exact.norm()
    assert run(config, 2)["losses"] == pytest.approx(result["losses"], rel=1e-10)


def gradients(config: TrainConfig) -> Tensor:
    """Return all gradients of the first step as one vector."""

    def of_rank(ring: Ring) -> Tensor:
        model, _ = loop.make_model(ring, config)
        parts = [BatchPart(ring.sequence(config.tokens), draw_tokens(config))]
        model.zero_grad()
        loop.backward(ring, ring, parts, model, config)
        return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])

    return run_ranks(1, of_rank)[0]


def draw_tokens(config: TrainConfig) -> Tensor:
    """Draw the tokens of one step."""
    return torch.randint(0, 256, (config.batch, config.tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_only_activations_are_packed(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    # The number of tokens equals the width of the model, so a weight has as many rows as an activation.
    config = replace(TINY, batch=1, tokens=48, dtype=dtype, saved_activations="int8",
                     model=ModelConfig(1, 48, 4, 4, 48))  # fmt: skip
    packed: list[Tensor] = []
    pack = SavedActivations._pack

    def record_packed(self: SavedActivations, tensor: Tensor) -> Any:
        result = pack(self, tensor)
        if not isinstance(result, Tensor):
            packed.append(tensor.detach().clone())
        return result

    monkeypatch.setattr(SavedActivations, "_pack", record_packed)
    model = Transformer(config.model, 256, loop.DTYPES[dtype], config.seed)
    gradients(config)
    # Each of three norms saves its input twice and the normalized rows. In addition, the outputs of two norms, and
    # gate, up, silu and the product of the MLP are saved.
    assert len(packed) == 3 * 3 + 2 + 4 and {activation.shape[-1] for activation in packed} == {48}
    for weight in model.parameters():
        for activation in packed:
            values = activation.flatten().float().sort().values
            assert all(not torch.equal(values, cast.flatten().float().sort().values)
                       for cast in (weight.detach(), weight.detach().to(activation.dtype)))  # fmt: skip


def test_weights_and_tensors_of_other_shapes_are_not_packed() -> None:
    weight = nn.Parameter(torch.randn(5, 8))
    for weights, rows, shared in (([weight], 5, True), ([], 6, True), ([], 5, False)):
        with SavedActivations("int8", weights, rows, row_elements=8).packing():
            y = torch.ones(5, 8, requires_grad=True) * weight
        saved = y.grad_fn._saved_other  # type: ignore[union-attr]
        assert torch.equal(saved, weight) is shared


def test_offload_moves_all_activations_and_keeps_gradients_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    original = save_on_cpu

    def count_moved(**options: Any) -> Any:
        hooks = original(**options)
        pack = hooks.pack_hook
        hooks.pack_hook = lambda tensor: (moved.append(tensor.numel()), pack(tensor))[1]
        return hooks

    monkeypatch.setattr(model_module, "save_on_cpu", count_moved)
    assert torch.equal(gradients(replace(TINY, saved_activations="offload")), gradients(TINY))
    rows, (blocks, dim, hidden) = TINY.batch * TINY.tokens, (TINY.model.layers, 32, 48)
    # The activations are those that `test_only_activations_are_packed` counts for one block.
    assert sum(moved) == rows * (blocks * (8 * dim + 4 * hidden) + 3 * dim)


def test_offloaded_recomputation_moves_the_input_of_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    to_host = tiled.to_host
    monkeypatch.setattr(tiled, "to_host", lambda x: (moved.append(x.numel()), to_host(x))[1])
    change = {"recompute": "offloaded", "tiled_mlp_tokens": 7, "chunked_loss_tokens": 7}
    torch.testing.assert_close(gradients(replace(TINY, **change)), gradients(TINY), rtol=1e-12, atol=1e-15)
    assert moved == [TINY.batch * TINY.tokens * TINY.model.dim] * TINY.model.layers


# --- optimizers ------------------------------------------------------------------------------------------------------


def test_optimizers_have_the_expected_bytes_of_state() -> None:
    matrix, vector, count = nn.Parameter(torch.ones(24, 16)), nn.Parameter(torch.ones(16)), 24 * 16 + 16
    # AdamW and Adafactor count steps, 4 bytes per parameter. Adafactor keeps a value per row and per column of a
    # matrix, and one per element of a vector.
    expected = {"adamw": 8 * count + 8, "sgd": 0, "adafactor": 4 * (24 + 16 + 16) + 8}
    for name, nbytes in expected.items():
        optimizer = model_module.make_optimizer(name, [matrix, vector], lr=0.1, weight_decay=0.0)
        before = matrix.detach().clone()
        matrix.grad, vector.grad = torch.ones_like(matrix), torch.ones_like(vector)
        optimizer.step()
        assert (matrix < before).all(), name
        assert model_module.state_bytes(optimizer) == nbytes, name


@pytest.mark.parametrize(
    ("name", "device", "fused"),
    [
        ("adamw", "cpu", None), ("sgd", "cpu", None), ("adafactor", "cpu", None), ("adamw", "cuda", True),
        ("sgd", "cuda", None), ("adafactor", "cuda", None),
    ],
)  # fmt: skip
def test_no_optimizer_updates_all_weights_at_once(name: str, device: str, fused: bool | None) -> None:
    """On a GPU, torch would take temporary tensors of the size of all weights. The tensors here are fake."""
    with FakeTensorMode():
        weights = [nn.Parameter(torch.empty(8, 8, device=device)) for _ in range(3)]
        (group,) = model_module.make_optimizer(name, weights, lr=0.1, weight_decay=0.1).param_groups
    assert (group.get("fused"), group["foreach"]) == (fused, None if fused else False)


def test_the_fused_update_takes_no_temporary_tensors() -> None:
    """The update with a GPU's AdamW allocates nothing, and that with SGD the decayed gradient of one weight."""
    for name, temporary in (("adamw", 0), ("sgd", 1)):
        with FakeTensorMode():
            weights = [nn.Parameter(torch.empty(8, 8, device="cuda")) for _ in range(3)]
            optimizer = model_module.make_optimizer(name, weights, lr=0.1, weight_decay=0.1)
            for weight in weights:
                weight.grad = torch.empty_like(weight)
            optimizer.step()  # creates the state
            with StorageMeter() as storages:
                optimizer.step()
        assert storages.peak_bytes == temporary * 8 * 8 * 4


@pytest.mark.parametrize(("name", "packages"), [("adamw8bit", "torchao or bitsandbytes"), ("lion", "lion-pytorch")])
def test_a_missing_optimizer_is_refused_with_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, packages: str
) -> None:
    monkeypatch.setattr(train_config, "find_spec", lambda package: None)
    with pytest.raises(InputError, match=f"^optimizer={name}: its package is not installed; pip install {packages}$"):
        check_switches(replace(TINY, optimizer=name, dtype="fp32"), "cpu")
    assert train.main([f"optimizer={name}", "transport=gloo"]) == 2
    assert capsys.readouterr().err.startswith(f"ringattn train: optimizer={name}: its package is not installed")


def test_optimizers_come_from_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers come from the installed package, with the documented class name and the right options.

    Fake packages record the options that their classes receive.
    """
    calls: list[tuple[str, dict[str, Any]]] = []

    def fake_package(module: str) -> Any:
        def fake_optimizer(name: str) -> Any:
            return lambda weights, **options: calls.append((f"{module}:{name}", options))

        return SimpleNamespace(AdamW8bit=fake_optimizer("AdamW8bit"), Lion=fake_optimizer("Lion"))

    monkeypatch.setattr(model_module, "import_module", fake_package)
    for installed, name in (("torchao", "adamw8bit"), ("bitsandbytes", "adamw8bit"), ("lion_pytorch", "lion")):
        monkeypatch.setattr(train_config, "find_spec", lambda package, only=installed: only == package or None)
        model_module.make_optimizer(name, [], lr=0.1, weight_decay=0.2)
    options = {"lr": 0.1, "weight_decay": 0.2}
    assert calls == [
        ("torchao.optim:AdamW8bit", {**options, "betas": (0.9, 0.95)}),
        ("bitsandbytes.optim:AdamW8bit", {**options, "betas": (0.9, 0.95)}),
        ("lion_pytorch:Lion", options),
    ]
    monkeypatch.setattr(train_config, "find_spec", lambda package: package == "torchao")
    with pytest.raises(InputError, match=r"^optimizer=adamw8bit: .* dtype=fp64"):
        check_switches(replace(TINY, optimizer="adamw8bit"), "cpu")


def test_the_learning_rate_of_every_step_is_set() -> None:
    config = replace(TINY, learning_rate=0.5, warmup_steps=4)
    tensor = torch.tensor(0.1)  # torchao keeps the learning rate in a tensor
    for lr in (0.1, tensor):
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=lr)
        for step, rate in ((0, 0.125), (2, 0.375), (9, 0.5)):
            loop.set_learning_rate(optimizer, config, step)
            assert float(optimizer.param_groups[0]["lr"]) == rate
    assert float(tensor) == 0.5


# --- refused switches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"saved_activations": "offload"}, "saved_activations=offload: .* on a CPU"),
        ({"recompute": "offloaded"}, "recompute=offloaded: .* on a CPU"),
        ({"sharding": "zero2", "optimizer": "adafactor"}, "optimizer=adafactor: .* sharding=zero2"),
    ],
)
def test_incompatible_switches_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        run(replace(TINY, **change), 2)


def test_the_command_refuses_switches_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "_run", lambda config: pytest.fail("ranks were started"))
    assert train.main(["saved_activations=offload", "transport=gloo"]) == 2
    assert capsys.readouterr().err.startswith("ringattn train: saved_activations=offload: ")
    assert train.main(["recompute=some"]) == 2
    assert capsys.readouterr().err.startswith(
        "ringattn train: recompute=some: choose one of none, selective, full, offloaded"
    )
