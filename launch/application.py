"""A command as a Hydra application: its flags, `hydra.*`, `+`, `++`, `~`, configs of one's own, sweepers and launchers.

Guarantees: what Hydra makes of the words is checked against the schema of the command, so a key that it does not have
is refused wherever it comes from; Hydra's errors and those of the task are raised, not printed, but for wrong flags.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ringattn.errors import InputError
from ringattn.launch.config import check_key, keys_of, parse, registered, wrong_value
from ringattn.launch.options import CONF, check_limits, groups, leaves
from ringattn.launch.spelling import no_such_key, spelled
from ringattn.launch.words import no_option

if TYPE_CHECKING:  # see `config`
    from omegaconf import DictConfig

T = TypeVar("T")

VALUED = ("--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd",
          "--experimental-rerun", "--cfg", "-c", "--info", "-i")  # fmt: skip
"""Flags of Hydra's whose value may be the next word."""
MODES = ("--run", "-r", "--multirun", "-m", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc")
FLAGS = (*VALUED, *MODES, "--resolve", "--hydra-help", "--version")
OWN_CONFIGS = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
NO_FLAG = "no such flag; write options as key=value, --hydra-help lists Hydra's flags"
SIGNS = "+~"
PLUGINS = {"submitit": "'ringattn[slurm]'", "joblib": "hydra-joblib-launcher", "optuna": "hydra-optuna-sweeper"}
"""What brings the launchers and sweepers whose names begin so."""
FULL_ERROR = "HYDRA_FULL_ERROR"
"""Set to 1, Hydra raises what went wrong instead of printing it."""


def is_for_hydra(words: Sequence[str]) -> bool:
    """Whether one of the words is a flag, or one that only Hydra's own application gives a meaning."""
    return any(word.startswith(("-", *SIGNS, "hydra.", "hydra/")) for word in words)


def run_application(words: Sequence[str], schema: Any, name: str, task: Callable[[DictConfig], Any]) -> None:
    """Hydra's main over `words`, with `conf/<name>.yaml` and the dataclass `schema`: calls `task`, or prints.

    `task`, a function of a module, gets what was composed; `composed_as` makes an instance of the schema of it. Raises
    `InputError` for words, keys and values that Hydra or the schema refuses, `SystemExit` for wrong flags, and what
    `task` raises.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    flags, overrides = _divided(words, keys_of(schema))
    overrides = spelled(overrides, schema)
    own = any(flag.partition("=")[0] in OWN_CONFIGS for flag in flags)
    if not own and not any(word.startswith("hydra.searchpath=") for word in overrides):
        for one in parse(
            overrides, keys_of(schema)
        ):  # one's own configs may have groups and presets that only Hydra finds
            if not one.is_hydra_override() and not one.is_add() and not one.is_delete():
                check_key(one, schema, several=True)
    asked, full = sys.argv, os.environ.get(FULL_ERROR)
    sys.argv, os.environ[FULL_ERROR] = [asked[0], *flags, *overrides], "1"
    try:
        with registered(schema):
            hydra.main(config_path=f"pkg://{CONF}", config_name=name, version_base="1.3")(task)()
    except (HydraException, OmegaConfBaseException) as error:
        if full == "1":
            raise
        raise InputError(_told(error)) from error
    finally:
        sys.argv = asked
        del os.environ[FULL_ERROR]
        if full is not None:
            os.environ[FULL_ERROR] = full


def composed_as(schema: type[T], composed: DictConfig) -> T:
    """What Hydra composed as an instance of `schema`. Raises `InputError`, with the key first."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    known = [leaf for leaf, _, _ in leaves(schema())]
    for key in _keys(OmegaConf.to_container(composed)):
        if key not in known and key not in groups(schema):
            raise no_such_key(key, known)
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), composed))
    except OmegaConfBaseException as error:
        raise InputError(_told(error)) from error
    assert isinstance(config, schema)
    check_limits(config)
    return config


def _keys(content: Any, prefix: str = "") -> Iterator[str]:
    """The dotted keys of nested dicts."""
    for key, value in content.items():
        yield from _keys(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]


def _divided(words: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """The flags with their values, and the overrides. Raises `InputError` for a flag that Hydra does not have."""
    flags: list[str] = []
    overrides: list[str] = []
    value = False
    for at, word in enumerate(words):
        if word.startswith("-"):
            flag, equals, _ = word.partition("=")
            if flag not in FLAGS:
                raise no_option(words, at, known, NO_FLAG)
            if equals and flag not in VALUED:
                raise InputError(f"{word}: {flag} takes no value; leave {word[len(flag) :]} out")
            flags.append(word)
        elif value and "=" not in word:
            flags.append(word)
        else:
            overrides.append(word)
        value = word in VALUED
    modes = [word for word in flags if word.partition("=")[0] in MODES]
    if len(modes) > 1:
        raise InputError(f"{modes[1]}: does not go with {modes[0]}; give one of them")
    return flags, overrides


def _told(error: BaseException) -> str:
    """Hydra's message, with what it was raised from, and what to install for a plugin that is not there."""
    from omegaconf.errors import OmegaConfBaseException

    text = str(error)
    if isinstance(error, OmegaConfBaseException):
        return wrong_value(error)
    if isinstance(error.__cause__, OmegaConfBaseException):
        return wrong_value(error.__cause__)
    for start, brings in PLUGINS.items():
        if f"'hydra/launcher/{start}" in text or f"'hydra/sweeper/{start}" in text:
            text += f"\nit comes with: pip install {brings}"
    return text
