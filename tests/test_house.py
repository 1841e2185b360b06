"""The shape of the house: floors, names, sizes, what a wheel holds.

Walks the source; imports the package only in subprocesses, so that one test's imports cannot hide another's.
Does not know: attention.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ringattn"
LINKED = ("kernels", "launch", "bench")  # real folders at the top, links inside ringattn/

FLOORS: dict[int, tuple[str, ...]] = {
    7: ("launch", "bench", "adapters", "cli", "testing", "__main__"),
    6: (
        "__init__", "activation", "agreement", "attention", "dilated", "dilated_modules", "explain", "modules",
        "opening", "projected", "projection", "rank_group", "ring", "runtime", "selective", "sequence", "spec",
    ),
    5: ("arithmetic", "executor", "gathering", "records", "rotary", "projection_kernels", "watch"),
    4: ("engine", "transport", "pool", "partial", "observe"),
    3: ("planner", "plan", "kernels"),
    2: ("schedule",),
    1: ("mask", "dilation", "presets", "layout", "problem", "sweep"),
    0: ("geometry", "errors", "span"),
}
FLOOR = {room: floor for floor, rooms in FLOORS.items() for room in rooms}
FAMILIES = [set(FLOORS[6]), set(FLOORS[5]), {"planner", "plan"}, set(FLOORS[1])]  # may import each other
SHARED = {"observe", "partial", "testing"}  # what every room of its own floor may import
DOORS = {"cli", "__main__"}  # they open the other rooms of floor 7
TORCH_FREE = [room for room, floor in FLOOR.items() if floor <= 3 and room != "kernels"]

OPTIONAL = {"triton", "cupy", "cuda", "nvidia", "transformers", "accelerate", "torchtitan", "megatron", "lightning",
            "diffusers"}  # fmt: skip
MAX_LINES = 400


# --- floors ----------------------------------------------------------------------------------------------------------


def sources(folder: Path) -> Iterator[Path]:
    """Every .py file below `folder`, through links, in a fixed order."""
    for path, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(f for f in folders if f != "__pycache__" and not f.startswith("."))
        yield from (Path(path, f) for f in sorted(files) if f.endswith(".py"))


def imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a module imports, at any depth of the code; `package` resolves leading dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            yield node.lineno, f"torch.{node.attr}"


def fault(room: str, name: str) -> str | None:
    """Why `room` may not import `name`, or None."""
    top, *rest = name.split(".")
    if top in LINKED:
        return f"say ringattn.{top}"
    if top == "torch" and room in TORCH_FREE:
        return "floors 0 to 3 know no torch"
    if room == "kernels" and name.startswith("torch.distributed"):
        return "kernels know no ranks"
    if top != "ringattn":
        return None
    target = rest[0] if rest and rest[0] in FLOOR else "__init__"
    if target == room:
        return None
    if room == "kernels":
        return "kernels know no other room"
    if FLOOR[target] > FLOOR[room]:
        return f"{target} is on floor {FLOOR[target]}, {room} on floor {FLOOR[room]}"
    together = any({room, target} <= family for family in FAMILIES) or target in SHARED or room in DOORS
    if FLOOR[target] == FLOOR[room] and not together:
        return f"{target} and {room} share floor {FLOOR[room]}"
    return None


def violations(package: Path) -> list[str]:
    """One line for each import that breaks the floors, and for each room that has no floor."""
    found = []
    for path in sources(package):
        parts = path.relative_to(package).with_suffix("").parts
        room = parts[0]
        where = path.relative_to(package.parent).as_posix()
        if room not in FLOOR:
            found.append(f"{where}: unknown room {room}: give it a floor")
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, name in imports(tree, ("ringattn", *parts[:-1])):
            if why := fault(room, name):
                found.append(f"{where}:{line}: {name}: {why}")
    return found


@pytest.mark.slow
def test_floors() -> None:
    assert not violations(PACKAGE), "\n" + "\n".join(violations(PACKAGE))


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("mask.py", "from ringattn.schedule import ops"),
        ("schedule/ops.py", "from ringattn import executor"),
        ("schedule/ops.py", "from ..planner.cost import price"),
        ("schedule/__init__.py", "from .. import planner"),
        ("plan.py", "import ringattn"),
        ("layout.py", "def f():\n    import torch"),
        ("planner/cost.py", "from torch.nn import functional"),
        ("planner/cost.py", "from ringattn.kernels import tile"),
        ("geometry.py", "from ringattn.errors import InputError"),
        ("engine/aten.py", "import ringattn.transport.local"),
        ("executor.py", "from ringattn import Ring"),
        ("executor.py", "from importlib import import_module\nimport_module('ringattn.attention')"),
        ("attention.py", "from ringattn.launch import demo"),
        ("bench/ring.py", "from ringattn.launch import demo"),
        ("engine/triton.py", "from kernels import tile"),
        ("kernels/tile.py", "from ringattn.geometry import Run"),
        ("kernels/tile.py", "import torch.distributed as dist"),
        ("kernels/tile.py", "import torch\nrank = torch.distributed.get_rank()"),
        ("utils.py", "x = 1"),
        ("extras/new.py", "x = 1"),
    ],
)
def test_floors_catch_a_planted_violation(tmp_path: Path, file: str, code: str) -> None:
    planted = tmp_path / "ringattn" / file
    planted.parent.mkdir(parents=True)
    planted.write_text(code)
    assert len(violations(tmp_path / "ringattn")) == 1


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("mask.py", "from ringattn.layout import Layout\nfrom .errors import InputError\nimport numpy"),
        ("planner/place.py", "from ringattn.plan import Plan\nfrom .cost import price\nfrom ..schedule import ops"),
        ("engine/aten.py", "import torch\nfrom ringattn import partial\nfrom ringattn.kernels import tile"),
        ("kernels/tile.py", "import torch, triton\nfrom .carry import fold\nfrom ringattn.kernels.carry import fold"),
        ("__init__.py", "from ringattn.attention import Ring"),
        ("cli.py", "from ringattn.launch import demo\nimport ringattn"),
    ],
)
def test_floors_allow_what_is_meant(tmp_path: Path, file: str, code: str) -> None:
    planted = tmp_path / "ringattn" / file
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(code)
    assert violations(tmp_path / "ringattn") == []


# --- names and imports -----------------------------------------------------------------------------------------------


def module_names(rooms: set[str] | None = None) -> list[str]:
    """Dotted names of the package's modules, of the given rooms or of all; without `__main__`, which acts when run."""
    names = []
    for path in sources(PACKAGE):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[-1] != "__main__" and (rooms is None or parts[0] in rooms):
            names.append(".".join(("ringattn", *parts)).removesuffix(".__init__"))
    return names


def python(code: str, *args: str, cwd: Path, path: Path | None = None) -> str:
    """Standard output of `code` in a new interpreter, with `path` as its PYTHONPATH."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run([sys.executable, "-c", code, *args], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Block())
"""

IMPORT_ALL = """
import importlib, sys
optional, *names = sys.argv[1:]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if str(error.name).split(".")[0] not in optional.split(","):
            raise
"""

PRINT_TWICE = """
from pathlib import Path
loaded = {}
for name, module in list(sys.modules.items()):
    if name.split(".")[0] in ("ringattn", "kernels", "launch", "bench"):
        # A folder without __init__.py has no file; another package named kernels is none of ours.
        place = Path(getattr(module, "__file__", None) or next(iter(module.__path__))).resolve()
        if place.is_relative_to(Path.cwd()):
            loaded.setdefault(place, []).append(name)
bare = [name for names in loaded.values() for name in names if not name.startswith("ringattn")]
print(len(loaded), bare, [names for names in loaded.values() if len(names) > 1])
"""


@pytest.mark.slow
def test_no_file_loads_under_two_names() -> None:
    # From the root, where the bare names could be found as well.
    printed = python(IMPORT_ALL + PRINT_TWICE, ",".join(OPTIONAL), *module_names(), cwd=ROOT)
    count, twice = printed.splitlines()[-1].split(" ", 1)
    assert twice == "[] []"
    assert int(count) > len(LINKED)


def test_lower_floors_import_without_torch(tmp_path: Path) -> None:
    # A bare package object stands in for ringattn/__init__.py, which is of floor 6.
    bare = "import types\nstub = types.ModuleType('ringattn')\nstub.__path__ = [sys.argv.pop(1)]\n"
    code = "BLOCKED = {'torch'}" + BLOCK + bare + "sys.modules['ringattn'] = stub\n" + IMPORT_ALL
    python(code, str(PACKAGE), "", *module_names(set(TORCH_FREE)), cwd=tmp_path)


def test_import_needs_no_gpu_package(tmp_path: Path) -> None:
    names = ["ringattn", *module_names({*FLOORS[6], "cli", "testing"})]
    blocked = "BLOCKED = {'cupy', 'triton', 'nvidia', 'cuda', 'nccl'}"
    python(blocked + BLOCK + IMPORT_ALL, "", *names, cwd=tmp_path, path=ROOT)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a clone holds of the package, links as links."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in ("ringattn", *LINKED):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy / file)
    return copy


@pytest.mark.slow
def test_plain_checkout_on_the_path(checkout: Path, tmp_path: Path) -> None:
    code = "import ringattn, ringattn.geometry as g, ringattn.launch as l, ringattn.bench as b, ringattn.kernels as k\n"
    code += "print(*(m.__file__ for m in (g, l, b)), k.__path__[0], sep='\\n')"
    printed = python(code, cwd=tmp_path, path=checkout).split()
    assert printed == [
        str(checkout / "ringattn" / file)
        for file in ("geometry.py", "launch/__init__.py", "bench/__init__.py", "kernels")
    ]


def test_links_are_relative() -> None:
    assert {name: os.readlink(PACKAGE / name) for name in LINKED} == {name: f"../{name}" for name in LINKED}


def test_kernels_leaves_its_name_to_others(tmp_path: Path) -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    other = tmp_path / "site"
    (other / "kernels").mkdir(parents=True)
    (other / "kernels" / "__init__.py").touch()
    code = "import sys\nsys.path[:0] = sys.argv[1:]\nimport kernels\nprint(kernels.__file__)"
    printed = python(code, str(ROOT), str(other), cwd=tmp_path)
    assert printed.strip() == str(other / "kernels" / "__init__.py")


# --- what is shipped, how long, on which map -------------------------------------------------------------------------


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(checkout: Path, tmp_path: Path) -> None:
    # By way of the sdist, in which the links become files. Planted files make this hold whatever the folders hold.
    tree = tmp_path / "tree"
    shutil.copytree(checkout, tree, symlinks=True)
    (tree / "kernels" / "planted.py").touch()
    (tree / "launch" / "conf" / "planted").mkdir()
    (tree / "launch" / "conf" / "planted" / "deep.yaml").touch()
    build = "import sys\nfrom setuptools import build_meta\ngetattr(build_meta, sys.argv[1])(sys.argv[2])"
    python(build, "build_sdist", str(tmp_path), cwd=tree)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        sdist.extractall(tmp_path / "unpacked", filter="data")
    python(build, "build_wheel", str(tmp_path), cwd=next((tmp_path / "unpacked").iterdir()))
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (licence,) = (name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
        assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
    code = {path.relative_to(tree).as_posix() for path in sources(tree / "ringattn")}
    conf = {f"ringattn/{path.relative_to(tree).as_posix()}" for path in (tree / "launch" / "conf").rglob("*.yaml")}
    data = {"py.typed", "measured_projections.json", "engine/measured.json", "kernels/configs.json",
            "launch/report_page.html"}  # fmt: skip
    assert held == code | conf | {f"ringattn/{name}" for name in data}
    assert {"ringattn/kernels/planted.py", "ringattn/launch/conf/planted/deep.yaml"} <= held
    assert {name.split("/")[0] for name in held} == {"ringattn"}
    wheel_path = next(tmp_path.glob("*.whl"))
    # Options are found inside an installed wheel, presets that are files and presets that are code.
    code = "from ringattn.launch.run_config import load_run\nfrom ringattn.launch.sweep import described\n"
    code += "print(load_run(['shape=llama8b', 'mask=window']).shape.heads, len(described(['preset=weak'])[1]))"
    (tmp_path / "site").mkdir()
    with zipfile.ZipFile(wheel_path) as wheel:
        wheel.extractall(tmp_path / "site")
    assert python(code, cwd=tmp_path, path=tmp_path / "site").split() == ["32", "3"]


def test_files_are_short() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for folder in ("ringattn", "tests")
        for path in sources(ROOT / folder)
    }
    assert not {file: lines for file, lines in lengths.items() if lines > MAX_LINES}


def file_map(page: str) -> set[str]:
    """Paths of the .py files in the tree under `## Files`: one entry a line, folders end with a slash.

    The first word of a line is its entry; indentation and the usual lines of a drawn tree say which folder holds it.
    Paths start at the root of the repository.
    """
    section = re.search(r"^## Files$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    block = re.search(r"^```\w*\n(.*?)^```", section[1], re.MULTILINE | re.DOTALL) if section else None
    assert block, "docs/architecture.md has no code block under '## Files'"
    files: set[str] = set()
    above: list[tuple[int, str]] = []
    for line in block[1].splitlines():
        entry = re.search(r"[^\s│├└─|`]\S*", line)
        if not entry:
            continue
        while above and above[-1][0] >= entry.start():
            above.pop()
        path = "/".join([*(folder for _, folder in above), entry[0]])
        if path.endswith("/"):
            above.append((entry.start(), entry[0].rstrip("/")))
        elif path.endswith(".py"):
            files.add(path)
    return files


def test_file_map_is_read() -> None:
    tree = "ringattn/\n├── engine/   organs\n│   └── base.py  a contract\n├── plan.py  a plan\nbench/gate.py  a gate\n"
    assert file_map(f"# x\n## Files\nwords\n```text\n{tree}```\n## Next\n") == {
        "ringattn/engine/base.py",
        "ringattn/plan.py",
        "bench/gate.py",
    }


def test_architecture_page_maps_every_file() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    real = {p.resolve().relative_to(ROOT).as_posix() for p in sources(PACKAGE) if p.name != "__init__.py"}
    named = {p for p in file_map(page) if PurePosixPath(p).name != "__init__.py"}
    assert real - named == set(), "not on the map"
    assert {p for p in named - real if not (ROOT / p).exists()} == set(), "on the map, not in the repository"
