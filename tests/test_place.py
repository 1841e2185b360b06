"""Plans: every buffer placed, what is live counted independently, messages that meet, memory as known by hand."""

from __future__ import annotations

from collections import defaultdict

import pytest

from ringattn.plan import ALIGNMENT_BYTES, HOME, Add, Fold, Plan, Send
from ringattn.planner.choose import plan_of, schedule_of
from ringattn.planner.place import project, verify_placement
from ringattn.planner.simulate import REFERENCE, Cluster, simulate
from ringattn.problem import ITEM_BYTES
from ringattn.schedule.ops import Kind
from ringattn.schedule.routes import RING, ROUTES, Route
from tests.strategies import Case, covering, simple, wire_order

each_route = pytest.mark.parametrize("route", ROUTES.values(), ids=list(ROUTES))


def plans_of(case: Case, route: Route) -> list[list[Plan]]:
    """The plans of all ranks, forward and backward."""
    return [[plan_of(case.problem, route, rank, back) for rank in range(case.ranks)] for back in (False, True)]


def record(plan: Plan) -> int:
    """Elements that travel for one row of one K/V head."""
    return plan.problem.batch * (plan.problem.head_dim + plan.problem.value_dim)


def bytes_of(plan: Plan, buffer: int) -> int:
    """Bytes of a buffer, from its rows."""
    return len(wire_order(plan.buffers[buffer].content)) * record(plan) * ITEM_BYTES[plan.buffers[buffer].dtype]


def touched(plan: Plan) -> dict[int, set[int]]:
    """The steps in which each buffer is named by some operation."""
    steps: dict[int, set[int]] = defaultdict(set)
    for now, step in enumerate(plan.steps):
        named = [*step.zeros]
        for pack in step.packs:
            named += [pack.source, pack.into]
        named += [message.buffer for message in (*step.sends, *step.recvs)]
        for item in step.work:
            named += [item.part, item.into] if isinstance(item, Add) else [item.kv, item.dkv]
        for buffer in named:
            steps[buffer].add(now)
    steps.pop(HOME, None)
    return steps


@each_route
@covering
def test_plans_are_projections_and_verified(route: Route, case: Case) -> None:
    for backward, plans in enumerate(plans_of(case, route)):
        schedule = schedule_of(case.problem, route, bool(backward))
        for rank, plan in enumerate(plans):
            assert plan == project(schedule, rank)
            verify_placement(plan)


@each_route
@covering
def test_the_arena_holds_what_is_live(route: Route, case: Case) -> None:
    for plan in (plan for plans in plans_of(case, route) for plan in plans):
        steps = touched(plan)
        assert set(steps) == set(range(len(plan.buffers)))
        live = [0] * len(plan.steps)
        for buffer, named in steps.items():
            assert (plan.buffers[buffer].first, plan.buffers[buffer].last) == (min(named), max(named))
            assert plan.buffers[buffer].offset_bytes % ALIGNMENT_BYTES == 0
            for now in range(min(named), max(named) + 1):
                live[now] += bytes_of(plan, buffer)
        assert plan.arena_bytes >= max(live, default=0)
        ends = [plan.buffers[b].offset_bytes + bytes_of(plan, b) for b in steps]
        assert 0 <= plan.arena_bytes - max(ends, default=0) < ALIGNMENT_BYTES


@each_route
@covering
def test_messages_of_two_plans_meet(route: Route, case: Case) -> None:
    for plans in plans_of(case, route):
        sent: dict[tuple[int, int], list] = defaultdict(list)
        received: dict[tuple[int, int], list] = defaultdict(list)
        for plan in plans:
            for step in plan.steps:
                for send in step.sends:
                    dtype = plan.buffers[send.buffer].dtype
                    sent[plan.rank, send.peer].append((step.number, message(plan, send), dtype))
                for recv in step.recvs:
                    buffer = plan.buffers[recv.buffer]
                    received[recv.peer, plan.rank].append((step.number, wire_order(buffer.content), buffer.dtype))
        assert sent == received


def message(plan: Plan, send: Send) -> list[tuple[int, int]]:
    """The (head, row) records of a message, in order."""
    first, count = (divmod(elements, record(plan)) for elements in (send.first, send.elements))
    assert first[1] == count[1] == 0
    return wire_order(plan.buffers[send.buffer].content)[first[0] : first[0] + count[0]]


@each_route
@covering
def test_packs_only_what_does_not_lie_in_one_piece(route: Route, case: Case) -> None:
    for plan in (plan for plans in plans_of(case, route) for plan in plans):
        for step in plan.steps:
            for pack in step.packs:
                into = plan.buffers[pack.into]
                if pack.source == HOME:
                    continue
                source, wanted = plan.buffers[pack.source], wire_order(into.content)
                spots = wire_order(source.content)
                at = [spots.index(spot) for spot in wanted]
                assert source.dtype != into.dtype or at != list(range(at[0], at[0] + len(at)))
        packed = [pack.into for step in plan.steps for pack in step.packs if pack.source == HOME]
        shared = [into for into in packed if plan.buffers[into].label == f"KV{plan.rank} packed"]
        assert len(packed) == len(set(packed)) and len(shared) >= bool(packed)


@each_route
@covering
def test_bytes_and_messages_are_those_of_the_schedule(route: Route, case: Case) -> None:
    problem = case.problem
    for backward, plans in enumerate(plans_of(case, route)):
        copies = [copy for step in schedule_of(problem, route, bool(backward)).steps for copy in step.copies]
        for plan in plans:
            mine = [copy for copy in copies if copy.src == plan.rank]
            nbytes = 0
            for copy in mine:
                wide = problem.wire_dtype or problem.accumulator_dtype
                dtype = wide if copy.block.kind is Kind.DKV else problem.dtype
                nbytes += len(wire_order(copy.content)) * record(plan) * ITEM_BYTES[dtype]
            assert (plan.messages, plan.bytes_sent) == (len(mine), nbytes)


@each_route
@covering
def test_folds_read_the_rows_they_mean(route: Route, case: Case) -> None:
    for plan in (plan for plans in plans_of(case, route) for plan in plans):
        for fold in (item for step in plan.steps for item in step.work if isinstance(item, Fold)):
            heads = case.problem.parts[fold.part].kv_heads
            positions = case.problem.kv_layout.positions(fold.owner)
            for buffer, base in ((fold.kv, fold.kv_row), (fold.dkv, fold.dkv_row))[: 1 + plan.backward]:
                rows = list(range(len(positions)))
                if buffer != HOME:
                    part = next(part for part in plan.buffers[buffer].content if part.heads == heads)
                    rows = [row for run in part.rows for row in run.members()]
                for tile in fold.tiles:
                    held = [int(positions[rows[base + row]]) for row in tile.k.rows.members()]
                    assert held == list(tile.k.positions.members())


# --- memory known by hand --------------------------------------------------------------------------------------------

ROWS = 16
SHARD = ROWS * (64 + 64) * 2  # K and V of one shard in bf16; sums are twice as wide


def shards(ranks: int, backward: bool, route: Route = RING, name: str = "contiguous") -> float:
    """Arena bytes of every rank, in shards of K and V; the same on all ranks."""
    (count,) = {plan.arena_bytes for plan in plans_of(simple(name, ROWS * ranks, ranks), route)[backward]}
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
    assert shards(ranks, False, ROUTES["all_gather"]) == ranks
    assert shards(ranks, False, ROUTES["direct"]) == 3  # the own block stays, one is read, one arrives


def test_a_narrow_wire_is_packed_beside_the_sum() -> None:
    case = simple("contiguous", 64, 4)
    wide, narrow = (
        plan_of(Case(type(case.problem)(**{**vars_of(case), "wire_dtype": wire}), case.truth).problem, RING, 1, True)
        for wire in (None, "bfloat16")
    )
    assert narrow.bytes_sent == wide.bytes_sent * 2 // 3  # K/V once, sums at one instead of two
    assert any(pack.source != HOME for step in narrow.steps for pack in step.packs)
    assert all(pack.source == HOME for step in wide.steps for pack in step.packs)


def vars_of(case: Case) -> dict[str, object]:
    return {name: getattr(case.problem, name) for name in case.problem.__dataclass_fields__}


# --- the simulator ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_simulated_times(ranks: int) -> None:
    case, dim = simple("contiguous", 16 * ranks, ranks), 64
    plans = tuple(plans_of(case, RING)[0])
    work_s = 16 * 16 * dim * 4 / 1e9
    # Messages for nothing: the time is the work. Work for nothing: P-1 hops, each latency and bytes.
    free = Cluster("free links", 1e9, 1e30, 0)
    busy = simulate(plans, free)
    assert busy.total_us == pytest.approx(ranks * work_s * 1e6) and busy.waiting_us == pytest.approx((0.0,) * ranks)
    slow = simulate(plans, Cluster("free work", 1e30, 1e6, 1e-3))
    assert slow.total_us == pytest.approx((ranks - 1) * (1e-3 + SHARD / 1e6) * 1e6)
    assert simulate(plans, REFERENCE).total_us > 0


@covering
def test_simulation_ends_whatever_the_plans(case: Case) -> None:
    for route in ROUTES.values():
        times = [simulate(tuple(plans), REFERENCE) for plans in plans_of(case, route)]
        for plans, time in zip(plans_of(case, route), times, strict=True):
            work = [sum(item.tiles.area() for s in p.steps for item in s.work if isinstance(item, Fold)) for p in plans]
            assert all((busy > 0) == (area > 0) for busy, area in zip(time.busy_us, work, strict=True))
            assert time.total_us >= max(time.busy_us)
            assert (time.total_us > 0) == any((*work, *(plan.messages for plan in plans)))
