"""The repository as a whole: import layers, names, sizes, and the contents of a wheel.

The tests read the source. They import the package only in subprocesses, so that the imports of one test cannot hide a
missing import in another.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ringattn"
LINKED = ("kernels", "launch", "bench")  # real folders at the top, links inside ringattn/

GPU_PACKAGES = {"triton", "cupy", "cuda", "nvidia"}
_contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
CONTRACTS = {contract["id"]: f"{contract['name']} BROKEN" for contract in _contracts}
LAYERS: list[str] = _contracts[0]["layers"]
TORCH_FREE = {"errors", "core", "schedule", "planner"}


# --- layers ----------------------------------------------------------------------------------------------------------


def sources(folder: Path) -> Iterator[Path]:
    """Yield every .py file below `folder`, following links, in a fixed order."""
    for path, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(f for f in folders if f != "__pycache__" and not f.startswith("."))
        yield from (Path(path, f) for f in sorted(files) if f.endswith(".py"))


@pytest.fixture(scope="module")
def importable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of the package, in which folders replace links, and with the contracts.

    import-linter does not follow links.
    """
    copy = tmp_path_factory.mktemp("layers")
    ignored = shutil.ignore_patterns("__pycache__", "results")
    shutil.copytree(PACKAGE, copy / "ringattn", ignore=ignored)
    # import-linter would count an import from a folder without __init__.py as an import of `ringattn` itself.
    for folder in LINKED:
        (copy / "ringattn" / folder / "__init__.py").touch()
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def lint_imports(folder: Path) -> tuple[int, str]:
    """Run import-linter with the contracts in pyproject.toml. Return its exit code and output."""
    env = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_import_contracts_are_kept(importable: Path) -> None:
    code, printed = lint_imports(importable)
    assert code == 0 and ", 0 broken" in printed, printed


@pytest.mark.parametrize(
    ("file", "code", "broken"),
    [
        ("core/mask.py", "from ringattn.schedule import ops", "layers"),
        ("utils.py", "x = 1", "layers"),
        ("core/layout.py", "def f():\n    import torch", "no-torch"),
        (
            "sequence.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ringattn.ring import Ring",
            "acyclic",
        ),
        pytest.param("launch/ring.py", "from ringattn.bench import gate", "layers", marks=pytest.mark.slow),
        pytest.param(
            "kernels/rows.py", "from ringattn.core.geometry import StridedRange", "layers", marks=pytest.mark.slow
        ),
        pytest.param("adapters/sdpa.py", "def f():\n    import rich", "library", marks=pytest.mark.slow),
    ],
)
def test_import_contracts_find_a_planted_import(importable: Path, file: str, code: str, broken: str) -> None:
    path = importable / "ringattn" / file
    before = path.read_text(encoding="utf-8") if path.exists() else None
    try:
        path.write_text(f"{before or ''}\n{code}\n", encoding="utf-8")
        result, printed = lint_imports(importable)
    finally:
        path.write_text(before, encoding="utf-8") if before is not None else path.unlink()
    assert result == 1 and CONTRACTS[broken] in printed, printed


# --- names and imports -----------------------------------------------------------------------------------------------


def module_names(folders: set[str] | None = None) -> list[str]:
    """Return the dotted names of the package's modules, without `__main__`. `folders`: None for all."""
    names = []
    for path in sources(PACKAGE):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[-1] != "__main__" and (folders is None or parts[0] in folders):
            names.append(".".join(("ringattn", *parts)).removesuffix(".__init__"))
    return names


def hosts() -> set[str]:
    """Return the names of the packages that adapters import and that the package itself does not need."""
    names: set[str] = set()
    for path in sources(PACKAGE / "adapters"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module or "")
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"ringattn", "torch", "numpy"}


def python(code: str, *args: str, cwd: Path, path: Path | None = None) -> str:
    """Run `code` in a new interpreter, with `path` as its PYTHONPATH. Return the standard output."""
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
        # A folder without __init__.py has no file. Another package named kernels does not count.
        place = Path(getattr(module, "__file__", None) or next(iter(module.__path__))).resolve()
        if place.is_relative_to(Path.cwd()):
            loaded.setdefault(place, []).append(name)
bare = [name for names in loaded.values() for name in names if not name.startswith("ringattn")]
print(len(loaded), bare, [names for names in loaded.values() if len(names) > 1])
"""


@pytest.mark.slow
def test_no_file_loads_under_two_names() -> None:
    # In the root, Python can also import modules without the prefix `ringattn`.
    printed = python(IMPORT_ALL + PRINT_TWICE, ",".join(GPU_PACKAGES | hosts()), *module_names(), cwd=ROOT)
    count, twice = printed.splitlines()[-1].split(" ", 1)
    assert twice == "[] []"
    assert int(count) > len(LINKED)


def test_lower_layers_import_without_torch(tmp_path: Path) -> None:
    # An empty module object replaces ringattn/__init__.py, which belongs to a higher layer.
    bare = "import types\nstub = types.ModuleType('ringattn')\nstub.__path__ = [sys.argv.pop(1)]\n"
    code = "BLOCKED = {'torch'}" + BLOCK + bare + "sys.modules['ringattn'] = stub\n" + IMPORT_ALL
    python(code, str(PACKAGE), "", *module_names(TORCH_FREE), cwd=tmp_path)


def test_import_needs_no_gpu_package(tmp_path: Path) -> None:
    face = next(layer for layer in LAYERS if layer.startswith("ring : ")).split(" : ")
    names = ["ringattn", *module_names({*face, "cli", "testing"})]
    blocked = "BLOCKED = {'cupy', 'triton', 'nvidia', 'cuda', 'nccl'}"
    python(blocked + BLOCK + IMPORT_ALL, "", *names, cwd=tmp_path, path=ROOT)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the files in a clone from which the package is built, with its links."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in ("ringattn", *LINKED):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy / file)
    return copy


@pytest.mark.slow
def test_plain_checkout_on_the_path(checkout: Path, tmp_path: Path) -> None:
    code = "import ringattn, ringattn.core.geometry as g, ringattn.launch as l\n"
    code += "import ringattn.bench as b, ringattn.kernels as k\n"
    code += "print(*(m.__file__ for m in (g, l, b)), k.__path__[0], sep='\\n')"
    printed = python(code, cwd=tmp_path, path=checkout).split()
    assert printed == [
        str(checkout / "ringattn" / file)
        for file in ("core/geometry.py", "launch/__init__.py", "bench/__init__.py", "kernels")
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


# --- contents of the wheel and of the root folder, words -------------------------------------------------------------


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(checkout: Path, tmp_path: Path) -> None:
    # The wheel is built from the sdist, in which files replace the links. Planted files show that new files and folders
    # are included.
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
    code = {path.relative_to(tree).as_posix() for path in sources(tree / "ringattn") if "bench" not in path.parts}
    conf = {f"ringattn/{path.relative_to(tree).as_posix()}" for path in (tree / "launch" / "conf").rglob("*.yaml")}
    data = {"py.typed", "kernels/configs.json", "launch/report/page.html"}
    assert held == code | conf | {f"ringattn/{name}" for name in data}
    assert {"ringattn/kernels/planted.py", "ringattn/launch/conf/planted/deep.yaml"} <= held
    assert {name.split("/")[0] for name in held} == {"ringattn"}
    wheel_path = next(tmp_path.glob("*.whl"))
    # An installed wheel finds its options, and presets that are files and presets that are code.
    code = "from ringattn.launch.calls import load_run\nfrom ringattn.launch.measure.sweep import described\n"
    code += "print(load_run(['shape=llama8b', 'window=[5,0]']).heads, len(described(['preset=weak'])[1]))"
    (tmp_path / "site").mkdir()
    with zipfile.ZipFile(wheel_path) as wheel:
        wheel.extractall(tmp_path / "site")
    assert python(code, cwd=tmp_path, path=tmp_path / "site").split() == ["32", "3"]


def test_the_root_holds_what_belongs_there() -> None:
    """git tracks exactly these entries in the root. A test that writes into the current folder might add others."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {Path(line).parts[0] for line in tracked.splitlines()} == {
        ".ci", ".gitignore", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md",
        "bench", "constraints.txt", "docs", "kernels", "launch", "pyproject.toml", "ringattn", "tests",
    }  # fmt: skip


REPLACED = {
    "told_by_all": "all_gather_text",
    "Strip": "TokenRange", "Spot": "Overlap", "Fold": "AttendOp", "Serve": "AttendReceivedOp", "guests": "received",
    "Home": "LocalTensors", "HOME": "LOCAL",
    "Carry": "SoftmaxState", "settled": "finalized", "Seed": "BackwardInputs", "Records": "PackedBuffer",
    "Form": "RecordLayout", "Needs": "ReadSets", "Bundle": "FusedBuffer", "Promises": "Guarantees",
    "Does not know": "an import contract", "float64 truth": "float64 reference",
    "Ticket": "WorkHandle", "Pulse": "Heartbeat", "pulse": "heartbeat", "Beating": "HeartbeatThread",
    "accusation": "failure attribution", "accuse": "attribute_failure",
}  # fmt: skip
"""Words that only this project used, and the established terms that have replaced them."""


def test_private_words_stay_out() -> None:
    pattern = re.compile(r"(?<!\w)(" + "|".join(REPLACED) + r")(?!\w)")
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    files = sources(PACKAGE)
    found = [
        f"{path.relative_to(ROOT)}: {word}: say {REPLACED[word]}"
        for path in (*files, *(page for page in pages if page.name != "log.md"))
        for word in pattern.findall(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)
