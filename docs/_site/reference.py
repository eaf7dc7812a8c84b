"""Directives that write the reference from the code, so that no name, flag or variable can be forgotten.

{api} varuna                    every name in `varuna.__all__`
{api} varuna.types Cluster      named names of a module
{commands} MODULE PROGRAM       every command and flag of the typer app in a module
{environment}                   every variable of varuna/environment.py
"""

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from varuna import environment

API = re.compile(r"^```\{api\} (.*)", re.MULTILINE)
IMPORT = re.compile(r"^from ((?:varuna|pyrannc)[\w.]*) import ([\w, ]+)", re.MULTILINE)
OUTSIDE = re.compile(r"\]\((\.\./[^)#]+)(?:#[^)]*)?\)")


class MarkdownDirective(SphinxDirective):
    """Replaces itself by Markdown."""

    optional_arguments = 100
    has_content = False

    def run(self) -> list[nodes.Node]:
        text = "\n".join(self.markdown(self.arguments))
        return self.parse_text_to_nodes(text, allow_section_headings=True)

    def markdown(self, arguments: Sequence[str]) -> Iterator[str]:
        raise NotImplementedError


class ApiDirective(MarkdownDirective):
    def markdown(self, arguments: Sequence[str]) -> Iterator[str]:
        module, *names = arguments
        for name in names or public_names(module):
            yield describe_name(module, name)


class ImportedDirective(MarkdownDirective):
    def markdown(self, arguments: Sequence[str]) -> Iterator[str]:
        pages = [page.read_text() for page in sorted(Path(self.env.srcdir).glob("*.md"))]
        listed = set()
        for module, *names in (line.split() for page in pages for line in API.findall(page)):
            listed |= {(module, name) for name in names or public_names(module)}
        for module, names in sorted({found for page in pages for found in IMPORT.findall(page)}):
            for name in (one.split()[0] for one in names.split(",") if one.strip()):
                if (module, name) not in listed:
                    listed.add((module, name))
                    yield describe_name(module, name)


class CommandsDirective(MarkdownDirective):
    def markdown(self, arguments: Sequence[str]) -> Iterator[str]:
        module, *program = arguments
        yield from describe_command(typer.main.get_command(import_module(module).app), " ".join(program))


class EnvironmentDirective(MarkdownDirective):
    def markdown(self, arguments: Sequence[str]) -> Iterator[str]:
        for heading, variables in variable_groups():
            yield f"## {heading}\n"
            yield "| variable | value | meaning |\n|---|---|---|"
            for field in variables:
                kind = "number" if "int" in field.kind else "text"
                yield f"| `{environment.variable_name(field.name)}` | {kind} | {cell(field.meaning)} |"
            yield ""


def describe_name(module: str, name: str) -> str:
    found = getattr(import_module(module), name)
    lines = [f".. {'autoclass' if inspect.isclass(found) else 'autofunction'}:: {module}.{name}"]
    if inspect.isclass(found):
        lines.append("   :members:")
    if hasattr(found, "__struct_fields__"):
        lines += ["   :no-undoc-members:", "", *struct_fields(found)]
    return "```{eval-rst}\n" + "\n".join(lines) + "\n```\n"


def public_names(module: str) -> list[str]:
    """Return the names that a module offers: its `__all__`, or the classes that it defines."""
    found = import_module(module)
    if names := getattr(found, "__all__", None):
        return list(names)
    return [
        name for name, value in vars(found).items() if inspect.isclass(value) and value.__module__ == module
    ]


def describe_command(command: Any, name: str) -> Iterator[str]:
    """Describe a command, and the commands below it."""
    below = getattr(command, "commands", {})
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    yield f"## {name}\n"
    yield (command.help or "").strip() + "\n"
    usage = [name, "[OPTIONS]", *map(value_name, arguments), *(["COMMAND ..."] if below else [])]
    yield f"```text\n{' '.join(usage)}\n```\n"
    if command.params:
        yield "| argument or option | default | meaning |\n|---|---|---|"
    for one in arguments:
        yield f"| `{value_name(one)}` | {default_of(one)} | {cell(one.help)} |"
    for one in options:
        value = "" if one.is_flag else f" {value_name(one)}"
        flags = [f"`{flag}{value}`" for flag in one.opts] + [f"`{flag}`" for flag in one.secondary_opts]
        yield f"| {', '.join(flags)} | {default_of(one)} | {cell(one.help)} |"
    yield ""
    for command_below in below.values():
        yield from describe_command(command_below, f"{name} {command_below.name}")


def value_name(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def default_of(parameter: Any) -> str:
    if parameter.required:
        return "required"
    default = parameter.default
    if default in (None, False, (), [], "") or callable(default):
        return ""
    return f"`{getattr(default, 'value', default)}`"


def cell(text: str | None) -> str:
    """Return text for one cell of a table."""
    return " ".join((text or "").split()).replace("|", "\\|")


class FieldLine(NamedTuple):
    """A field of a struct, with its comment at the end of its line and the comment lines above it."""

    name: str
    kind: str
    meaning: str
    heading: str


def read_fields(source: str, struct: str) -> Iterator[FieldLine]:
    """Yield the fields that the source of a module gives to a struct."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {
        token.start[0]: token.string[1:].strip() for token in tokens if token.type == tokenize.COMMENT
    }
    (definition,) = (
        one for one in ast.parse(source).body if isinstance(one, ast.ClassDef) and one.name == struct
    )
    previous = definition.lineno
    for field in definition.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            above = [comments[line] for line in range(previous + 1, field.lineno) if line in comments]
            meaning = comments.get(field.end_lineno or field.lineno, "")
            yield FieldLine(field.target.id, ast.unparse(field.annotation), meaning, " ".join(above))
        previous = field.end_lineno or field.lineno


def variable_groups() -> Iterator[tuple[str, list[FieldLine]]]:
    """Yield (heading, variables) of `VarunaEnvironment`. A variable without a comment is an error."""
    heading: str = ""
    group: list[FieldLine] = []
    for field in read_fields(inspect.getsource(environment), "VarunaEnvironment"):
        if not field.meaning:
            raise ValueError(f"varuna/environment.py: `{field.name}` needs a comment that says its meaning")
        if field.heading and group:
            yield heading, group
            group = []
        heading = field.heading.rstrip(".") or heading
        group.append(field)
    yield heading, group


def struct_fields(struct: type) -> Iterator[str]:
    """Yield a description of each field of a struct, as reStructuredText."""
    module = import_module(struct.__module__)
    for field in read_fields(inspect.getsource(module), struct.__name__):
        yield f"   .. py:attribute:: {field.name}"
        yield f"      :type: {field.kind}"
        yield "      :no-index-entry:"
        yield ""
        if field.meaning:
            yield f"      {field.meaning}"
            yield ""


def mark_examples(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Make the indented parts of a docstring code blocks."""
    found = list(lines)
    lines.clear()
    in_code = False
    for number, line in enumerate(found):
        if line.startswith("    ") and not in_code and (number == 0 or not found[number - 1].strip()):
            lines += [".. code-block:: python", ""]
            in_code = True
        elif line.strip() and not line.startswith("    "):
            in_code = False
        lines.append(line)


def offer_files(app: Sphinx, page: str, source: list[str]) -> None:
    """Make downloads of links to files outside of docs/. In a Markdown viewer, the same links work."""
    source[0] = OUTSIDE.sub(r"](path:\1)", source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("api", ApiDirective)
    app.add_directive("imported", ImportedDirective)
    app.add_directive("commands", CommandsDirective)
    app.add_directive("environment", EnvironmentDirective)
    app.connect("source-read", offer_files)
    app.connect("autodoc-process-docstring", mark_examples)
    return {"parallel_read_safe": True}
