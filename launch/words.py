"""Words of a command line that are no `key=value`: what to write instead, for those who know argparse, Hydra, torchrun.

Guarantees: nothing is guessed; a word that means nothing here is refused, with the words that do what it would.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ringattn.errors import InputError
from ringattn.launch.lengths import WORD

PLAIN = "write options as key=value; --help lists the keys"
HYDRA = ("--cfg", "-c", "--info", "-i", "--config-name", "-cn", "--config-dir", "-cd", "--config-path", "-cp",
         "--hydra-help", "--package", "-p", "--resolve", "--run", "-r", "--experimental-rerun")  # fmt: skip
MULTIRUN = ("--multirun", "-m")
TORCHRUN = {"nproc-per-node": "ranks", "np": "ranks", "nproc": "ranks", "nnodes": "nnodes", "node-rank": "node_rank",
            "rdzv-endpoint": "rdzv_endpoint"}  # fmt: skip
"""Flags of torchrun and mpirun, without dashes before them, as keys of `ringattn run`."""
INSTEAD = {
    "--version": "`ringattn --version` says it",
    "--dry-run": "`ringattn run` and `ringattn sweep` have it, this command has not",
    **dict.fromkeys(HYDRA, "of all commands `ringattn run` takes Hydra's flags; here --help lists keys and defaults"),
    **dict.fromkeys(MULTIRUN, "of all commands `ringattn run` takes it; `ringattn sweep` measures every combination of "
                              "key=1,2 without it"),
}  # fmt: skip


def no_option(words: Sequence[str], at: int, known: Collection[str], otherwise: str = PLAIN) -> InputError:
    """The error for the word `at` this place, which is no `key=value`; `known`: the command's keys and groups.

    `otherwise`: what is said where nothing is known to be meant.
    """
    word, after = words[at], words[at + 1] if at + 1 < len(words) else ""
    name, equals, value = word.partition("=")
    if word.startswith("-"):
        if told := INSTEAD.get(name):
            return InputError(f"{word}: {told}")
        key = name.lstrip("-").replace("_", "-")
        key = TORCHRUN.get(key, key.replace("-", "_"))
        follows = not equals and bool(after) and not after.startswith("-") and WORD.fullmatch(after) is None
        if key in _last_parts(known):
            given = f"{word} {after}" if follows else word
            return InputError(f"{given}: write {key}={value if equals else after if follows else 'VALUE'}")
        return InputError(f"{word}: {otherwise}")
    before = words[at - 1] if at else ""
    if before.endswith("=") and WORD.fullmatch(before):
        return InputError(f"{before} {word}: write {before}{word}, without a space")
    if after.startswith("="):
        value = after[1:] or "".join(words[at + 2 : at + 3])
        return InputError(f"{' '.join(words[at : at + 3])}: write {word}={value}, without spaces")
    if after and (key := word.rstrip(":")) in _last_parts(known) and WORD.fullmatch(after) is None:
        return InputError(f"{word} {after}: write {key}={after}")
    return InputError(f"{word}: {otherwise}")


def _last_parts(known: Collection[str]) -> set[str]:
    """The keys, and those of groups without the group, as `spelled` takes them."""
    return {*known, *(key.rpartition(".")[2] for key in known)}


def given_twice(words: Sequence[str]) -> Iterator[str]:
    """Of each key that is given more than once, which value counts: `tokens is given twice: tokens=2k counts`."""
    last = _last_of_each(words)
    keys = [match[2] for word in words if (match := WORD.fullmatch(word))]
    for key in last:
        if (count := keys.count(key)) > 1:
            yield f"{key} is given {'twice' if count == 2 else f'{count} times'}: {last[key]} counts"


def that_count(words: Sequence[str]) -> list[str]:
    """The words `key=value` without those that a later one of the same key replaces."""
    return list(_last_of_each(words).values())


def _last_of_each(words: Sequence[str]) -> dict[str, str]:
    return {match[2]: word for word in words if (match := WORD.fullmatch(word))}
