"""What NeMo Automodel's package says of the places that ringattn.adapters.nemo plugs into, read without importing it.

`python -m tests.adapters.nemo_record FOLDER` writes the record of the package in FOLDER, where pip has put it.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_suffix(".json")
_CP = "nemo_automodel/components/distributed/context_parallel"
FUNCTIONS = {
    f"{_CP}/sharder.py": ("ContextParallelSharder.__init__", "ContextParallelSharder.shard", "ShardLayout"),
    f"{_CP}/utils.py": ("_prepare_cp_sharder", "attach_context_parallel_hooks", "attach_cp_sdpa_hooks"),
    f"{_CP}/__init__.py": (),
}


def recorded() -> dict[str, Any]:
    """The record: the version, arguments or fields by name, and how the model's hook and the sharder are called."""
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def record_of(folder: Path) -> dict[str, Any]:
    """What `recorded` would be of the package in `folder`."""
    (info,) = folder.glob("nemo_automodel-*.dist-info")
    found: dict[str, Any] = {"version": info.name.removesuffix(".dist-info").split("-")[1]}
    calls: set[str] = set()
    for file, names in FUNCTIONS.items():
        tree = ast.parse((folder / file).read_text(encoding="utf-8"))
        for name in names:
            found[name] = _said(_of(tree, name))
        calls |= {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    wanted = "prepare_model_inputs_for_cp", "self.shard_batch", "prepared.get"
    found["calls"] = sorted(call for call in calls if call.split("(")[0].endswith(wanted))
    return found


def _of(tree: ast.Module, name: str) -> ast.FunctionDef | ast.ClassDef:
    body: list[ast.stmt] = tree.body
    for part in name.split("."):
        (node,) = (one for one in body if isinstance(one, ast.FunctionDef | ast.ClassDef) and one.name == part)
        body = node.body
    return node


def _said(node: ast.FunctionDef | ast.ClassDef) -> str:
    """The arguments of a function, or the fields of a class."""
    if isinstance(node, ast.FunctionDef):
        return ast.unparse(node.args)
    return ", ".join(ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign))


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record_of(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
