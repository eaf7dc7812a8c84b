"""The documentation site builds without warnings, and its reference has every public name."""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from playwright.sync_api import expect

from tests.page.browsing import chromium
from tests.test_layers import LEVELS
from varuna.cli import launch, main
from varuna.environment import VarunaEnvironment, variable_name
from varuna.lightning.registry import STRATEGIES

ROOT = Path(__file__).parents[2]
PUBLIC = ("varuna", "varuna.hf", "pyrannc")
IMPORT = re.compile(r"^from ((?:varuna|pyrannc)[\w.]*) import ([\w, ]+)", re.MULTILINE)


class PageText(HTMLParser):
    """The text of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.feed(page.read_text())

    def handle_data(self, data: str) -> None:
        self.parts.append(data)

    def __str__(self) -> str:
        return "".join(self.parts)


@pytest.mark.parametrize("role", ["func", "meth", "attr", "exc", "mod", "data", "class"])
@pytest.mark.parametrize("target", ["varuna.Nothing", "varuna.hf.Nothing", "pyrannc.Nothing"])
def test_a_reference_to_a_public_name_that_does_not_exist_is_an_error(role: str, target: str) -> None:
    settings: dict[str, Any] = {"__file__": str(ROOT / "docs" / "conf.py")}
    before = list(sys.path)
    try:
        exec((ROOT / "docs" / "conf.py").read_text(), settings)
    finally:
        sys.path[:] = before
    for kind, name in settings["nitpick_ignore_regex"]:
        assert not (re.fullmatch(kind, f"py:{role}") and re.fullmatch(name, target))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as by `make docs`: a warning is an error."""
    (command,) = re.findall(r"^\t\$\(PY\) (-m sphinx .*) build/docs$", (ROOT / "Makefile").read_text(), re.M)
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, *command.split(), "-d", str(folder / "doctrees"), str(folder / "html")]
    run = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return folder / "html"


@pytest.fixture(scope="module")
def described(site: Path) -> set[str]:
    """The Python names with a description."""
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    lines = zlib.decompress(inventory).decode().splitlines()
    return {line.split()[0] for line in lines if " py:" in line}


def test_every_public_name_is_described(described: set[str]) -> None:
    """SEE-5: names in `__all__`, their methods, and what a page imports."""
    wanted = {name for module in PUBLIC for name in public_names(module)}
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for module, names in IMPORT.findall(page.read_text()):
            wanted |= {f"{module}.{name.split()[0]}" for name in names.split(",") if name.strip()}
    assert len(wanted) > 80
    assert wanted - described == set(), "describe these in docs/api-tools.md, or make them private"


def public_names(module: str) -> Iterator[str]:
    for name in import_module(module).__all__:
        found = getattr(import_module(module), name)
        yield f"{module}.{name}"
        for member, value in vars(found).items() if inspect.isclass(found) else ():
            is_new = not any(hasattr(base, member) for base in found.__mro__[1:])
            if is_new and not member.startswith("_") and isinstance(value, property | type(public_names)):
                yield f"{module}.{name}.{member}"


def test_every_lightning_strategy_is_described(site: Path) -> None:
    text = str(PageText(site / "api-lightning.html"))
    assert [name for name in STRATEGIES if name not in text] == []


def test_every_command_and_flag_is_described(site: Path) -> None:
    """SEE-5"""
    text = str(PageText(site / "commands.html"))
    wanted = [
        *flags(typer.main.get_command(main.app), "varuna"),
        *flags(typer.main.get_command(launch.app), "python -m varuna.launcher"),
    ]
    assert len(wanted) > 100
    for command, flag in wanted:
        _, found, section = text.partition(f"\n{command} [OPTIONS]")
        assert found, f"no section for {command}"
        section = section.partition("[OPTIONS]")[0]
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", section), f"{command} has {flag}"


def flags(command: Any, name: str) -> Iterator[tuple[str, str]]:
    for parameter in command.params:
        if parameter.param_type_name == "option" and not parameter.hidden:
            yield from ((name, flag) for flag in [*parameter.opts, *parameter.secondary_opts])
    for below in getattr(command, "commands", {}).values():
        yield from flags(below, f"{name} {below.name}")


def test_every_environment_variable_is_described(site: Path) -> None:
    """SEE-5"""
    text = str(PageText(site / "environment.html"))
    assert [field for field in VarunaEnvironment.__struct_fields__ if variable_name(field) not in text] == []


def test_every_event_is_described(site: Path) -> None:
    """SEE-5"""
    text = (ROOT / "docs/events.md").read_text()
    trees = [ast.parse(path.read_text()) for path in (ROOT / "varuna").rglob("*.py")]
    constants = {name: value for tree in trees for name, value in text_constants(tree)}
    found = {name for tree in trees for name in event_names(tree, constants)}
    assert {"agent joined", "morphed", "warm restart", "journal", "planned", "finished"} <= found
    assert sorted(name for name in found if f"\n| `{name}` |" not in text) == []
    listed = re.findall(r"\n\| `([^`]+)` \|", text.partition("\n## ")[2])
    assert sorted(set(listed) - found) == [], "no code logs these"
    assert len(listed) == len(set(listed)), "an event is described twice"
    assert "machine unlisted" in str(PageText(site / "events.html"))


def text_constants(tree: ast.Module) -> Iterator[tuple[str, object]]:
    """Yield (name, value) of the constants of a module."""
    for node in (one for one in tree.body if isinstance(one, ast.Assign)):
        names = getattr(node.targets[0], "elts", [node.targets[0]])
        values = getattr(node.value, "elts", [node.value])
        for name, value in zip(names, values, strict=False):
            yield getattr(name, "id", ""), getattr(value, "value", None)


def event_names(tree: ast.Module, constants: Mapping[str, object]) -> Iterator[str]:
    """Yield the names of events in a module: first arguments of calls that log, and the planner's reasons."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) >= 2:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            first = node.args[0]
            name = getattr(first, "value", constants.get(getattr(first, "id", "")))
            if called in ("log", "_log", "LogEvent", "report_problem", "JobVerdict") and isinstance(
                name, str
            ):
                yield name
        if isinstance(node, ast.For) and "report_problem" in ast.unparse(node):
            yield from (
                str(pair.elts[0].value) for pair in getattr(node.iter, "elts", ())
            )  # ("topic", problem)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "reasons":
            for text in (part for part in ast.walk(node) if isinstance(part, ast.JoinedStr)):
                if (start := str(getattr(text.values[0], "value", ""))).endswith(": "):
                    yield start.removesuffix(": ")


def test_commands_in_pages_have_real_options() -> None:
    """Each `varuna ...` in a bash block of a page has only options that the command takes."""
    known: dict[str, set[str]] = {}
    for app, name in ((main.app, "varuna"), (launch.app, "python -m varuna.launcher")):
        for command, flag in flags(typer.main.get_command(app), name):
            known.setdefault(command, {"--help"}).add(flag)
    checked = 0
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for block in re.findall(r"^ *```bash\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").replace("varuna.run_varuna", "varuna run").splitlines():
                for command in (one for one in known if f"{one} " in line and one != "varuna"):
                    _, _, rest = line.partition(f"{command} ")
                    rest = re.sub(r"'[^']*'", "", rest)
                    rest = re.split(r"\s\S+\.py\b| #| -- ", f" {rest}")[0]
                    used = {flag.replace("_", "-") for flag in re.findall(r"(?<=\s)--[\w-]+", rest)}
                    assert used <= known[command], f"{page.name}: {line}: no {used - known[command]}"
                    checked += len(used)
    assert checked > 100


def test_the_pictures_are_those_that_the_code_draws() -> None:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs/_site/pictures.py")
    assert spec is not None and spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    for name, draw in pictures.PICTURES.items():
        assert (ROOT / "docs/images" / name).read_text() == draw(), "run `python docs/_site/pictures.py`"
    drawn = {package: -row for row, layer in enumerate(pictures.LAYERS) for package in layer[1]}
    packages = {name: level for name, level in LEVELS.items() if (ROOT / "varuna" / name).is_dir()}
    assert set(packages) <= set(drawn), "add the package to docs/_site/pictures.py"
    assert sorted(packages, key=lambda name: (packages[name], name)) == sorted(
        packages, key=lambda name: (drawn[name], name)
    )


def test_the_search_finds_pages_by_their_words(site: Path) -> None:
    """SEE-5: the index holds a word of a page's text, a title, and a Python name."""
    index = (site / "searchindex.js").read_text()
    assert '"morph"' in index or "morph:" in index
    for title in ("Events", "Commands", "Checkpoints"):
        assert f'"{title}"' in index
    assert "newest_checkpoint" in index


def test_a_reader_finds_a_page_by_a_word(site: Path) -> None:
    """SEE-5: in a real browser, from the search field of the first page to a result."""
    with served_files(site) as base, chromium() as browser:
        tab = browser.open(f"{base}/index.html")
        tab.locator("input[name=q]").first.fill("straggler")
        tab.keyboard.press("Enter")
        result = tab.locator("#search-results li a", has_text="Glossary").first
        expect(result).to_be_visible()
        result.click()
        expect(tab.locator("h1")).to_contain_text("Glossary")
        assert tab.url.startswith(f"{base}/glossary.html")


@contextmanager
def served_files(folder: Path) -> Iterator[str]:
    """Serve a folder to this machine; yield its address."""

    class Silent(SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_the_site_needs_nothing_from_outside(site: Path) -> None:
    """Pages load no style, script, font or image from another host."""
    loaded = re.compile(r"<(?:script|img|iframe)[^>]+src=\"(https?:[^\"]+)|<link[^>]+href=\"(https?:[^\"]+)")
    outside = {page.name: loaded.findall(page.read_text()) for page in site.glob("*.html")}
    assert {name: found for name, found in outside.items() if found} == {}
