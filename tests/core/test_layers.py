"""Claims about who imports whom (CONTRIBUTING.md, "Map")."""
import ast
import re
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

from conftest import REPO

# A package imports packages of lower floors only. Imports inside functions, for type checking, and modules that are
# named in strings ("package.module:function") count as well.
FLOORS = """
text data scenes errors progress version environment model_configs
objectives bulk
models
decoding
likelihood
integration
clip_benchmark_ext train extras open_clip_mdc
cli
experiments benchmarks __main__
"""
FLOOR = {package: number for number, packages in enumerate(FLOORS.splitlines()) for package in packages.split()}
ROOTS = {"open_clip_mdc": REPO / "src/open_clip_mdc", **{name: REPO / name for name in (
    "clip_benchmark_ext", "experiments", "benchmarks")}}
FILES = {".".join((root, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"): path
         for root, folder in ROOTS.items() for path in folder.rglob("*.py")}
ADDRESS = re.compile(r"(open_clip_mdc(?:\.\w+)+):\w+")
RELATIVE = re.compile(r"(\.\w+):\w+")


def imports(name: str, path: Path) -> set[str]:
    """The modules of ours that a file imports anywhere, or names in a string as "module:function"."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            inner = {f"{module}.{alias.name}" for alias in node.names} & FILES.keys()
            found |= inner or {module}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(ADDRESS.findall(node.value))
            if inner := RELATIVE.fullmatch(node.value):
                found.add(resolve_name(inner[1], package))
    return found & FILES.keys()


def package_of(module: str) -> str:
    """The key of FLOOR."""
    root, _, inner = module.partition(".")
    return inner.partition(".")[0] if root == "open_clip_mdc" and inner else root


GRAPH = {name: imports(name, path) for name, path in FILES.items()}


def test_the_graph_is_that_of_the_project():
    assert "open_clip_mdc.objectives.config" in GRAPH["open_clip_mdc.models.captioner"] and len(GRAPH) > 100
    assert "open_clip_mdc.integration.training" in GRAPH["open_clip_mdc.integration.patches"]  # a string
    assert {package_of(name) for name in GRAPH} | {"model_configs"} == FLOOR.keys()


def test_a_package_imports_lower_floors_only():
    upward = {f"{name} imports {module}" for name, modules in GRAPH.items() for module in modules
              if (here := package_of(name)) != (there := package_of(module)) and FLOOR[there] >= FLOOR[here]}
    assert not upward


def test_no_file_leads_back_to_itself():
    TopologicalSorter(GRAPH).prepare()  # it raises the circle that it finds
