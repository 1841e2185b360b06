"""Parts of the NCCL transport that need neither a GPU nor a library: rendezvous, call comparison, warnings, waits."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import HashStore

from ringattn.errors import DeadlineError, DisagreementError, InputError
from ringattn.transport.control_store import ControlStore
from ringattn.transport.deadline import LONGEST_NAP_S, Deadline, wait_until
from ringattn.transport.location import Location
from ringattn.transport.nccl.binding import Capability, CommConfig
from ringattn.transport.nccl.bootstrap import Arrival, all_ready, check_fit, share_unique_id
from ringattn.transport.nccl.options import (
    NcclOptions,
    check_environment,
    config_of,
    overlap_warnings,
    warnings_beside_torch,
)
from ringattn.transport.nccl.supervisor import KEPT, CallHistory
from tests.transport.nccl_rings import on_gpus, results
from tests.transport.simulated.library import SimLibrary
from tests.transport.simulated.world import SimWorld


def arrival(rank: int, **changes: Any) -> Arrival:
    arrival = Arrival(rank, "node", f"GPU-{rank}", 22809, "0.1.0", True, NcclOptions())
    return replace(arrival, **changes)


LOCATIONS = [Location("node", "node", 100 + rank, 0) for rank in range(3)]


# --- rendezvous ------------------------------------------------------------------------------------------------------


def test_a_rank_that_creates_no_id_or_is_not_ready_is_named() -> None:
    store = HashStore()
    with pytest.raises(DeadlineError, match=r"rank 1: rank 0 created no unique id within 0\.1 s"):
        share_unique_id(ControlStore(store, 1, 2), bytes, Deadline(0.1), lambda: None)
    with pytest.raises(DeadlineError, match=r"rank 1: not all communicators became ready: .* ranks \[0\]"):
        all_ready(ControlStore(store, 1, 2), Deadline(0.1), lambda: None)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"nccl_version": 22907}, DisagreementError, r"NCCL version: 2\.28\.9 on ranks .*2\.29\.7 on ranks \[1\]"),
        ({"ringattn_version": "0.2.0"}, DisagreementError, r"ringattn version: .*0\.2\.0 on ranks \[1\]"),
        ({"registers": False}, DisagreementError, r"registered buffers: .*False on ranks \[1\]"),
        ({"options": NcclOptions(binding="cupy")}, DisagreementError, r"binding: .*cupy on ranks \[1\]"),
        ({"options": NcclOptions(sm_margin=4)}, DisagreementError, r"sm_margin: None on ranks \[0, 2\]; 4 on ranks"),
        ({"options": NcclOptions(cga_cluster_size=2)}, DisagreementError, r"cga_cluster_size: .*2 on ranks \[1\]"),
        ({"options": NcclOptions(channels_per_net_peer=3)}, DisagreementError, r"channels_per_net_peer: .*3 on ranks"),
        ({"options": NcclOptions(name="x")}, DisagreementError, r"name: .*x on ranks \[1\]"),
        ({"options": NcclOptions(blocking=True)}, DisagreementError, r"blocking: .*True on ranks \[1\]"),
        ({"gpu_uuid": "GPU-2"}, InputError, r"rank 1 \(process 101\), rank 2 \(process 102\) use the same GPU GPU-2"),
    ],
)  # fmt: skip
def test_ranks_that_do_not_fit_are_refused(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    check_fit([arrival(rank) for rank in range(3)], LOCATIONS)
    with pytest.raises(kind, match=message):
        check_fit([arrival(0), arrival(1, **changes), arrival(2)], LOCATIONS)


def test_ranks_with_different_nccl_ids_may_share_a_gpu() -> None:
    check_fit([arrival(rank, gpu_uuid="GPU-0", nccl_id=f"ring-{rank}") for rank in range(3)], LOCATIONS)


# --- comparing calls -------------------------------------------------------------------------------------------------


def history(*digests: bytes, first: int = 1) -> CallHistory:
    calls_made = CallHistory()
    for number, digest in enumerate(digests, first):
        calls_made.announce(number, digest, f"words of {digest!r}")
    return calls_made


def test_the_first_call_that_differs_is_found() -> None:
    local, remote = history(b"a", b"b", b"c"), history(b"a", b"x", b"c")
    difference = local.differs(remote.report())
    assert difference is not None and difference.startswith("call 2 differs")
    assert "that rank is now at 'words of b'c'', this rank at 'words of b'c''" in difference
    assert local.differs(history(b"a", b"b").report()) is None and local.differs(CallHistory().report()) is None


def test_a_difference_between_two_reported_calls_is_bounded_by_them() -> None:
    calls = [bytes([n]) for n in range(100)]
    difference = history(*calls).differs(history(*calls[:80], b"x", *calls[81:]).report())  # call 81 of 100
    assert difference is not None and difference.startswith("one of calls 37 to 84 differs")


def test_a_difference_shows_in_every_later_call() -> None:
    # A heartbeat reports only a few calls, which may not include the ones that differ. So their hashes cover earlier
    # calls.
    local = history(b"a", *[b"same"] * 1000)
    remote = history(b"x", *[b"same"] * 1000)
    assert local.differs(remote.report()) is not None


@pytest.mark.parametrize("ahead", [1, 7, 64, 1280, 4000])
def test_ranks_that_are_far_apart_are_compared(ahead: int) -> None:
    calls = [bytes([n % 250]) for n in range(5000)]
    local, remote = history(*calls[:640]), history(*calls[: 640 + ahead])
    assert local.differs(remote.report()) is None and remote.differs(local.report()) is None
    another = history(b"other", *calls[1 : 640 + ahead])
    assert local.differs(another.report()) is not None and another.differs(local.report()) is not None


def test_the_report_is_small_and_the_history_is_bounded() -> None:
    long = CallHistory()
    for n in range(1, 3 * KEPT):
        long.announce(n, bytes([n % 250]), "attention " * 100)
    assert len(json.dumps(long.report())) < 512 and long.report()["call"] == 3 * KEPT - 1
    assert len(long._chains) == KEPT


# --- advice ----------------------------------------------------------------------------------------------------------


def test_advice() -> None:
    (order,) = warnings_beside_torch({}, 22809)
    assert "NCCL_LAUNCH_ORDER_IMPLICIT=1" in order
    assert warnings_beside_torch({"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, 22809) == []
    (old,) = warnings_beside_torch({"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, 22503)
    assert "NCCL 2.25.3 keeps no order" in old
    both = warnings_beside_torch({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, 22809)
    assert len(both) == 2 and "CUDA_DEVICE_MAX_CONNECTIONS=1" in both[1]
    for name, value in (("NCCL_COMM_ID", "127.0.0.1:2000"), ("NCCL_COMM_BLOCKING", "1")):
        with pytest.raises(InputError, match=f"{name} is set"):
            check_environment({name: value})


def test_bad_options_are_refused() -> None:
    for bad, part in (
        ({"binding": "nccl4py"}, "ctypes, cupy"),
        ({"sm_margin": -1}, "sm_margin must lie between 0 and 64, got -1"),
        ({"sm_margin": 65}, "between 0 and 64"),
        ({"cga_cluster_size": 9}, "cga_cluster_size must lie between 0 and 8"),
        ({"channels_per_net_peer": 0}, "channels_per_net_peer must lie between 1 and 64"),
    ):
        with pytest.raises(InputError, match=part):
            NcclOptions(**bad)


# --- overlap ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "config"),
    [
        (NcclOptions(), CommConfig(False, 8, "ringattn", 1, None)),
        (NcclOptions(sm_margin=4, cga_cluster_size=0, channels_per_net_peer=2), CommConfig(False, 4, "ringattn", 0, 2)),
        (NcclOptions(sm_margin=0), CommConfig(False, None, "ringattn", 1, None)),
    ],
)
def test_the_margin_is_the_limit_of_thread_blocks_too(options: NcclOptions, config: CommConfig) -> None:
    """The margin of multiprocessors is also the limit of NCCL's thread blocks, which are not in clusters.

    By default NCCL uses clusters of four on Hopper, which do not fit a margin of a few multiprocessors.
    """
    assert config_of(options, frozenset(Capability)) == config
    assert options.margin == (config.max_ctas or 0)


def test_only_explicit_options_are_passed_to_a_library_that_lacks_them() -> None:
    """Defaults that the library lacks are omitted. Explicit options are passed on, and the binding refuses them."""
    assert config_of(NcclOptions(blocking=True), frozenset()) == CommConfig(True)
    assert NcclOptions(blocking=True).margin == 8
    full = config_of(NcclOptions(blocking=True, sm_margin=8, cga_cluster_size=1, channels_per_net_peer=2), frozenset())
    assert full.needs() == (Capability.MAX_CTAS, Capability.CGA, Capability.NET_CHANNELS)
    assert config_of(NcclOptions(blocking=True, sm_margin=0), frozenset()).needs() == ()


def test_an_environment_that_overrides_the_margin_is_warned_of() -> None:
    every = frozenset(Capability)
    fine = {"NCCL_MAX_CTAS": "8", "NCCL_MIN_CTAS": "2", "NCCL_CGA_CLUSTER_SIZE": "1"}
    assert overlap_warnings({}, NcclOptions(), every) == overlap_warnings(fine, NcclOptions(), every) == []
    for variable, value in (("NCCL_MAX_CTAS", "16"), ("NCCL_MIN_CTAS", "9"), ("NCCL_CGA_CLUSTER_SIZE", "4")):
        (warning,) = overlap_warnings({**fine, variable: value}, NcclOptions(), every)
        assert warning.startswith(f"{variable}={value} overrides") and "sm_margin=8" in warning
        assert overlap_warnings({**fine, variable: value}, NcclOptions(sm_margin=0), every) == []
    assert overlap_warnings({"NCCL_CGA_CLUSTER_SIZE": "4"}, NcclOptions(cga_cluster_size=4), every) == []
    cupy = NcclOptions(binding="cupy", blocking=True)
    blocks, clusters = overlap_warnings({}, cupy, frozenset())
    assert "set NCCL_MAX_CTAS=8" in blocks and "set NCCL_CGA_CLUSTER_SIZE=1" in clusters
    assert overlap_warnings(fine, cupy, frozenset()) == []


@pytest.mark.parametrize(("options", "margin"), [(NcclOptions(), 8), (NcclOptions(sm_margin=0), 0)])
def test_engines_and_communicators_use_the_same_margin(
    options: NcclOptions, margin: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[CommConfig] = []
    init = SimLibrary.init

    def record_and_init(library: SimLibrary, world_size: int, unique_id: bytes, rank: int, config: CommConfig) -> int:
        configs.append(config)
        return init(library, world_size, unique_id, rank, config)

    monkeypatch.setattr(SimLibrary, "init", record_and_init)
    assert results(on_gpus(SimWorld(2), lambda ring: ring.sm_margin, options=options)) == [margin] * 2
    assert [(config.max_ctas or 0, config.cga_cluster_size) for config in configs] == [(margin, 1)] * 2
    assert results(on_gpus(SimWorld(1), lambda ring: ring.sm_margin, options=options)) == [0]


# --- waiting ---------------------------------------------------------------------------------------------------------


def test_wait_until() -> None:
    assert wait_until(lambda: True, Deadline(0.0))
    start = time.monotonic()
    assert not wait_until(lambda: False, Deadline(0.2))
    assert 0.2 <= time.monotonic() - start < 0.2 + 10 * LONGEST_NAP_S
    with pytest.raises(ValueError, match="the ring has failed"):
        wait_until(lambda: False, Deadline(5.0), lambda: (_ for _ in ()).throw(ValueError("the ring has failed")))
    # A rank fails after the condition has become true, because it has already seen the condition. The wait succeeds.
    answers = iter([False, True])
    assert wait_until(lambda: next(answers), Deadline(5.0), lambda: (_ for _ in ()).throw(ValueError("failed since")))
