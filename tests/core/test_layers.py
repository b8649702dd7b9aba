"""Claims about who imports whom (CONTRIBUTING.md, "How the parts meet").    pytest tests/core/test_layers.py"""
import ast

import pytest
from conftest import REPO

SRC = REPO / "src" / "open_clip_mdc"
HELPERS = {"common", "engine", "bulk", "shard_table"}  # of all tools
OWN_HELPERS = {"attention": {"page"}, "caption": {"caption_rows", "page"},
               "caption_shards": {"caption_rows"}, "export": {"model_card"}, "judge": {"judge_answers"},
               "prepare": {"cub", "recap"}, "schedule_search": {"gradient_noise"}, "pairs": {"kept"},
               "score": {"pairs"}, "vq": {"taming"}}


def imports(path) -> set[str]:
    """Dotted names of our modules that a file imports anywhere: in functions, and for type checking, too."""
    package = ["open_clip_mdc", *path.relative_to(SRC).parent.parts]
    modules = {".".join(["open_clip_mdc", *p.relative_to(SRC).with_suffix("").parts]) for p in SRC.rglob("*.py")}
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "open_clip_mdc"}
        elif isinstance(node, ast.ImportFrom):
            base = package[:len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *filter(None, [node.module])])
            if name.split(".")[0] == "open_clip_mdc":
                inner = {f"{name}.{alias.name}" for alias in node.names} & modules
                found |= inner or {name}
    return found


GRAPH = {".".join(path.relative_to(SRC).with_suffix("").parts):
         {module.removeprefix("open_clip_mdc").lstrip(".") for module in imports(path)}
         for path in SRC.rglob("*.py") if path.name not in ("__init__.py", "__main__.py")}


def test_the_graph_is_that_of_the_package():
    assert "objective" in GRAPH["model"] and "tokens" in GRAPH["objective"] and len(GRAPH) > 20


def test_core_imports_neither_data_nor_tools():
    """What meets files in training is the seam's: hooks.py, loading.py and train.py; `load`'s captioner, images."""
    for module, imported in GRAPH.items():
        if "." not in module and module not in ("hooks", "loading", "train", "pretrained"):
            assert not {m for m in imported if m.startswith(("data", "tools"))}, module


def test_data_imports_no_tool_and_no_model():
    for module, imported in GRAPH.items():
        if module.startswith("data."):
            assert {m.split(".")[0] for m in imported} <= {"data", "tokens", ""}, (module, imported)


def test_a_tool_imports_no_other_tool_but_its_own_helper():
    for module, imported in GRAPH.items():
        if module.startswith("tools."):
            name = module.removeprefix("tools.")
            others = {m.removeprefix("tools.") for m in imported if m.startswith("tools.")}
            assert others <= HELPERS | OWN_HELPERS.get(name, set()), (module, others)


@pytest.mark.parametrize("start", sorted(GRAPH))
def test_no_module_imports_itself_by_a_circle(start):
    """Also not for type checking: the graph holds those imports too."""
    seen, todo = set(), set(GRAPH[start])
    while todo:
        module = todo.pop()
        assert module != start, start
        seen.add(module)
        todo |= GRAPH.get(module, set()) - seen


def test_the_plug_in_knows_nothing_of_the_benchmark_and_the_experiments():
    """integration.py names the benchmark's hook as a string."""
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else \
                [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {n.split(".")[0] for n in names} & {"clip_benchmark_ext", "experiments"}, path
