"""Parse the PTX of a kernel into instructions whose registers, constants and labels are resolved to numbers.

Only the part of the language that Triton writes is parsed. Debug information and comments are dropped.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

LANES = 32
SHARED_BASE = 1024
"""The address of the first byte of dynamic shared memory. Hopper reserves the first 1024 bytes."""
SPECIAL = ("%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y")
WIDTHS = {"pred": np.bool_, "8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64}
SHIFTS = {"shl", "shr"}
COMMENT = re.compile(r"//[^\n]*")
SOURCE = re.compile(r"\w+\.py:\d+")
LABEL = re.compile(r"([$\w]+):\s*")
REGISTER = re.compile(r"%?[a-zA-Z_]\w*(\.[xyz])?")
NUMBER = re.compile(r"-?(0x[0-9a-fA-F]+U?|\d+)|0[fd][0-9a-fA-F]+")


class Address(NamedTuple):
    """The operand `[register + offset]`; without a register the offset is the address."""

    register: int | None
    offset: int


class Instruction(NamedTuple):
    """An instruction. `guard`: the register of its predicate, or None; `negated`: it runs where the predicate is false.

    `operands`: numbers of registers, lists of them for vectors, `Address`es, names of parameters, and numbers of
    instructions for labels. Each constant has a register. `integers`: the values of operands that are written
    as integers, by their position. `line`: the line of the PTX text. `source`: files and lines of the kernel's source,
    such as `rows.py:12`, first the innermost of functions that call each other.
    """

    opcode: str
    guard: int | None
    negated: bool
    operands: tuple[Any, ...]
    integers: dict[int, int]
    line: int
    source: tuple[str, ...]
    text: str


class Parameter(NamedTuple):
    """A parameter of the kernel: its name and its type, such as `u64` or `f32`."""

    name: str
    type: str


class Program:
    """A parsed kernel. `threads`: per thread block; `registers`: per thread at the start (`.maxnreg`).

    `copies`: threads copy to shared memory (`cp.async`). `tensor_memory`: it is used. `narrow`: the registers of
    16 bits.
    """

    def __init__(self, text: str) -> None:
        """Parse the text of a PTX module with one kernel."""
        self.parameters = [
            Parameter(name, kind) for kind, name in re.findall(r"\.param \.(\w+)[^,\n]*? (\w+),?\n", text)
        ]
        self.threads = int(re.findall(r"\.reqntid (\d+)", text)[0])
        self.registers = int((re.findall(r"\.maxnreg (\d+)", text) or ["255"])[0])
        self.copies = re.search(r"\bcp\.async\.c[ag]\.", text) is not None
        self.tensor_memory = "tcgen05." in text
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self._targets: dict[str, list[str]] = {}
        self._numbers: dict[object, int] = {}
        self.initial: list[object] = []
        """The first value of each register: an array for constants, None for others."""
        self.narrow: set[int] = set()
        self.special = {name: self._register(name) for name in SPECIAL}
        self._parse(text)
        self._resolve()

    def _parse(self, text: str) -> None:
        """Split the body into statements. Names inside nested braces are local to their block of inline assembly."""
        begin = re.search(r"^\{", text, re.MULTILINE)
        assert begin
        line, scope, scopes = text[: begin.start()].count("\n") + 1, "", 0
        self._statements: list[tuple[str, str, int, tuple[str, ...]]] = []
        pending, label, source, depth = "", "", tuple[str, ...](), 0
        for row in text[begin.start() :].split("\n"):
            if row.lstrip().startswith(".loc"):
                source = tuple(SOURCE.findall(row))
            row = COMMENT.sub("", row).strip()
            if row == "{":
                depth += 1
                scopes += 1
                scope = f"@{scopes}" if depth > 1 else ""
            elif row == "}":
                depth -= 1
                scope = ""
                if not depth:
                    break
            else:
                pending = f"{pending} {row}".strip()
                while match := LABEL.match(pending):
                    self.labels[match[1] + scope] = len(self._statements)
                    pending, label = pending[match.end() :], match[1]
                while ";" in pending:
                    statement, pending = (part.strip() for part in pending.split(";", 1))
                    if statement.startswith(".branchtargets"):
                        self._targets[label] = re.findall(r"\$\w+", statement)
                    elif statement and not statement.startswith("."):
                        self._statements.append((statement, scope, line, source))
                if pending.startswith((".loc", ".file", ".section")):
                    pending = ""
            line += 1

    def _resolve(self) -> None:
        for statement, scope, line, source in self._statements:
            guard, negated, rest = None, False, statement
            if match := re.match(r"@(!?)(%?\w+)\s+", statement):
                guard, negated = self._register(match[2] + self._scope(match[2], scope)), match[1] == "!"
                rest = statement[match.end() :]
            opcode, _, arguments = rest.replace("\t", " ").partition(" ")
            integers: dict[int, int] = {}
            operands = tuple(
                self._operand(part, opcode, place, scope, integers) for place, part in enumerate(_split(arguments))
            )
            self.instructions.append(Instruction(opcode, guard, negated, operands, integers, line, source, statement))

    @staticmethod
    def _scope(name: str, scope: str) -> str:
        return "" if name.startswith("%") else scope

    def _operand(self, part: str, opcode: str, place: int, scope: str, integers: dict[int, int]) -> object:
        if part.startswith("{"):
            return [self._operand(x, opcode, place, scope, {}) for x in _split(part.strip("{} "))]
        if part.startswith("["):
            # Tensor copies: [map, {x, y}].
            inner = _split(part.strip("[] "))
            if len(inner) == 2:
                return [self._address(inner[0]), self._operand(inner[1], opcode, place, scope, {})]
            return self._address(inner[0])
        if opcode.startswith(("bra", "brx")) and not part.startswith("%"):
            if part in self._targets:
                return [self.labels[name] for name in self._targets[part]]
            return self.labels[part] if part in self.labels else self.labels[part + scope]
        if part == "_":
            return None
        if "|" in part:
            return [self._register(x) for x in part.split("|")]
        if NUMBER.fullmatch(part):
            if not part.startswith(("0f", "0d")):
                integers[place] = int(part.rstrip("U"), 0)
            return self._constant(part, _width(opcode, place))
        if part == "global_smem":
            return self._constant(str(SHARED_BASE), np.uint32)
        return self._register(part + self._scope(part, scope))

    def _address(self, part: str) -> object:
        name, _, offset = (x.strip() for x in part.partition("+"))
        if name == "global_smem":
            return Address(None, SHARED_BASE + int(offset or 0))
        if "_param_" in name:
            return name
        return Address(self._register(name), int(offset or 0))

    def _register(self, name: str) -> int:
        assert REGISTER.fullmatch(name.split("@")[0]), name
        number = self._numbered(name, None)
        if name.startswith("%rs"):
            self.narrow.add(number)
        return number

    def _constant(self, text: str, width: type[np.generic]) -> int:
        if text.startswith("0f"):
            value = np.uint32(int(text[2:], 16))
        elif width == np.bool_:
            value = np.bool_(int(text.rstrip("U"), 0) != 0)
        else:
            value = width(int(text.rstrip("U"), 0) & (2 ** (8 * np.dtype(width).itemsize) - 1))
        return self._numbered((type(value), value.item()), np.full(LANES, value))

    def _numbered(self, key: object, initial: object) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self.initial)
            self.initial.append(initial)
        return self._numbers[key]


def _split(arguments: str) -> list[str]:
    """Split at the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(arguments):
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append(arguments[start:index].strip())
            start = index + 1
    return [*parts, arguments[start:].strip()] if arguments.strip() else []


def _width(opcode: str, place: int) -> type[np.generic]:
    """Return the type of a constant at a place among the operands."""
    base, *suffixes = opcode.split(".")
    if (base in SHIFTS and place == 2) or (base == "bfe" and place > 1):
        return np.uint32
    types = [suffix for suffix in suffixes if re.fullmatch(r"[busf]\d+|pred", suffix)]
    digits = types[-1].lstrip("busf") if types else "32"
    if types and types[-1] == "pred":
        digits = "pred"
    if opcode.startswith(("mul.wide", "mad.wide")) and place == 3:
        digits = str(2 * int(digits))
    return WIDTHS[digits]
