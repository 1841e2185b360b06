"""The performance gate reads machine code correctly, and detects kernels whose inner loops have more instructions.

`test_compile_gate.py` and `test_compile_gate_rows.py` compile the kernels and compare each with its row of the table.
The tests here check how machine code is read and rows are compared, with listings and rows that are made up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are Triton's")
from ringattn.bench import sass
from tests.kernels.compile_gate import cases, loops, row_cases

MOST_INSIDE = {"3.6.0": 14, "3.7.1": 5, "3.9.0": 42}
"""For each tested version of Triton, the most spill instructions in the loops of a case that may spill."""


def listing(text: str) -> str:
    """Return a listing in the format of nvdisasm. In `text`, a line that starts with `*` is a label."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return "\n".join(
        f"{line[1:]}:" if line.startswith("*") else f"        /*{16 * number:04x}*/  {line} ;"
        for number, line in enumerate(lines)
    )


NESTED = """
STL [R1], R2
*.L_x_1
STL [R1], R2
*.L_x_2
HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24
LDL R2, [R1]
@!P0 BRA `(.L_x_2)
LDL R2, [R1]
@P1 BRA `(.L_x_1)
*.L_x_3
LDL R2, [R1]
@P1 BRA `(.L_x_3)
EXIT
*.L_x_4
LDL R2, [R1]
BRA `(.L_x_2)
"""

MASKED = """
*.L_head
SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR40], R6
@!P0 BRA `(.L_wait)
*.L_there
HGMMA.64x128x16.F32.BF16 R24, gdesc[UR44], R24, gsb0
@!P1 BRA `(.L_whole)
ISETP.GE.AND P2, PT, R1, R2, PT
FSEL R24, R24, -INF, P2
FSEL R25, R25, -INF, P2
*.L_whole
MUFU.EX2 R24, R24
F2FP.BF16.F32.PACK_AB R24, R25, R24
@!P3 BRA P4, `(.L_head)
EXIT
*.L_wait
SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR40], R6
@!P0 BRA `(.L_wait)
BRA `(.L_there)
"""

SPLIT = """
BRX R2 -0x80 (*"BRANCH_TARGETS .L_one,.L_two"*)
*.L_one
HGMMA.64x128x16.F32.BF16 R24, gdesc[UR44], R24, gsb0
@P0 BRA `(.L_one)
EXIT
*.L_two
UTMALDG.2D [UR8], [UR50]
HGMMA.64x128x16.F32.BF16 R24, gdesc[UR44], R24, gsb0
@P0 BRA `(.L_two)
EXIT
"""


def names(some: Sequence[sass.Instruction]) -> list[str]:
    return [one.opcode.split(".")[0] for one in some]


def spills(some: Sequence[sass.Instruction]) -> int:
    return sum(one.spills for one in some)


def test_nested_loops_are_distinguished() -> None:
    """`product_loops` returns only the inner loop, not outer loops, loops without products or unreachable code."""
    (loop,) = sass.product_loops(listing(NESTED))
    assert names(loop.least) == names(loop.most) == ["HGMMA", "LDL", "BRA"]
    assert spills(loop.body) == 1 and spills(sass.instructions(listing(NESTED))) == 6


def test_without_its_inner_loop_the_outer_one_counts() -> None:
    (loop,) = sass.product_loops(listing(NESTED.replace("@!P0 BRA `(.L_x_2)", "NOP")))
    assert names(loop.body) == ["STL", "HGMMA", "LDL", "NOP", "LDL", "BRA"]
    assert not sass.product_loops(listing(NESTED.replace("HGMMA.64x64x16.F32.BF16", "MOV")))


def test_exponentials_of_other_warps_than_the_one_that_issues_products() -> None:
    """With products into tensor memory, loops with exponentials count; without, only loops with products do."""
    exponentials = SPLIT.replace("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR44], R24, gsb0", "MUFU.EX2 R24, R24", 1)
    (only,) = sass.product_loops(listing(exponentials))
    assert names(only.least)[:2] == ["UTMALDG", "HGMMA"]
    loops_of_both = sass.product_loops(listing(exponentials.replace("HGMMA.64x128x16", "UTCHMMA")))
    assert [names(loop.least)[:-1] for loop in loops_of_both] == [["MUFU"], ["UTMALDG", "UTCHMMA"]]


def test_of_a_kernel_without_matrix_units_the_loops_that_multiply() -> None:
    (loop,) = sass.product_loops(listing(NESTED.replace("HGMMA.64x64x16.F32.BF16", "FFMA")))
    assert names(loop.least) == ["FFMA", "LDL", "BRA"]


def test_with_and_without_the_mask() -> None:
    """A loop's shortest path skips the mask, and its longest path includes it.

    A retry of a wait, whose code is after the exit, belongs to the loop, but is on neither path.
    """
    (loop,) = sass.product_loops(listing(MASKED))
    assert names(loop.least) == ["SYNCS", "BRA", "HGMMA", "BRA", "MUFU", "F2FP", "BRA"]
    assert names(loop.most) == ["SYNCS", "BRA", "HGMMA", "BRA", "ISETP", "FSEL", "FSEL", "MUFU", "F2FP", "BRA"]
    assert len(loop.body) == 13


def test_the_parts_of_a_split_kernel_have_loops_of_their_own() -> None:
    """The loops of each partition of a warp-specialized kernel are found.

    The code of each partition follows the exit of the previous one, and a jump through a table leads to it.
    """
    assert [len(loop.least) for loop in sass.product_loops(listing(SPLIT))] == [2, 3]
    blind = SPLIT.replace('(*"BRANCH_TARGETS .L_one,.L_two"*)', "")
    assert [len(loop.least) for loop in sass.product_loops(listing(blind))] == [2, 3]


def test_classes() -> None:
    code = """
    HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24
    MUFU.EX2 R1, R2
    @P0 FFMA R1, R2, R3, R4
    FMNMX R1, R2, R3, !PT
    IMAD.WIDE R2, R3, 0x4, R4
    UIADD3 UR4, UR4, 0x1, URZ
    R2UR UR4, R2
    LDGSTS.E.BYPASS.128 [R1], [R2]
    SHFL.BFLY PT, R1, R2, 0x1, 0x1f
    @!UP0 SYNCS.ARRIVE.TRANS64 RZ, [UR4], R6
    WARPGROUP.DEPBAR.LE gsb0, 0x0
    F2FP.BF16.F32.PACK_AB R1, R2, R3
    IMAD.MOV.U32 R1, RZ, RZ, R2
    BRA `(.L_x_1)
    """
    assert sass.count_by_class(sass.instructions(listing(code))) == {
        "all": 14, "mma": 1, "mufu": 1, "fp32": 2, "integer": 3, "memory": 2, "barrier": 2, "convert": 1, "other": 2,
    }  # fmt: skip


def test_encodings_are_read() -> None:
    """Instructions are read if their encoding is printed next to them or below them."""
    code = """
        /*0000*/                   MUFU.EX2 R1, R2 ;      /* 0x0000000200017308 */
                                                          /* 0x000e640000000800 */
        /*0010*/              @!P0 BRA `(.L_x_1) ;        /* 0xfffffffc00f88947 */
                                                          /* 0x000fea000383ffff */
"""
    first, second = sass.instructions(code)
    assert first.high == 0x000E640000000800 and second.high == 0x000FEA000383FFFF
    assert second.guard == "@!P0" and second.operands == "`(.L_x_1)"


def test_kernels_of_a_listing() -> None:
    text = '\t.section\t.text.one,"ax"\n\t.section\t.nv.info\n\t.section\t.text.two,"ax"\n.text.two:\n'
    assert list(sass.functions(text)) == ["one", "two"] and ".text.two:" in sass.functions(text)["two"]


ROW: dict[str, Any] = {
    "registers": 200, "shared_bytes": 100_000, "resident": 1, "spills_inside": 0, "spills_outside": 10,
    "loops": [{"least": {"all": 500, "mma": 16, "integer": 100}, "most": {"all": 1000, "mma": 16, "integer": 400}}],
}  # fmt: skip


def changed(way: str, kind: str, count: int) -> dict[str, Any]:
    loop = ROW["loops"][0]
    return ROW | {"loops": [loop | {way: loop[way] | {kind: count}}]}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (changed("least", "all", 516), "loop 0, least: 516 all, 500 in the table"),
        (changed("most", "integer", 413), "loop 0, most: 413 integer, 400 in the table"),
        (changed("least", "mma", 21), "loop 0, least: 21 mma, 16 in the table"),
        (changed("least", "all", 484), "renew the table"),
        (ROW | {"spills_inside": 1}, "spills_inside 1, 0 in the table"),
        (ROW | {"spills_outside": 11}, "spills_outside 11, 10 in the table"),
        (ROW | {"resident": 0}, "0 thread blocks on a multiprocessor, 1 in the table"),
        (ROW | {"loops": ROW["loops"] * 2}, "2 different innermost loops, 1 in the table"),
    ],
)
def test_a_regression_is_detected(row: dict[str, Any], expected: str) -> None:
    (wrong,) = loops.worse(row, ROW)
    assert expected in wrong


def test_the_margin() -> None:
    within = [changed("least", "all", 515), changed("most", "integer", 388), changed("least", "mma", 20)]
    assert not any(loops.worse(row, ROW) for row in (ROW, ROW | {"spills_outside": 9}, *within))


@pytest.mark.parametrize("version", MOST_INSIDE)
def test_the_tables_are_whole(version: str) -> None:
    """The tables have exactly the cases. The attention kernels have loops over matrix products.

    These loops do not spill, except where the compile gate allows it.
    """
    assert tuple(loops.table("attention", version)) == cases.entries_of(version, cases.COUNTED)
    assert tuple(loops.table("rows", version)) == row_cases.COUNTED
    for name, row in loops.table("attention", version).items():
        assert not row["spills_inside"] or cases.may_spill(name, version), name
        unit = "mufu" if name in cases.TENSOR_MEMORY else "mma"
        assert row["spills_inside"] <= MOST_INSIDE[version], name
        assert all(loop["least"]["mma"] or loop["least"][unit] for loop in row["loops"]), name


def test_the_page_is_the_table() -> None:
    assert loops.PAGE.read_text(encoding="utf-8") == loops.page()
