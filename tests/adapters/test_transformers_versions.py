"""The versions of transformers that the adapter runs with: each does what its column of the table says."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")

from ringattn.adapters import hosts, transformers_versions
from ringattn.adapters import transformers as adapter
from ringattn.errors import UnsupportedError
from tests.adapters.hosts import record
from tests.adapters.models import tiny_model
from tests.adapters.versions import TOLERANCE, VERSIONS, cells, documented

OF_THE_TABLE = {"plain": "Llama", "packed": "Llama, packed, `position_ids`",
                "Trainer": "Trainer, 3 steps, packed", "checkpointing": "gradient checkpointing"}  # fmt: skip
"""By mode of the table of hosts, the cell of a version."""


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_in_an_environment_of_its_own(version: str, tmp_path: Path) -> None:
    found = cells(version, tmp_path)
    assert not {name: x for name, x in found.items() if isinstance(x, float) and not x <= TOLERANCE}
    assert {name: "refused" if isinstance(x, str) else "exact" for name, x in found.items()} == documented(version)
    for mode, name in OF_THE_TABLE.items():
        verdict = found[name]
        if isinstance(verdict, str):
            record("transformers", version, mode, "refused", words=verdict)
        else:
            words = f"{name}, against eager attention, float64"
            record("transformers", version, mode, "exact", ranks=2, worst=verdict, words=words)


@pytest.mark.parametrize("version", ["4.56.2", "5.0.0", "5.19.0", "5.24.0", "6.0.0"])
def test_other_versions_are_refused_by_name(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", "eager")
    monkeypatch.setattr(hosts, "version", lambda package: version)
    with pytest.raises(UnsupportedError, match=rf"4\.57, 5\.20, .*5\.23 and {version} is installed.*install one"):
        adapter.prepare(model)
    with pytest.raises(UnsupportedError, match=f"and {version} is installed"):
        adapter.register()
    assert model.config._attn_implementation == "eager"


def test_every_version_has_a_column() -> None:
    assert {version.rpartition(".")[0] for version in VERSIONS} == set(transformers_versions.CHECKED)
