"""The three states of a host's version: tested, expected to work, refused. The table of hosts."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from ringattn.adapters import host_versions
from ringattn.adapters.host_versions import ABSENT, VARIABLE, Host, UntestedHostWarning, digest_of, source_digest
from ringattn.errors import InputError, UnsupportedError
from tests.adapters import environments
from tests.adapters.environments import ROOT, interpreters, python_of_tests
from tests.adapters.host_table import WRONG, cell, read
from tests.adapters.other_hosts import OTHERS, run_cases, verdict_of

HOSTS = [
    ("transformers", "transformers.host_masks"), ("transformers", "transformers.trainer"), ("accelerate", "accelerate"),
    ("trl", "trl"), ("lightning", "lightning"), ("diffusers", "diffusers"), ("megatron.core", "megatron"),
    ("torchtitan", "torchtitan"), ("nemo_automodel", "nemo"),
]  # fmt: skip
SOURCE = '''
def attend(q, k, scale=None):
    return q * k


class Layer:
    def forward(self, x, mask=None, **rest):
        """Return the input."""
        return x  # unchanged
'''


@pytest.fixture
def module(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Yield the module of a made-up host with version 2.7.1 and two functions."""
    (tmp_path / "made_up_host.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(host_versions, "version", lambda package: "2.7.1")
    monkeypatch.delenv(VARIABLE, raising=False)
    yield import_module("made_up_host")
    del sys.modules["made_up_host"]


def described(*tested: str, **relied_on: tuple[str, ...]) -> Host:
    sources = {"made_up_host:attend": (digest_of("made_up_host:attend"),)} | relied_on.pop("sources", {})
    return Host("made-up-host", tested, sources=sources, **relied_on)


def test_a_tested_version_runs_silently(module: ModuleType) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        described("2.6", "2.7").require()


def test_an_untested_version_with_the_expected_functions_runs_after_one_warning(module: ModuleType) -> None:
    host = described("2.6", parameters={"made_up_host:Layer.forward": ("x", "mask")})
    expected = "tested with made-up-host 2.6, not with made-up-host 2.7.1; all 2 functions .* as expected, so it runs"
    with pytest.warns(UntestedHostWarning, match=expected) as caught:
        host.require()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        host.require()
    assert len(caught) == 1


def test_the_variable_refuses_untested_versions(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "error")
    with pytest.raises(UnsupportedError, match=rf"made-up-host 2\.7\.1 is installed.*{VARIABLE}=error allows tested"):
        described("2.6").require()
    described("2.7").require()
    monkeypatch.setenv(VARIABLE, "warn")
    with pytest.warns(UntestedHostWarning):
        described("2.6").require()
    monkeypatch.setenv(VARIABLE, "no")
    with pytest.raises(InputError, match=f"{VARIABLE}=no: must be warn"):
        described("2.7").require()


@pytest.mark.parametrize("tested", ["2.6", "2.7"])
@pytest.mark.parametrize(
    ("relied_on", "difference"),
    [
        ({"parameters": {"made_up_host:gone": ()}}, "made_up_host:gone does not exist"),
        ({"parameters": {"made_up_host.gone:attend": ()}}, "made_up_host.gone:attend does not exist"),
        ({"parameters": {"made_up_host:attend": ("q", "k", "window")}}, "attend has no parameter window"),
        ({"parameters": {"made_up_host:attend": ("q",)}}, "attend requires the parameter k"),
        ({"parameters": {"builtins:vars": ()}}, "the parameters of builtins:vars cannot be read"),
        ({"sources": {"made_up_host:gone": ("12345678",)}}, "made_up_host:gone does not exist"),
        ({"sources": {"made_up_host:Layer.forward": (ABSENT, "12345678")}}, r"Layer.forward has changed \(digest "),
        ({"sources": {"math:sqrt": ("12345678",)}}, "the source of math:sqrt cannot be read"),
    ],
)
def test_a_version_that_differs_is_refused_by_the_name_of_the_function(
    module: ModuleType, tested: str, relied_on: dict[str, dict[str, tuple[str, ...]]], difference: str
) -> None:
    with pytest.raises(UnsupportedError, match=rf"differs in made-up-host 2\.7\.1: .*{difference}") as error:
        described(tested, **relied_on).require()
    assert "made_up_host:attend has changed" not in str(error.value)


def test_a_function_that_some_reviewed_versions_lack_may_be_absent(module: ModuleType) -> None:
    described("2.7", sources={"made_up_host:later": (ABSENT, "12345678")}).require()


def test_a_missing_dependency_of_a_host_is_reported_as_itself(module: ModuleType, tmp_path) -> None:
    (tmp_path / "made_up_part.py").write_text("import a_package_that_is_not_installed\n")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_installed"):
        described("2.7", sources={"made_up_part:f": (ABSENT,)}).require()


def test_successive_versions_are_one_range_in_messages(module: ModuleType) -> None:
    with pytest.warns(UntestedHostWarning, match=r"tested with made-up-host 1\.9, 2\.0 to 2\.2, 2\.4, not with"):
        described("1.9", "2.0", "2.1", "2.2", "2.4").require()


def test_a_digest_is_of_the_code_alone(module: ModuleType, tmp_path) -> None:
    def digest(name: str, source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source)
        return source_digest(import_module(name).Layer.forward)

    same = SOURCE.replace("Return the input.", "Return\n\n        the same tensor.").replace("return x ", "return  x ")
    same = same.replace("        return", "        # a comment\n        return")
    assert digest("made_up_1", SOURCE) == digest("made_up_2", same)
    assert digest("made_up_1", SOURCE) != digest("made_up_3", SOURCE.replace("return x", "return 2 * x"))
    assert digest("made_up_1", SOURCE) != digest("made_up_4", SOURCE.replace("mask=None", "mask=1"))


@pytest.mark.parametrize(("package", "adapter"), HOSTS, ids=[adapter for _, adapter in HOSTS])
def test_the_installed_host_is_as_its_adapter_expects(package: str, adapter: str) -> None:
    pytest.importorskip(package)
    members = vars(import_module(f"ringattn.adapters.{adapter}"))
    hosts = [member for member in [*members.values(), *members.get("HOSTS", {}).values()] if isinstance(member, Host)]
    assert hosts and [host.differences() for host in hosts] == [[]] * len(hosts)


# --- the table of other hosts ----------------------------------------------------------------------------------------


def test_the_table_of_other_hosts_has_no_wrong_cell() -> None:
    others = read().others
    assert others and others.keys() <= OTHERS.keys()
    for host, results in others.items():
        assert results.keys() <= OTHERS[host].versions.keys()
        for version, row in results.items():
            assert list(row) == list(OTHERS[host].features), (host, version)
            assert WRONG not in {cell(verdict) for verdict in row.values()}, (host, version, row)


def test_each_feature_of_another_host_has_a_test() -> None:
    for host in OTHERS.values():
        for test in host.tests().values():
            file, _, name = test.partition("::")
            text = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert f"\ndef {name.partition('[')[0]}" in text, test


@pytest.mark.slow
def test_a_run_of_tests_has_one_verdict_for_each_feature(tmp_path: Path) -> None:
    """The verdict is the largest error of all cases, the error of ringattn, or the reason why no test ran."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    file = tmp_path / "test_features.py"
    file.write_text(FEATURES, encoding="utf-8")
    cases = run_cases(sys.executable, [str(file)], False, variables)
    tests = {case.test.rpartition("::")[2].partition("[")[0]: case.test.partition("[")[0] for case in cases}
    verdicts = {name: verdict_of(test, name == "test_refused", cases) for name, test in tests.items()}
    assert verdicts == {
        "test_exact": 5e-10,
        "test_compared": pytest.approx(1e-7, rel=1e-3),
        "test_refused": "refused: cp_size=3: leave it out",
        "test_differs": "refused: relies on code that differs",
        "test_script": "refused: a host differs",
        "test_fails": "failed: assert 1 == 2",
        "test_skipped": "not possible: no such function",
        "test_on_gpu": "not possible: a Triton kernel needs a GPU",
    }
    assert [cell(verdict) for verdict in (0.0, 5e-10, *list(verdicts.values())[2:])] == [
        "✓", "✓ 5e-10", "✗", "✗", "✗", "WRONG", "–", "–"
    ]  # fmt: skip


FEATURES = """
import pytest, torch
from ringattn import InputError, UnsupportedError

@pytest.mark.parametrize("error", [1e-12, 5e-10])
def test_exact(error):
    assert error <= 1e-9

def test_compared():
    torch.testing.assert_close(torch.ones(2, dtype=torch.float64) + 1e-7, torch.ones(2, dtype=torch.float64))

def test_refused():
    with pytest.raises(InputError, match="cp_size=3"):
        raise InputError("cp_size=3: leave it out")

def test_differs():
    raise UnsupportedError("relies on code that differs")

def test_script():
    printed = "ringattn script: loading a host\\nringattn script: a host differs\\nexit code 2"
    assert not printed, (0, printed)

def test_fails():
    assert 1 == 2

def test_skipped():
    pytest.skip("no such function")

def test_on_gpu():
    raise RuntimeError("0 active drivers ([]). There should only be one.")
"""


def test_a_version_that_needs_a_python_this_machine_lacks_names_those_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert python_of_tests((3, 11)) == sys.executable
    assert interpreters()[sys.version_info[:2]] == sys.executable
    monkeypatch.setattr(environments, "interpreters", lambda: {(3, 11): "a", (3, 12): "b"})
    with pytest.raises(RuntimeError, match=r"needs Python 9\.1 or later, and this machine has 3\.11, 3\.12"):
        python_of_tests((9, 1))
