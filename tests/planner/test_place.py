"""Plans: every buffer placed, what is live counted independently, messages that meet, memory as known by hand."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import replace

import pytest

from ringattn.planner.choose import plan_of
from ringattn.planner.place import project
from ringattn.planner.plan import ALIGNMENT_BYTES, LOCAL, AttendOp, Plan, Recv, Send
from ringattn.schedule.ops import Kind
from ringattn.schedule.routes import ROUTES, schedule_of
from tests.planner.placement_verifier import verify_placement
from tests.planner.visit_check import check_visits
from tests.schedules import RING, schedule_params
from tests.strategies import Case, covering, cross, simple, wire_order

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
OWN_DTYPE = [pytest.param(*one.values, None, marks=one.marks) for one in schedule_params(quick=["double_ring"])]
EIGHT_BIT = [("ring", "int8"), ("direct", "float8_e4m3fn"), ("ulysses", "int8")]
each_route = pytest.mark.parametrize(
    ("route", "wire"),
    [*OWN_DTYPE, EIGHT_BIT[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in EIGHT_BIT[1:])],
)


Passes = list[list[Plan]]
"""Forward and backward: the plans of all ranks."""


def plans_of(case: Case, route: str, wire: str | None = None) -> Passes:
    """The plans of all ranks, forward and backward."""
    problem, way = replace(case.problem, kv_wire_dtype=wire), ROUTES[route]
    return [[plan_of(problem, way, rank, back) for rank in range(case.ranks)] for back in (False, True)]


def record(plan: Plan, dtype: str, kind: Kind = Kind.KV) -> int:
    """Bytes of one row of one head in a buffer of `dtype`."""
    q, v, batch = plan.problem.head_dim, plan.problem.value_dim, plan.problem.batch
    if dtype not in ITEM_BYTES:
        return batch * (math.ceil((q + v) / 4) * 4 + 2 * 4)  # a byte each, and two float32 scales
    values = {Kind.KV: q + v, Kind.DKV: q + v, Kind.Q: q, Kind.DQ: q}.get(kind, v) * ITEM_BYTES[dtype]
    scalars = {Kind.OUT: 1, Kind.GRAD_OUT: 2}.get(kind, 0)  # lse; lse and delta
    return batch * (math.ceil(values / 4) * 4 + 4 * scalars)


def record_of(plan: Plan, buffer: int) -> int:
    """Bytes of one row of one head in a buffer."""
    return record(plan, plan.buffers[buffer].dtype, plan.buffers[buffer].kind)


@each_route
@covering
def test_plans(route: str, wire: str | None, case: Case) -> None:
    """All that holds of any plan, of plans that are made once for all of it."""
    passes = plans_of(case, route, wire)
    check_they_are_projections_and_verified(passes, case, route)
    check_messages_of_two_plans_meet(passes)
    check_packs_only_what_does_not_lie_in_one_piece(passes)
    check_bytes_and_messages_are_the_schedules(passes, case, route, wire)
    check_folds_read_the_rows_they_mean(passes, case)
    for plan in passes[True]:
        check_visits(plan)


def check_they_are_projections_and_verified(passes: Passes, case: Case, route: str) -> None:
    for backward, plans in enumerate(passes):
        schedule = schedule_of(plans[0].problem, ROUTES[route], bool(backward))
        for rank, plan in enumerate(plans):
            of_all = project(schedule, rank)
            assert gist(plan) == gist(of_all)
            if all(branch.dilation == 1 for branch in case.problem.mask.branches):
                assert plan == of_all
            verify_placement(plan)


def gist(plan: Plan) -> list:
    """The messages of each step, in whatever order their rows lie: dilated rows may lie in several."""
    return [
        (step.number, [(send.peer, send.label, sorted(message(plan, send))) for send in step.sends],
         [(recv.peer, recv.label, sorted(message(plan, recv))) for recv in step.recvs])
        for step in plan.steps
    ]  # fmt: skip


def check_messages_of_two_plans_meet(passes: Passes) -> None:
    for plans in passes:
        sent: dict[tuple[int, int], list] = defaultdict(list)
        received: dict[tuple[int, int], list] = defaultdict(list)
        for plan in plans:
            for step in plan.steps:
                for send in step.sends:
                    dtype = plan.buffers[send.buffer].dtype
                    sent[plan.rank, send.peer].append((step.number, message(plan, send), dtype))
                for recv in step.recvs:
                    dtype = plan.buffers[recv.buffer].dtype
                    received[recv.peer, plan.rank].append((step.number, message(plan, recv), dtype))
        assert sent == received


def message(plan: Plan, one: Send | Recv) -> list[tuple[int, int]]:
    """The (head, row) records of a message, in order."""
    nbytes = (elements * plan.element_bytes(one.buffer) for elements in (one.first, one.elements))
    first, count = (divmod(each, record_of(plan, one.buffer)) for each in nbytes)
    assert first[1] == count[1] == 0
    return wire_order(plan.buffers[one.buffer].content)[first[0] : first[0] + count[0]]


def check_packs_only_what_does_not_lie_in_one_piece(passes: Passes) -> None:
    for plan in (plan for plans in passes for plan in plans):
        for step in plan.steps:
            for pack in step.packs:
                into = plan.buffers[pack.into]
                if pack.source == LOCAL:
                    continue
                source, wanted = plan.buffers[pack.source], wire_order(into.content)
                spots = wire_order(source.content)
                at = [spots.index(spot) for spot in wanted]
                assert source.dtype != into.dtype or at != list(range(at[0], at[0] + len(at)))
        packed = [pack.into for step in plan.steps for pack in step.packs if pack.source == LOCAL]
        own = re.compile(rf"(KV|Q|SEED){plan.rank}(/\d+)? (packed|coded|in .*)")
        shared = [into for into in packed if own.fullmatch(plan.buffers[into].label)]
        assert len(packed) == len(set(packed)) and len(shared) >= bool(packed)


def check_bytes_and_messages_are_the_schedules(passes: Passes, case: Case, route: str, wire: str | None) -> None:
    problem = case.problem
    for backward, plans in enumerate(passes):
        copies = [copy for step in schedule_of(problem, ROUTES[route], bool(backward)).steps for copy in step.copies]
        for plan in plans:
            mine = [copy for copy in copies if copy.src == plan.rank]
            nbytes = 0
            for copy in mine:
                kind, wide = copy.block.kind, problem.wire_dtype or problem.accumulator_dtype
                sums = {Kind.DKV: wide, Kind.DQ: problem.accumulator_dtype, Kind.OUT: problem.accumulator_dtype}
                dtype = sums.get(kind, (kind is Kind.KV and wire) or problem.dtype)
                nbytes += len(wire_order(copy.content)) * record(plan, dtype, kind)
            assert (plan.messages, plan.bytes_sent) == (len(mine), nbytes)


def check_folds_read_the_rows_they_mean(passes: Passes, case: Case) -> None:
    for plan in (plan for plans in passes for plan in plans):
        for fold in (item for step in plan.steps for item in step.work if isinstance(item, AttendOp)):
            sides = ((fold.kv, fold.kv_row, fold.kv_step), (fold.dkv, fold.dkv_row, fold.dkv_step))
            for buffer, base, step in sides[: 1 + plan.backward]:
                rows = held_rows(case, plan, buffer, fold)
                for tile in fold.tiles:
                    held = [rows[base + row * step] for row in tile.k.rows.members()]
                    assert [position for _, position in held] == list(tile.k.positions.members())
                    if fold.owner is None:
                        assert {head for head, _ in held} == {tile.heads.start // case.problem.group}


def held_rows(case: Case, plan: Plan, buffer: int, fold: AttendOp) -> list[tuple[int, int]]:
    """(K/V head, position) of each row that a fold can name in a buffer; heads only where a row has one."""
    if buffer == LOCAL:
        return [(0, int(position)) for position in case.problem.kv_layout.positions(plan.rank)]
    if fold.owner is not None:
        part = next(part for part in plan.buffers[buffer].content if part.heads == fold.heads)
        positions = case.problem.kv_layout.positions(fold.owner)
        return [(0, int(positions[row])) for run in part.rows for row in run.members()]
    inner = [one for one in plan.buffers if one.inside and one.inside.buffer == buffer]
    found = []
    for one in sorted(inner, key=lambda one: one.inside.row if one.inside else 0):
        owner = re.match(r"D?KV(\d+)", one.label)
        assert owner is not None and one.inside is not None and one.inside.row == len(found)
        positions = case.problem.kv_layout.positions(int(owner[1]))
        found += [(head, int(positions[row])) for head, row in wire_order(one.content)]
    return found


# --- memory known by hand --------------------------------------------------------------------------------------------

ROWS = 16
SHARD = ROWS * (64 + 64) * 2  # K and V of one shard in bf16; sums are twice as wide


def shards(ranks: int, backward: bool, route: str = "ring", name: str = "contiguous", wire: str | None = None) -> float:
    """Arena bytes of every rank, in shards of K and V; the same on all ranks."""
    (count,) = {plan.arena_bytes for plan in plans_of(simple(name, ROWS * ranks, ranks), route, wire)[backward]}
    return count / SHARD


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_a_chain_needs_the_same_memory_at_any_length(ranks: int, name: str) -> None:
    assert shards(ranks, False, name=name) == 2
    assert shards(ranks, True, name=name) == 8  # two of K/V, three of twice as wide sums


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_short_chains_need_no_more(ranks: int) -> None:
    assert shards(ranks, False) <= 2 and shards(ranks, True) <= 8
    assert ranks > 1 or shards(ranks, True) == shards(ranks, False) == 0


@pytest.mark.parametrize("ranks", [4, 8])
def test_all_gather_holds_every_shard(ranks: int) -> None:
    assert shards(ranks, False, "all_gather") == ranks
    assert shards(ranks, False, "direct") == 3  # the own block stays, one is read, one arrives


@pytest.mark.parametrize("ranks", [4, 8])
def test_eight_bits_need_room_to_restore_what_a_step_attends(ranks: int) -> None:
    slot = math.ceil(ROWS * (64 + 64 + 8) / ALIGNMENT_BYTES) * ALIGNMENT_BYTES / SHARD
    for wire in ("int8", "float8_e4m3fn"):
        assert shards(ranks, False, wire=wire) == 2 * slot + 1
        assert shards(ranks, True, wire=wire) == 2 * slot + 1 + 3 * 2
        assert shards(ranks, False, "all_gather", wire=wire) == ranks * slot + ranks - 1  # attended in one step


def test_a_narrow_wire_is_packed_beside_the_sum() -> None:
    case = simple("contiguous", 64, 4)
    wide, narrow = (plan_of(replace(case.problem, wire_dtype=wire), RING, 1, True) for wire in (None, "bfloat16"))
    assert narrow.bytes_sent == wide.bytes_sent * 2 // 3  # K/V once, sums at one instead of two
    assert any(pack.source != LOCAL for step in narrow.steps for pack in step.packs)
    assert all(pack.source == LOCAL for step in wide.steps for pack in step.packs)


# --- idle ranks ------------------------------------------------------------------------------------------------------

IDLE_CASES = [
    cross(("contiguous", "contiguous"), (0, 6), (0, 24), 4),  # all keys that are read are rank 0's
    cross(("contiguous", "contiguous"), (0, 6), (0, 0), 4),  # there are no keys
    cross(("contiguous", "contiguous"), (0, 0), (0, 6), 4),  # there are no queries
    cross(("contiguous", "contiguous"), (0, 4, 8), (0, 0, 9), 4),  # the first document has no keys
    simple("contiguous", 2, 4),  # two ranks have a token
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", IDLE_CASES, ids=lambda case: f"{case.problem.q_layout.length} queries")
def test_every_rank_has_the_direction_of_the_pass(case: Case, route: str) -> None:
    for backward, plans in zip((False, True), plans_of(case, route), strict=True):
        assert [plan.backward for plan in plans] == [backward] * case.ranks
