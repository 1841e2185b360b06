"""The options of attention: one class declares them, imports without torch, and checks the values at creation."""

from __future__ import annotations

import functools
import inspect
import re
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import product
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ringattn
from ringattn import Ring, RingAttention, RingDilatedAttention, RingMultiheadAttention, attention, masks
from ringattn.adapters.attend import attend
from ringattn.adapters.torch_ops import SCHEMA, ring_attention
from ringattn.engine.base import Softmax
from ringattn.errors import InputError
from ringattn.options import NAMES, AttentionKeywords, AttentionOptions
from ringattn.testing import dense_attention, run_ranks
from tests.doc_code import example

PACKAGE = Path(ringattn.__file__).parent

TENSOR = torch.tensor(0.5)
WRONG: list[tuple[str, Any, str]] = [
    *(("causal", value, "causal must be True or False") for value in (1, "no", None, np.bool_(True), torch.ones(2))),
    ("window", 5, "window=5: expected (left, right)"),
    ("window", (1, 2, 3), "expected (left, right)"),
    ("window", (True, 0), "window left side must be tokens >= 0, None or -1, got True"),
    ("mask", "prefix:2", "is not a mask"),
    *(("scale", value, "scale must be a finite number or None") for value in (True, nan, -inf, 10**400, "0.5", TENSOR)),
    *(("softcap", value, "softcap must be positive and finite") for value in (0.0, inf, nan, True, "30")),
    ("sinks", 1.0, "sinks must be a tensor of shape (q_heads,), one per query head, got float"),
    ("alibi_slopes", 0.5, "alibi_slopes must be a tensor or finite numbers"),
    *(("alibi_slopes", [0.5, value], "alibi_slopes must be a tensor or finite numbers") for value in (inf, nan)),
    ("alibi_slopes", torch.tensor([0.5, inf]), "alibi_slopes must be a tensor or finite numbers"),
    *(("alibi_slopes", value, "alibi_slopes must be a tensor of shape (q_heads,)")
      for value in (torch.ones(2, 2), torch.ones(2).int(), torch.ones(2, device="meta"))),
    ("alibi_slopes", torch.ones(2, requires_grad=True), "pass alibi_slopes.detach()"),
    *(("dropout_p", value, "dropout_p must be a probability from 0 to less than 1") for value in (1.0, -0.1)),
    *(("dropout_seed", value, "dropout_seed must be a whole number from 0 to 2**64 - 1")
      for value in (-1, 2**64, True)),
    ("schedule", 3, "schedule must be a name"),
]  # fmt: skip


def test_the_declaration_imports_without_torch_and_describes_each_option() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from dataclasses import fields\n"
        "from ringattn.options import AttentionOptions\n"
        "print([(each.name, each.type, each.default) for each in fields(AttentionOptions) if each.metadata['help']])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([(each.name, each.type, each.default) for each in fields(AttentionOptions)])


def test_the_keywords_have_the_names_and_types_of_the_fields() -> None:
    keywords = {name: each.__forward_arg__ for name, each in AttentionKeywords.__annotations__.items()}
    assert keywords == {each.name: each.type for each in fields(AttentionOptions)}


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_a_wrong_value_is_refused_when_the_options_are_made(name: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        AttentionOptions(**{name: value})
    with pytest.raises(InputError, match=re.escape(message)):
        replace(AttentionOptions(), **{name: value})


def test_every_option_has_a_wrong_value_above() -> None:
    assert {name for name, *_ in WRONG} == set(NAMES)


REMOVED = (
    ("chunk", 8192, "chunked(8192)"),
    ("prefix", (1, 2), "prefix((1, 2))"),
    ("global_tokens", 4, "global_tokens(4)"),
)


def test_names_that_do_not_exist_are_refused_where_options_are_taken() -> None:
    with Ring(engine="plain") as ring:
        seq, x = ring.sequence(4), torch.zeros(1, 4, 2, 8)
        calls: list[Callable[..., object]] = [
            functools.partial(ring.attention, x, x, x, seq), functools.partial(ring_attention, x, x, x, seq),
            functools.partial(ring.explain, seq, q_heads=2, head_dim=8), RingAttention,
        ]  # fmt: skip
        for call, (name, value, line) in product(calls, REMOVED):
            with pytest.raises(InputError, match=rf"{name}=.* is now a mask: write mask=masks\.{re.escape(line)}"):
                call(**{name: value})
            with pytest.raises((InputError, TypeError), match="'chunks' is not an option of attention"):
                call(chunks=3)
        with pytest.raises(TypeError, match="'windw' is not an option of attention"):
            ring.explain(seq, q_heads=2, head_dim=8, windw=(1, 0))  # type: ignore[call-arg]
        branches: Any = {"segment_lengths": [4], "dilation_rates": [1]}
        for wrong in ({"window": (1, 0)}, {"mask": masks.chunked(2)}):
            with pytest.raises(InputError, match=r"dilated attention takes no (window|mask); leave it out"):
                ring.dilated_attention(x, x, x, seq, **branches, **wrong)
            with pytest.raises(InputError, match=r"dilated attention takes no (window|mask); leave it out"):
                RingDilatedAttention([4], [1], **wrong)


def test_signatures_and_docstrings_list_each_option() -> None:
    listed = {
        Ring.attention: NAMES,
        Ring.explain: NAMES,
        attend: NAMES,
        ring_attention: NAMES,
        Ring.dilated_attention: set(NAMES) - {"window", "mask"},
        RingAttention.__init__: set(NAMES) - {"sinks", "dropout_seed"},
        RingMultiheadAttention.__init__: set(NAMES) - {"dropout_p", "dropout_seed"},
        RingDilatedAttention.__init__: {"causal", "scale", "softcap", "alibi_slopes", "schedule"},
    }
    for function, names in listed.items():
        parameters = inspect.signature(function).parameters
        assert set(names) == set(parameters) & set(NAMES), function
        assert all(re.search(rf"\n +{name}: ", function.__doc__ or "") for name in names), function


def test_the_worked_example_of_an_option_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    names = example("WithTemperature")
    base = namedtuple("Softmax", (*Softmax._fields, "temperature"), defaults=(1, None, None, (), None, None))
    methods = {"options": Softmax.options, "refuse_options": Softmax.refuse_options, "shift": Softmax.shift}
    monkeypatch.setattr(attention, "Softmax", type("Softmax", (base,), methods))
    monkeypatch.setattr(attention, "OPTIONAL", (*attention.OPTIONAL, "temperature"))
    q = torch.randn(1, 11, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def body(ring: Ring) -> torch.Tensor:
        seq = ring.sequence(11)
        options = names["WithTemperature"](causal=True, temperature=2.0)
        x = seq.shard(q)
        return seq.gather(attention.attend(ring, x, x, x, seq, None, options)[0])

    reference, _ = dense_attention(q, q, q, causal=True, scale=0.25)
    for out in run_ranks(2, body, engine=names["EngineWithTemperature"]()):
        torch.testing.assert_close(out, reference, rtol=1e-10, atol=1e-10)
    with pytest.raises(InputError, match="temperature must be positive and finite"):
        names["WithTemperature"](temperature=0.0)


def test_nothing_else_lists_the_options_of_the_softmax() -> None:
    """Few files name an option of the softmax: its declaration, and the code that computes or passes it.

    `softcap` and `alibi_slopes` stand for all options. Apart from engines, kernels, adapters, commands and benchmarks,
    only four files may name them. Two of the adapters do not name `softcap`, and the operator's schema has every
    option.
    """
    computing = ("engine/", "adapters/", "kernels/", "launch/", "bench/")
    for name in ("softcap", "alibi_slopes"):
        files = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if _names(path, name)]
        others = [path for path in files if not path.startswith(computing)]
        assert set(others) <= {"options.py", "attention.py", "dilated.py", "testing.py"}, name
    assert not any(_names(PACKAGE / "adapters" / file, "softcap") for file in ("attend.py", "torch_ops.py"))
    assert all(name in SCHEMA for name in NAMES)


def _names(path: Path, name: str) -> bool:
    """Return whether the code of this file, without its docstrings, names the option."""
    return (
        re.search(rf"\b{name}\b", re.sub(r'""".*?"""', "", path.read_text(encoding="utf-8"), flags=re.DOTALL))
        is not None
    )
