"""Plans place every buffer, the messages of sender and receiver match, and memory is as computed by hand."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import replace

import pytest

from ringattn.planner.choose import plan_of
from ringattn.planner.place import project
from ringattn.planner.plan import ALIGNMENT_BYTES, LOCAL, ONE, AttendOp, Plan, Recv, Send
from ringattn.schedule.ops import Kind
from ringattn.schedule.routes import ROUTES, schedule_of
from tests.planner.placement_verifier import verify_placement
from tests.planner.visit_check import check_overwrites
from tests.schedules import RING, schedule_params
from tests.strategies import Case, covering, cross, simple, wire_order

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
INPUT_DTYPE = [pytest.param(*param.values, None, marks=param.marks) for param in schedule_params(quick=["double_ring"])]
EIGHT_BIT = [("ring", "int8"), ("direct", "float8_e4m3fn"), ("ulysses", "int8")]
each_route = pytest.mark.parametrize(
    ("route", "wire"),
    [*INPUT_DTYPE, EIGHT_BIT[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in EIGHT_BIT[1:])],
)


Passes = list[list[Plan]]
"""Two lists with the plans of all ranks: of the forward pass, and of the backward pass."""


def plans_of(case: Case, route: str, wire: str | None = None) -> Passes:
    """Return the plans of all ranks, forward and backward."""
    problem, way = replace(case.problem, kv_wire_dtype=wire), ROUTES[route]
    return [[plan_of(problem, way, rank, back) for rank in range(case.ranks)] for back in (False, True)]


def record(plan: Plan, dtype: str, kind: Kind = Kind.KV) -> int:
    """Return the bytes of one record (a row of one head, all batches) in a buffer of this dtype and kind."""
    q, v, batch = plan.problem.head_dim, plan.problem.value_dim, plan.problem.batch
    if dtype not in ITEM_BYTES:
        return batch * (math.ceil((q + v) / 4) * 4 + 2 * 4)  # a byte per element, and two float32 scales
    values = {Kind.KV: q + v, Kind.DKV: q + v, Kind.Q: q, Kind.DQ: q}.get(kind, v) * ITEM_BYTES[dtype]
    scalars = {Kind.OUT: 1, Kind.GRAD_OUT: 2}.get(kind, 0)  # OUT: lse; GRAD_OUT: lse and delta
    return batch * (math.ceil(values / 4) * 4 + 4 * scalars)


def record_of(plan: Plan, buffer: int) -> int:
    """Return the bytes of one record (a row of one head, all batches) in a buffer of the plan."""
    return record(plan, plan.buffers[buffer].dtype, plan.buffers[buffer].kind)


@each_route
@covering
def test_plans(route: str, wire: str | None, case: Case) -> None:
    """The plans of a case have all properties that the functions below check. They are made once for all checks."""
    passes = plans_of(case, route, wire)
    check_they_are_projections_and_verified(passes, case, route)
    check_messages_of_two_plans_match(passes)
    check_only_scattered_rows_are_packed(passes)
    check_bytes_and_messages_are_the_schedules(passes, case, route, wire)
    check_updates_read_the_right_rows(passes, case)
    for plan in passes[True]:
        check_overwrites(plan)


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
    """Return the messages of each step, for comparisons. Rows are sorted, because dilated rows have no fixed order."""
    return [
        (step.number, [(send.peer, send.label, sorted(message(plan, send))) for send in step.sends],
         [(recv.peer, recv.label, sorted(message(plan, recv))) for recv in step.recvs])
        for step in plan.steps
    ]  # fmt: skip


def check_messages_of_two_plans_match(passes: Passes) -> None:
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


def message(plan: Plan, end: Send | Recv) -> list[tuple[int, int]]:
    """Return the (head, row) pairs of a message's records, in order."""
    nbytes = (elements * plan.element_bytes(end.buffer) for elements in (end.first, end.elements))
    first, count = (divmod(number, record_of(plan, end.buffer)) for number in nbytes)
    assert first[1] == count[1] == 0
    return wire_order(plan.buffers[end.buffer].content)[first[0] : first[0] + count[0]]


def check_only_scattered_rows_are_packed(passes: Passes) -> None:
    for plan in (plan for plans in passes for plan in plans):
        for step in plan.steps:
            for pack in step.packs:
                into = plan.buffers[pack.into]
                if pack.source == LOCAL:
                    continue
                source, packed_rows = plan.buffers[pack.source], wire_order(into.content)
                source_rows = wire_order(source.content)
                order = [source_rows.index(row) for row in packed_rows]
                assert source.dtype != into.dtype or order != list(range(order[0], order[0] + len(order)))
        packed = [pack.into for step in plan.steps for pack in step.packs if pack.source == LOCAL]
        local = re.compile(rf"(KV|Q|SEED){plan.rank}(/\d+)? (packed|coded|in .*)")
        shared = [into for into in packed if local.fullmatch(plan.buffers[into].label)]
        assert len(packed) == len(set(packed)) and len(shared) >= bool(packed)


def check_bytes_and_messages_are_the_schedules(passes: Passes, case: Case, route: str, wire: str | None) -> None:
    problem = case.problem
    for backward, plans in enumerate(passes):
        copies = [copy for step in schedule_of(problem, ROUTES[route], bool(backward)).steps for copy in step.copies]
        for plan in plans:
            sent_copies = [copy for copy in copies if copy.src == plan.rank]
            nbytes = 0
            for copy in sent_copies:
                kind, wide = copy.block.kind, problem.wire_dtype or problem.accumulator_dtype
                sums = {Kind.DKV: wide, Kind.DQ: problem.accumulator_dtype, Kind.OUT: problem.accumulator_dtype}
                dtype = sums.get(kind, (kind is Kind.KV and wire) or problem.dtype)
                nbytes += len(wire_order(copy.content)) * record(plan, dtype, kind)
            assert (plan.messages, plan.bytes_sent) == (len(sent_copies), nbytes)


def check_updates_read_the_right_rows(passes: Passes, case: Case) -> None:
    for plan in (plan for plans in passes for plan in plans):
        for update in (item for step in plan.steps for item in step.work if isinstance(item, AttendOp)):
            sides = ((update.kv, update.kv_row, update.kv_step), (update.dkv, update.dkv_row, update.dkv_step))
            for buffer, base, step in sides[: 1 + plan.backward]:
                rows = buffer_rows(case, plan, buffer, update)
                for tile in update.tiles:
                    read = [rows[base + row * step] for row in tile.k.rows.members()]
                    assert [position for _, position in read] == list(tile.k.positions.members())
                    if update.owner is None and update.heads == ONE:
                        assert {head for head, _ in read} == {tile.heads.start // case.problem.group}


def buffer_rows(case: Case, plan: Plan, buffer: int, update: AttendOp) -> list[tuple[int, int]]:
    """Return (K/V head, position) for each row of a K/V buffer that an attention update can address.

    The head is 0 if a row contains all heads.
    """
    if buffer == LOCAL:
        return [(0, int(position)) for position in case.problem.kv_layout.positions(plan.rank)]
    if update.owner is not None:
        part = next(part for part in plan.buffers[buffer].content if part.heads == update.heads)
        positions = case.problem.kv_layout.positions(update.owner)
        return [(0, int(positions[row])) for run in part.rows for row in run.members()]
    inner = [part for part in plan.buffers if part.inside and part.inside.buffer == buffer]
    rows = []
    for part in sorted(inner, key=lambda part: part.inside.row if part.inside else 0):
        owner = re.match(r"D?KV(\d+)", part.label)
        assert owner is not None and part.inside is not None
        assert part.inside.row == len(rows) * update.heads.count
        positions = case.problem.kv_layout.positions(int(owner[1]))
        if update.heads == ONE:
            rows += [(head, int(positions[row])) for head, row in wire_order(part.content)]
        else:
            rows += [(0, int(positions[row])) for (_, runs) in part.content for run in runs for row in run.members()]
    return rows


# --- memory computed by hand -----------------------------------------------------------------------------------------

ROWS = 16
SHARD = ROWS * (64 + 64) * 2  # K and V of one shard in bf16; dK and dV in float32 take twice as much


def shards(ranks: int, backward: bool, route: str = "ring", name: str = "contiguous", wire: str | None = None) -> float:
    """Return the arena bytes of a rank, in units of a shard of K and V. They must be the same on all ranks."""
    (count,) = {plan.arena_bytes for plan in plans_of(simple(name, ROWS * ranks, ranks), route, wire)[backward]}
    return count / SHARD


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_a_chain_needs_the_same_memory_at_any_length(ranks: int, name: str) -> None:
    assert shards(ranks, False, name=name) == 2
    assert shards(ranks, True, name=name) == 8  # two of K/V, and three of dK/dV, which count twice


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_short_chains_need_no_more(ranks: int) -> None:
    assert shards(ranks, False) <= 2 and shards(ranks, True) <= 8
    assert ranks > 1 or shards(ranks, True) == shards(ranks, False) == 0


@pytest.mark.parametrize("ranks", [4, 8])
def test_all_gather_holds_every_shard(ranks: int) -> None:
    assert shards(ranks, False, "all_gather") == ranks
    assert shards(ranks, False, "direct") == 3  # the local block stays, one is read, one is received


@pytest.mark.parametrize("ranks", [4, 8])
def test_eight_bits_need_room_to_restore_the_blocks_of_a_step(ranks: int) -> None:
    slot = math.ceil(ROWS * (64 + 64 + 8) / ALIGNMENT_BYTES) * ALIGNMENT_BYTES / SHARD
    for wire in ("int8", "float8_e4m3fn"):
        assert shards(ranks, False, wire=wire) == 2 * slot + 1
        assert shards(ranks, True, wire=wire) == 2 * slot + 1 + 3 * 2
        assert shards(ranks, False, "all_gather", wire=wire) == ranks * slot + ranks - 1  # one step restores all


@pytest.mark.parametrize("heads", [1, 4])
def test_one_engine_call_reads_all_blocks_that_arrive_in_a_step(heads: int) -> None:
    case = simple("zigzag", ROWS * 8, 8, heads=heads, causal=True)
    for backward in (False, True):
        for plan in plans_of(case, "all_gather")[backward]:
            updates = [item for step in plan.steps for item in step.work if isinstance(item, AttendOp)]
            assert [update.owner for update in updates if update.kv != LOCAL] == [None]
            assert [update.owner for update in updates if update.kv == LOCAL] == [plan.rank]


def test_eight_bit_blocks_of_several_heads_are_restored_one_after_another() -> None:
    case = simple("contiguous", ROWS * 4, 4, heads=2)
    plan = plans_of(case, "all_gather", "int8")[False][0]
    owners = [item.owner for step in plan.steps for item in step.work if isinstance(item, AttendOp)]
    assert sorted(owners, key=str) == [0, 1, 2, 3]


def test_a_narrow_wire_needs_a_packed_copy_of_the_sum() -> None:
    case = simple("contiguous", 64, 4)
    wide, narrow = (plan_of(replace(case.problem, wire_dtype=wire), RING, 1, True) for wire in (None, "bfloat16"))
    assert narrow.bytes_sent == wide.bytes_sent * 2 // 3  # K/V: 1 shard; dK/dV: 1 instead of 2
    assert any(pack.source != LOCAL for step in narrow.steps for pack in step.packs)
    assert all(pack.source == LOCAL for step in wide.steps for pack in step.packs)


# --- idle ranks ------------------------------------------------------------------------------------------------------

IDLE_CASES = [
    cross(("contiguous", "contiguous"), (0, 6), (0, 24), 4),  # rank 0 owns all keys that are read
    cross(("contiguous", "contiguous"), (0, 6), (0, 0), 4),  # there are no keys
    cross(("contiguous", "contiguous"), (0, 0), (0, 6), 4),  # there are no queries
    cross(("contiguous", "contiguous"), (0, 4, 8), (0, 0, 9), 4),  # the first document has no keys
    simple("contiguous", 2, 4),  # only two ranks have a token
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", IDLE_CASES, ids=lambda case: f"{case.problem.q_layout.length} queries")
def test_every_rank_has_the_direction_of_the_pass(case: Case, route: str) -> None:
    for backward, plans in zip((False, True), plans_of(case, route), strict=True):
        assert [plan.backward for plan in plans] == [backward] * case.ranks
