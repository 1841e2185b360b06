"""The parts of the reference that Sphinx generates from the code when `make docs` runs.

A line `<!-- generated: NAME -->` of a page is replaced by what the function of that name in `GENERATED` returns.
"""

from __future__ import annotations

import io
import json
import re
import textwrap
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ringattn.errors
from ringattn.cli import COMMANDS
from ringattn.launch.measure.points import RECORD_KEYS
from ringattn.launch.options import groups, leaves, presets_of
from ringattn.options import AttentionOptions

DOCS = Path(__file__).parent
PLACE = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
UNUSUAL = 2**32 - 1
"""Limits from here on only keep sizes inside the range of a number, so they are not listed."""
BARE = re.compile(r"([|<>*_\[\]])")


def command_keys() -> str:
    """Return a section for each command: its purpose, and its keys with defaults and meanings."""
    return "\n\n".join(f"## ringattn {command}\n\n{_section(command)}" for command in COMMANDS)


def _section(command: str) -> str:
    """Return the Markdown of what `ringattn COMMAND --help` prints."""
    module = import_module(f"ringattn.launch.{COMMANDS[command][0]}")
    calls: list[tuple[Any, ...]] = []

    def recorded(*arguments: Any) -> str:
        calls.append(arguments)
        return ""

    printed = io.StringIO()
    with redirect_stdout(printed):
        if hasattr(module, "help_text"):
            with patch.object(module, "help_text", recorded):
                module.main(["--help"])
        else:
            module.main(["--help"])
    if not calls:
        return f"```text\n{printed.getvalue().strip()}\n```"
    ((_, purpose, *schemas),) = calls
    summary, _, details = purpose.strip().partition("\n\n")
    parts = [escaped(" ".join(summary.split()))]
    if details:
        parts.append(f"```text\n{textwrap.dedent(details)}\n```")
    return "\n\n".join([*parts, *(_keys_of(schema) for schema in schemas)])


def _keys_of(schema: type) -> str:
    """Return the table of the keys of one options dataclass, and its presets."""
    rows = []
    for key, value, described in leaves(schema()):
        choices = described.metadata.get("choices")
        meaning = escaped(described.metadata["about"]) + (f"; one of {code(*choices)}" if choices else "")
        default = "" if value in (None, "") else code(str(value).replace("\n", r"\n"))
        rows.append((code(key), default, meaning, _limits(described.metadata)))
    presets = {group: presets_of(group) for group in groups(schema)}
    lists = [f"Presets: {code(*(f'{group}={name}' for name in names))}." for group, names in presets.items() if names]
    return "\n\n".join([table(("key", "default", "meaning", "limits"), rows), *lists])


def _limits(metadata: Any) -> str:
    """Return the limits of a number as text."""
    phrases = {"least": "at least", "most": "at most", "above": "more than"}
    limits = {text: metadata[name] for name, text in phrases.items() if name in metadata}
    return ", ".join(f"{text} {limit:,}" for text, limit in limits.items() if limit < UNUSUAL)


def record_keys() -> str:
    """Return the table of the keys of a record in points.jsonl."""
    return table(("key", "meaning"), [(code(key), escaped(meaning)) for key, meaning in RECORD_KEYS.items()])


def attention_options() -> str:
    """Return the table of the options of an attention call."""
    rows = [
        (code(option.name), code(str(option.default)), escaped(option.metadata["help"]))
        for option in fields(AttentionOptions)
    ]
    return table(("option", "default", "meaning"), rows)


FILTER = """```{raw} html
<input class="table-filter" type="search" placeholder="Filter the classes" aria-label="Filter the classes">
<script>
document.querySelector(".table-filter").addEventListener("input", (event) => {
  const text = event.target.value.toLowerCase();
  const table = event.target.parentElement.querySelector("table.filtered");
  for (const row of table.tBodies[0].rows) row.hidden = !row.textContent.toLowerCase().includes(text);
});
</script>
```"""


def models() -> str:
    """Return a table of all model classes of transformers that were tried, with a field that filters it."""
    results = json.loads((DOCS / "transformers-models.json").read_text(encoding="utf-8"))
    rows = [(code(name), result["verdict"], escaped(result["reason"])) for name, result in results["classes"].items()]
    listed = table(("class", "result", "message"), rows)
    return f"## All classes\n\n{FILTER}\n\n:::{{table}}\n:class: filtered\n\n{listed}\n:::"


def decisions() -> str:
    """Return the table of contents of the decision records."""
    return "```{toctree}\n:maxdepth: 1\n:glob:\n0*\n```"


def measured_tables() -> str:
    """Return the table of contents of the tables that the benchmarks wrote."""
    return "```{toctree}\n:maxdepth: 1\n:glob:\n../bench/results/cpu/*\n../bench/results/gpu/*\n```"


def errors() -> str:
    """Return the directives for every error of the package, base classes first."""
    names = (name for name, error in vars(ringattn.errors).items() if isinstance(error, type))
    lines = (
        f".. autoexception:: ringattn.errors.{name}\n   :show-inheritance:\n"
        for name in names
        if name.endswith("Error")
    )
    return "```{eval-rst}\n" + "\n".join(lines) + "```"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def code(*names: str) -> str:
    """Return names as code, separated by commas."""
    return ", ".join(f"`{name}`".replace("|", r"\|") for name in names)


def escaped(text: str) -> str:
    """Return plain text as Markdown. Text between backquotes stays code."""
    parts = text.split("`")
    return "`".join(part if index % 2 else BARE.sub(r"\\\1", part) for index, part in enumerate(parts))


GENERATED: dict[str, Callable[[], str]] = {
    "command_keys": command_keys,
    "record_keys": record_keys,
    "attention_options": attention_options,
    "errors": errors,
    "models": models,
    "decisions": decisions,
    "measured_tables": measured_tables,
}


def fill_in(app: Any, docname: str, source: list[str]) -> None:
    """Replace the marked lines of a page by generated Markdown."""
    source[0] = PLACE.sub(lambda match: GENERATED[match[1]](), source[0])


def prepare_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn a docstring into reStructuredText: the code of `Example:` becomes a code block, and bars are escaped."""
    in_example = False
    result: list[str] = []
    for line in lines:
        if line.strip() == "Example:":
            in_example = True
            indent = line[: len(line) - len(line.lstrip())]
            result += [f"{indent}.. rubric:: Example", "", f"{indent}.. code-block:: python", ""]
            continue
        if in_example and line and not line.startswith(indent + " "):
            in_example = False
        result.append(line if in_example else line.replace("|", r"\|"))
    lines[:] = result


def setup(app: Any) -> dict[str, bool]:
    """Connect the functions above with Sphinx."""
    app.connect("source-read", fill_in)
    app.connect("autodoc-process-docstring", prepare_docstring, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
