"""Docstrings are complete, the API page lists every name, and all code in the documentation runs."""

import ast
import doctest
import importlib.util
import inspect
import operator
import re
import runpy
import sys
import tomllib
import types
from pathlib import Path

import pytest

import sketchssm

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OPTIONAL = {"cupy", "jax", "matplotlib", "torch", "transformers"}
# A fenced python block right after the marker line.
RUNNABLE = re.compile(r"^<!-- run -->\n+```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [
    page for page in [*ROOT.glob("README.md"), *sorted(ROOT.glob("docs/*.md"))] if RUNNABLE.search(page.read_text())
]


def public_objects() -> dict[str, object]:
    """Public functions, classes and modules, and the public members of the classes and modules."""
    found: dict[str, object] = {}

    def visit(name: str, obj: object) -> None:
        if isinstance(obj, types.ModuleType):
            members = {member: getattr(obj, member) for member in obj.__all__}
        elif inspect.isclass(obj):
            members = {
                member: value
                for member, value in vars(obj).items()
                if not member.startswith("_")
                and isinstance(value, types.FunctionType | classmethod | staticmethod | property)
            }
        elif callable(obj) or isinstance(obj, classmethod | staticmethod | property):
            members = {}
        else:
            return
        found[name] = obj
        for member, value in members.items():
            visit(f"{name}.{member}", value)

    names = [*sketchssm.__all__, *(["torch"] if importlib.util.find_spec("torch") else [])]
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        names += [f"transformers.{name}" for name in sketchssm.transformers.__all__]
    for name in names:
        visit(f"sketchssm.{name}", operator.attrgetter(name)(sketchssm))
    return found


PUBLIC = public_objects()


def missing_packages(source: str) -> set[str]:
    """Optional packages that a script imports and that are not installed."""
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.partition(".")[0])
    return {name for name in imported & OPTIONAL if importlib.util.find_spec(name) is None}


def skip_unless_installed(source: str) -> None:
    if missing := missing_packages(source):
        pytest.skip(f"needs {', '.join(sorted(missing))}")


def test_api_page_lists_the_public_names():
    listed = re.findall(r"^(?:   |\.\. py:data:: )([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert {name for name in listed if "." not in name} == set(sketchssm.__all__)
    for name in listed:
        assert operator.attrgetter(name)(sketchssm) is not None


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring(name):
    validate = pytest.importorskip("numpydoc.validate").validate
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["numpydoc_validation"]
    errors = [(code, message) for code, message in validate(name)["errors"] if code in config["checks"]]
    assert not errors


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name):
        runner.run(test)
    assert runner.summarize().failed == 0


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example(path, tmp_path, monkeypatch):
    skip_unless_installed(path.read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.syspath_prepend(path.parent)
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_blocks(page, tmp_path, monkeypatch):
    text = page.read_text()
    # Blank lines before each block: tracebacks then show the page's line numbers.
    blocks = ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in RUNNABLE.finditer(text)]
    skip_unless_installed("".join(blocks))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    names = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)


def test_pages_name_files_that_exist():
    folders = "benchmarks|cuda_src|docs|examples|sketchssm|tests"
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for path in re.findall(rf"`((?:{folders})/[\w./-]*)`", page.read_text("utf-8")):
            assert (ROOT / path).exists(), (page.name, path)
