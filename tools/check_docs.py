"""Do the documents say what the code does? Run by `make drift`; prints what is wrong.

Checked: links and file names, settings and their defaults, `kvcm …` and `make …` command lines, the
error table, the settings page, and that every command has a help text.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gen_config_docs
import typer

from kvcm.cli.main import COMMANDS, _load, build_app
from kvcm.core.errors import WIRE_CODES
from kvcm.server.settings import ENV_PREFIX, Settings, known_keys

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
)

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FILE = re.compile(r"`((?:api|benchmarks|docs|kvcm|migrations|tests|tools)/[\w./-]*\w)`")
_SETTING = re.compile(r"`((?:cache|rocksdb)\.\w+)(?: = \w+)?`(?: \((\d+) (s|h|MiB)\))?")
_VARIABLE = re.compile(r"\bKVCM_[A-Z_]+\b(?!…)")
_ADDRESS = re.compile(r"^(meta|admin) (gRPC|HTTP) +\S*:(\d+)$", re.MULTILINE)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:\.venv/bin/)?(?:kvcm|make) [^`]+)`")
_UNITS = {"s": 1, "h": 3600, "MiB": 1 << 20}
_NO_SETTINGS = {"KVCM_CONFIG"}
_NO_COMMANDS = {"kvcm is ready", "kvcm waits for its index store"}


class Complaint(NamedTuple):
    """What is wrong, and on which page."""

    page: Path
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text}"


def _targets(page: Path, text: str) -> Iterator[Complaint]:
    for match in _LINK.finditer(_FENCE.sub("", text)):
        target = match[1].partition("#")[0]
        if target and "://" not in target and not (page.parent / target).exists():
            yield Complaint(page, f"link to {match[1]}, which is not there")
    for match in _FILE.finditer(text):
        if not (ROOT / match[1]).exists():
            yield Complaint(page, f"names {match[1]}, which is not there")


def _default(key: str) -> Any:
    value: Any = Settings()
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _settings(page: Path, text: str) -> Iterator[Complaint]:
    known = set(known_keys())
    for match in _SETTING.finditer(text):
        key, number, unit = match.groups()
        if key not in known:
            yield Complaint(page, f"names the setting {key}, which there is not")
        elif number and int(number) * _UNITS[unit] != _default(key):
            yield Complaint(page, f"says {number} {unit} of {key}; its default is {_default(key)}")
    variables = {ENV_PREFIX + key.replace(".", "__").upper() for key in known} | _NO_SETTINGS
    for match in _VARIABLE.finditer(text):
        if match[0] not in variables:
            yield Complaint(page, f"names the variable {match[0]}, which there is not")
    names = {("meta", "gRPC"): "rpc_port", ("meta", "HTTP"): "http_port"}
    names |= {("admin", "gRPC"): "admin_rpc_port", ("admin", "HTTP"): "admin_http_port"}
    for match in _ADDRESS.finditer(text):
        if int(match[3]) != _default(names[match[1], match[2]]):
            yield Complaint(page, f"shows another default port: {match[0]}")


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """Command lines on a page, and whether they are whole (in a block) or just mentioned."""
    for language, body in _FENCE.findall(text):
        if language in ("", "sh"):
            for line in body.splitlines():
                yield line.strip(), True
    for match in _INLINE.finditer(_FENCE.sub("", text)):
        yield match[1], False


def _commands(page: Path, text: str, app: Any) -> Iterator[Complaint]:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line, is_whole in _lines(text):
        line = line.removeprefix(".venv/bin/")
        if not line.startswith(("kvcm ", "make ")) or "…" in line:
            continue
        if line in _NO_COMMANDS:
            continue
        words = shlex.split(line, comments=True)
        if words[0] == "kvcm":
            if problem := _unparsed(app, words[1:], is_whole):
                yield Complaint(page, f"`{line}`: {problem}")
        elif len(words) > 1 and words[1] not in targets:
            yield Complaint(page, f"`{line}`: the Makefile has no such target")


def _unparsed(command: Any, words: list[str], is_whole: bool) -> str:
    """Why a command line does not parse; empty when it does. Nothing is run."""
    path = "kvcm"
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name = words[0]
        if name not in command.commands:
            return f"{path} has no command {name}"
        path, words = f"{path} {name}", words[1:]
        command = _load(name, COMMANDS[name]) if path == f"kvcm {name}" else command.commands[name]
    options = {option for parameter in command.params for option in parameter.opts}
    options |= {option for parameter in command.params for option in parameter.secondary_opts}
    for word in words:
        if word.startswith("-") and word.partition("=")[0] not in options | {"--help"}:
            return f"{path} has no option {word}"
    if hasattr(command, "commands") or not is_whole or "--help" in words:
        return ""
    try:
        command.make_context(path, list(words))
    except Exception as error:
        # Whatever the parser objects to is the complaint.
        return str(error) or type(error).__name__
    return ""


def _helps(command: Any, path: str, page: Path) -> Iterator[Complaint]:
    said = command.help or ""
    if not said.strip():
        yield Complaint(page, f"`{path} --help` says nothing")
    examples = re.findall(r"^Example: (kvcm .*)$", said, re.MULTILINE)
    if path.startswith("kvcm admin ") and not hasattr(command, "commands") and not examples:
        yield Complaint(page, f"`{path} --help` gives no example")
    for example in examples:
        words = shlex.split(example)
        if problem := _unparsed(command, words[len(path.split()) :], is_whole=True):
            yield Complaint(page, f"`{path} --help`: its example: {problem}")
    for name, child in getattr(command, "commands", {}).items():
        real = _load(name, COMMANDS[name]) if path == "kvcm" else child
        yield from _helps(real, f"{path} {name}", page)


def _errors(page: Path) -> Iterator[Complaint]:
    row = re.compile(r"^\| ([A-Z]\w+) \| ([A-Z_]+) \| ?([A-Z_]*) ?\|$", re.MULTILINE)
    said = {name: (code, reason) for name, code, reason in row.findall(page.read_text("utf-8"))}
    real = {
        kind.__name__: (code.name, kind.default_reason if "default_reason" in vars(kind) else "")
        for kind, code in WIRE_CODES.items()
    }
    for name in sorted(said.keys() | real.keys()):
        if said.get(name) != real.get(name):
            yield Complaint(page, f"error table: {name} is {real.get(name)}, not {said.get(name)}")


def complaints() -> list[Complaint]:
    """Everything that is wrong."""
    app = typer.main.get_group(build_app())
    found = [*_helps(app, "kvcm", ROOT / "README.md"), *_errors(ROOT / "docs" / "protocol.md")]
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found += [*_targets(page, text), *_settings(page, text), *_commands(page, text, app)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        is_stale = gen_config_docs.main(["--check"])
    if is_stale:
        found.append(Complaint(gen_config_docs.PAGE, said.getvalue().strip()))
    return found


def main() -> int:
    """The exit code."""
    found = complaints()
    for complaint in found:
        print(complaint)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
