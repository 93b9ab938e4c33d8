"""Import rules between the package's modules: no circles, and no layer imports a layer above it. All import statements
count, also those in functions and under ``TYPE_CHECKING``.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "sketchssm").rglob("*.py"))
}
FRAMEWORKS = {"torch", "jax", "transformers", "vllm"}
# Modules that may import a framework: they convert arrays, load models, time other libraries, or serve PyTorch.
KNOW_FRAMEWORKS = {
    f"sketchssm.{name}"
    for name in (
        "arrays.interop",
        "cuda.frameworks",
        "study.bench.peers",
        "study.bench.authors_process",
        "calibrate.distributed",
        "torch",
    )
} | {f"sketchssm.{room}" for room in ("transformers", "serving", "vllm")}
# The rooms of the package, from the ground up: a room imports only rooms before it.
ROOMS = (
    *("layer", "arrays", "plans", "reference", "cpu", "cuda", "calibrate", "heads", "study", "serving"),
    *("models", "torch", "transformers", "vllm", "cli", "__main__"),
)


def imported(source: str, module: str, is_package: bool, known: set[str]) -> set[str]:
    """Modules that a source imports: ours by their full names, others by the name of their package."""
    found = set()
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, [base, node.module]))
            names = [(base, alias.name) for alias in node.names]
        else:
            continue
        for base, name in names:
            if base.partition(".")[0] != "sketchssm":
                found.add(base.partition(".")[0])
            else:
                found.add(f"{base}.{name}" if f"{base}.{name}" in known else base)
    return found - {module}


IMPORTS = {
    module: imported(path.read_text(), module, path.name == "__init__.py", set(FILES))
    for module, path in FILES.items()
}


def reached(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """Modules that each module imports, directly or through others."""
    found = {}
    for module in imports:
        seen: set[str] = set()
        ahead = [module]
        while ahead:
            for other in imports.get(ahead.pop(), set()) - seen:
                seen.add(other)
                ahead.append(other)
        found[module] = seen
    return found


def circles(imports: dict[str, set[str]]) -> set[tuple[str, ...]]:
    """Groups of modules that import each other, directly or through others of the group."""
    all_reached = reached(imports)
    inner = [module for module in imports if module in all_reached[module]]
    return {
        tuple(sorted(m for m in inner if module in all_reached[m] and m in all_reached[module])) for module in inner
    }


def inside(module: str, *packages: str) -> bool:
    """Whether a module is one of the packages or in one of them."""
    return any(module == package or module.startswith(package + ".") for package in packages)


def test_no_circles():
    assert not circles(IMPORTS)


def test_frameworks():
    """Modules that only compute import no framework, directly or through other modules."""
    importing = {module for module, imports in IMPORTS.items() if imports & FRAMEWORKS}
    assert "sketchssm.cuda.frameworks" in importing  # whose imports are in functions
    assert [module for module in importing if not inside(module, *KNOW_FRAMEWORKS)] == []
    engines = [module for module, imports in IMPORTS.items() if "vllm" in imports]
    assert [module for module in engines if not inside(module, "sketchssm.vllm")] == []
    users = {module for module, imports in IMPORTS.items() if "sketchssm.torch" in imports}
    assert users <= {"sketchssm.transformers.caches"}


def test_cuda_is_behind_the_backends():
    """Other modules import at most `sketchssm.cuda` itself, which tells what the backend can do here."""
    wrong = {
        (module, other)
        for module, imports in IMPORTS.items()
        for other in imports
        if other.startswith("sketchssm.cuda.") and not inside(module, "sketchssm.cuda")
    }
    assert not wrong


def test_rooms():
    """Every module is in a room, and imports only from its own room, rooms below it, and the package's version."""
    assert {module.split(".")[1] for module in FILES if "." in module} == set(ROOMS)
    wrong = {
        (module, other)
        for module, imports in IMPORTS.items()
        for other in imports
        if module.count(".") and other.startswith("sketchssm.")
        if ROOMS.index(other.split(".")[1]) > ROOMS.index(module.split(".")[1])
    }
    assert not wrong


def test_code_asks_layers_not_kinds():
    """`Layer.erases` and `Layer.channel_decays` tell kinds apart; only ways into vLLM's layers know them by name."""
    named = re.compile(r"""kind\s*(==|!=|in|not in)\s*[(\[{]?\s*["'](mamba2|gdn|kda|gla)""")
    files = [path for name, path in FILES.items() if not name.startswith("sketchssm.vllm")]
    assert [path.name for path in files if named.search(path.read_text())] == []
