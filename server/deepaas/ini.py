"""Ini: the configuration files of `deepaas-run`, in the format of oslo.config. Read by command.py.

Source: oslo.config 9, iniparser.py and cfg.py: the syntax, the places of files, the substitution of `$name`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from penstock.server.settings import SettingError

SECTION = "DEFAULT"
"""The only section that is read."""
_REFERENCE = re.compile(r"\\\$|\$\$|\$([_a-z][._a-z0-9]*)|\$\{([_a-z][._a-z0-9]*)\}", re.IGNORECASE)


def read_ini(path: Path) -> dict[str, str]:
    """Return the options of a file's section DEFAULT, by their names as spelled there; the last one counts.

    Raises: SettingError, with the place.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise SettingError(f"Failed to parse {path}: is not UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise SettingError(f"Failed to read {path}: {error.strerror}") from None
    found: dict[str, str] = {}
    section = name = ""
    for at, line in enumerate(lines, 1):
        text = line.rstrip()
        try:
            if not text:
                name = ""  # ends a value of several lines
            elif text[0] in " \t":
                name = _read_continuation(found, section, name, text)
            elif text[0] == "[":
                section, name = _read_section(text), ""
            elif text[0] in "#;":
                name = ""
            else:
                name = _read_assignment(found, section, text)
        except SettingError as error:
            raise SettingError(f"Failed to parse {path}: at {path}:{at}, {error}: {text!r}") from None
    return found


def _read_section(text: str) -> str:
    if not text.endswith("]"):
        raise SettingError("Invalid section (must end with ])")
    if text == "[]":
        raise SettingError("Empty section name")
    return text[1:-1]


def _read_assignment(found: dict[str, str], section: str, text: str) -> str:
    cut = re.search("[:=]", text)
    if cut is None:
        raise SettingError("No ':' or '=' found in assignment")
    name, value = text[: cut.start()].strip(), text[cut.end() :].strip()
    if not name:
        raise SettingError("Key cannot be empty")
    if not section:
        raise SettingError("Section must be started before assignment")
    if value[:1] in ("'", '"') and value[0] == value[-1]:
        value = value[1:-1]
    if section == SECTION:
        found[name] = value
    return name


def _read_continuation(found: dict[str, str], section: str, name: str, text: str) -> str:
    if not name:
        raise SettingError("Unexpected continuation line")
    if section == SECTION:
        found[name] += "\n" + text.lstrip()
    return name


def default_files(environ: Mapping[str, str], program: str) -> list[Path]:
    """List the files that are read if the command line names none: at most two."""
    return list(_find_first(environ, ("deepaas.conf", f"{program}.conf")))


def default_folders(environ: Mapping[str, str], program: str) -> list[Path]:
    """List the folders that are read if the command line names none: at most two."""
    return list(_find_first(environ, ("deepaas.conf.d", f"{program}.conf.d")))


def _find_first(environ: Mapping[str, str], names: tuple[str, ...]) -> Iterator[Path]:
    home = Path(environ.get("HOME") or os.path.expanduser("~"))  # noqa: PTH111 - without a home, "~" unchanged
    folders = [home / ".deepaas", home, Path("/etc/deepaas"), Path("/etc")]
    folders += [Path(environ[snap], "etc", "deepaas") for snap in ("SNAP_COMMON", "SNAP") if environ.get(snap)]
    for name in names:
        yield from [folder / name for folder in folders if (folder / name).exists()][:1]


def files_in(folder: Path) -> list[Path]:
    """List the files of a folder that are read, in order. Raises: SettingError if there is no such folder."""
    if not folder.exists():
        raise SettingError(f"Failed to read config file directory: {folder}")
    return sorted(folder.glob("*.conf"))


def substitute(text: str, value_of: Callable[[str], str]) -> str:
    r"""Replace `$name` and `${name}` by values; `$$`, `\$` and any other `$` are a dollar."""

    def replacement(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        return value_of(name) if name else "$"

    return _REFERENCE.sub(replacement, text)
