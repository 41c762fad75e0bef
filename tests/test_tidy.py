"""House rules as tests; each failure says what to use instead."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
CLOCK = "take a Clock (kvcm.core.clock) as an argument"

# Dotted name → replacement. A mention counts as much as a call: `clock=time.time` is one too.
BANNED_IN_PRODUCT = {
    "time.time": f"{CLOCK} and use now()",
    "time.time_ns": f"{CLOCK} and use now()",
    "time.monotonic": f"{CLOCK} and use monotonic()",
    "time.monotonic_ns": f"{CLOCK} and use monotonic()",
    "time.sleep": f"{CLOCK} and await sleep()",
    "datetime.datetime.now": f"{CLOCK} and use now()",
    "datetime.datetime.utcnow": f"{CLOCK} and use now()",
    "datetime.datetime.today": f"{CLOCK} and use now()",
    "datetime.date.today": f"{CLOCK} and use now()",
    "os.urandom": f"{CLOCK} and use random_bytes()",
    "uuid.uuid1": f"{CLOCK} and use random_bytes()",
    "uuid.uuid4": f"{CLOCK} and use random_bytes()",
    "secrets": f"{CLOCK} and use random_bytes()",
    "random": f"{CLOCK} and use random_bytes(), or random.Random(seed)",
}
PICKLE_LIKE = "msgspec or an explicit format: loading it runs whatever the bytes say"
BANNED_EVERYWHERE = dict.fromkeys(
    ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"), PICKLE_LIKE
)
BANNED_IN_TESTS = {"time.sleep": "await eventually(...) (kvcm.testing.eventually)"}

# The one place that may, and the test helpers that wait in real time.
MAY_READ_THE_CLOCK = {"kvcm/core/clock.py", "kvcm/testing/eventually.py"}


def sources(*folders: str) -> list[Path]:
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "_pb" not in path.parts
    ]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_names(tree: ast.AST) -> dict[str, str]:
    """Local name → the dotted name that it stands for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, names)
        return f"{base}.{node.attr}" if base else ""
    return ""


def seeded_generators(tree: ast.AST, names: dict[str, str]) -> set[ast.AST]:
    """Nodes that name random.Random as a type, or call it with a seed."""
    fine: set[ast.AST] = set()
    bare: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and not (node.args or node.keywords):
            bare.add(node.func)
        if dotted(node, names) == "random.Random":
            fine.add(node)
    return fine - bare


def violations(source: str, banned: dict[str, str]) -> Iterator[tuple[int, str, str]]:
    """(line, name, replacement) of every mention of a banned name, or of something below it."""
    tree = ast.parse(source)
    names = imported_names(tree)
    fine = seeded_generators(tree, names)
    inner = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if node in fine or (node in inner and dotted(node, names) not in banned):
            continue
        if node in inner and isinstance(node, ast.Name):
            continue
        full = dotted(node, names)
        for name, replacement in banned.items():
            if full == name or full.startswith(f"{name}."):
                yield getattr(node, "lineno", 0), full, replacement


def complaints(paths: list[Path], banned: dict[str, str]) -> list[str]:
    return [
        f"{name_of(path)}:{line}: {name} is banned; {replacement}"
        for path in paths
        for line, name, replacement in violations(path.read_text(), banned)
    ]


def test_only_the_clock_reads_time_and_chance() -> None:
    paths = [path for path in sources("kvcm") if name_of(path) not in MAY_READ_THE_CLOCK]
    assert paths
    assert complaints(paths, BANNED_IN_PRODUCT) == []


def test_nothing_pickles() -> None:
    found = []
    for path in sources("kvcm", "tests", "tools", "benchmarks", "migrations"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            found += [
                f"{name_of(path)}:{node.lineno}: {module} is banned; {BANNED_EVERYWHERE[module]}"
                for module in modules
                if module in BANNED_EVERYWHERE
            ]
    assert found == []


def test_tests_wait_for_claims_not_for_time() -> None:
    assert complaints(sources("tests"), BANNED_IN_TESTS) == []


def swallowed(source: str) -> list[int]:
    """Lines of handlers that catch everything and do nothing."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        broad = any(
            item is None
            or (isinstance(item, ast.Name) and item.id in ("Exception", "BaseException"))
            for item in caught
        )
        silent = all(
            isinstance(step, ast.Pass | ast.Continue)
            or (isinstance(step, ast.Expr) and isinstance(step.value, ast.Constant))
            for step in node.body
        )
        if broad and silent:
            lines.append(node.lineno)
    return lines


def test_no_error_is_swallowed_unseen() -> None:
    found = [
        f"{name_of(path)}:{line}: catch the error you expect, or log what you caught"
        for path in sources("kvcm", "tools", "benchmarks", "migrations")
        for line in swallowed(path.read_text())
    ]
    assert found == []


def test_only_the_command_line_prints() -> None:
    found = [
        f"{name_of(path)}:{node.lineno}: print is for kvcm/cli; use logging"
        for path in sources("kvcm")
        if not name_of(path).startswith("kvcm/cli/")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import time\ntime.time()", ["time.time"]),
        ("import time as t\nt.monotonic()", ["time.monotonic"]),
        ("from time import time\ntime()", ["time.time"]),
        ("import time\nfield(default=time.time)", ["time.time"]),
        ("import time\ntime.perf_counter()", []),
        ("from datetime import datetime as dt\ndt.now().year", ["datetime.datetime.now"]),
        ("import datetime\ndatetime.datetime.now()", ["datetime.datetime.now"]),
        ("import random\nrandom.random()", ["random.random"]),
        ("from random import choice\nchoice([1])", ["random.choice"]),
        ("import random\nrandom.Random()", ["random.Random"]),
        ("import random\nx: random.Random = random.Random(7)", []),
        ("from random import Random\nRandom(seed=7)", []),
        ("import secrets\nsecrets.token_hex()", ["secrets.token_hex"]),
        ("import uuid\nuuid.UUID(bytes=b)", []),
        ("from uuid import uuid4\nuuid4()", ["uuid.uuid4"]),
        ("self.time.time()\nrandom = 5\nprint(random)", []),
    ],
)
def test_the_rule_on_time_and_chance_can_fail(source: str, names: list[str]) -> None:
    assert [name for _, name, _ in violations(source, BANNED_IN_PRODUCT)] == names


@pytest.mark.parametrize(
    ("handler", "caught"),
    [
        ("except Exception:\n    pass", True),
        ("except:\n    ...", True),
        ("except (ValueError, BaseException):\n    'why'", True),
        ("except ValueError:\n    pass", False),
        ("except Exception:\n    log()", False),
    ],
)
def test_the_rule_on_swallowed_errors_can_fail(handler: str, caught: bool) -> None:
    assert bool(swallowed(f"try:\n    f()\n{handler}")) is caught


# -- dependencies ----------------------------------------------------------------------


def locked() -> dict[str, str]:
    pins: dict[str, str] = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        # A host, path or option in the lock would tie an install to the place that made it.
        match = re.fullmatch(r"([a-z0-9][a-z0-9-]*)==((?:[0-9]+!)?[0-9][0-9a-z.]*)", line)
        assert match, f"requirements.lock: {line!r} is not an exact pin"
        pins[match[1]] = match[2]
    return pins


def test_the_lock_pins_everything_that_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = locked()
    for text in [*project["dependencies"], *extras["server"], *extras["dev"]]:
        wanted = Requirement(text)
        pin = pins.get(canonicalize_name(wanted.name))
        assert pin is not None, f"requirements.lock lacks {wanted.name}; run `make lock`"
        assert wanted.specifier.contains(pin), f"{wanted} is locked at {pin}; run `make lock`"
