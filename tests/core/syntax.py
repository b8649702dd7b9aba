"""Read from a source file's syntax tree which names of OpenCLIP and clip_benchmark it uses, and which it assigns to."""
import ast
from collections.abc import Iterator
from importlib import import_module

PLUGGED = ("open_clip", "open_clip_train", "clip_benchmark", "webdataset", "timm")
UPSTREAM = (*PLUGGED, "torch", "torchvision", "PIL", "transformers", "pycocoevalcap")
MUTATORS = ("update append extend insert pop popitem setdefault clear remove add discard sort reverse __setitem__ "
            "__delitem__ __ior__ __iadd__").split()
SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__"}


def is_module(path: str) -> bool:
    try:
        return bool(import_module(path))
    except ImportError:
        return False


def is_upstream(path: str | None) -> bool:
    return path is not None and path.split(".")[0] in (*UPSTREAM, "?")


def resolve(node: ast.AST, names: dict[str, str]) -> str | None:
    """The dotted path that an expression stands for, if it is a module, or an attribute or item of one."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value, names)
        return owner and f"{owner}.{node.attr}"
    if isinstance(node, ast.Subscript):
        if ast.unparse(node.value).endswith("sys.modules"):
            return node.slice.value if isinstance(node.slice, ast.Constant) else "?"
        return resolve(node.value, names)
    if isinstance(node, ast.Call) and node.args:
        function = ast.unparse(node.func).split(".")[-1]
        if function in ("import_module", "__import__"):
            name = node.args[0]
            return name.value if isinstance(name, ast.Constant) else "?"
        if function in ("vars", "getattr"):
            owner, name = resolve(node.args[0], names), node.args[-1]
            return f"{owner}.{name.value}" if owner and isinstance(name, ast.Constant) else owner
    return None


def upstream_names(tree: ast.AST) -> dict[str, str]:
    """Local name -> dotted path, for every name in the file that is bound to something of upstream's."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                path = alias.name if alias.asname else alias.name.split(".")[0]
                names[alias.asname or path] = path
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    names = {name: path for name, path in names.items() if is_upstream(path)}
    for _ in range(3):  # names of names
        for node in ast.walk(tree):
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                path = node.value and resolve(node.value, names)
                if is_upstream(path):
                    names |= {target.id: path for target in targets if isinstance(target, ast.Name)}
    return names


def upstream_writes(source: str) -> list[int]:
    """Lines that assign to, delete from or mutate an upstream object, or that set attributes by name at all."""
    tree = ast.parse(source)
    names = upstream_names(tree)
    lines = []
    for node in ast.walk(tree):
        owner = None
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            owner = resolve(node.value, names)
        elif isinstance(node, ast.AugAssign):
            owner = resolve(node.target, names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            owner = resolve(node.func.value, names)
            owner = None if owner and is_module(owner) else owner
        if is_upstream(owner) or getattr(node, "id", getattr(node, "attr", None)) in SETTERS:
            lines.append(node.lineno)
    return lines


def internals(source: str) -> Iterator[str]:
    """"module:name" of what a file takes from below the top level of an upstream package, or with an underscore.

    open_clip_train and clip_benchmark have no public interface: all that is taken from them is internal.
    """
    tree = ast.parse(source)
    names = upstream_names(tree)
    paths = [f"{node.module}.{alias.name}" for node in ast.walk(tree)
             if isinstance(node, ast.ImportFrom) and not node.level for alias in node.names]
    paths += [resolve(node, names) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for path in paths:
        if path is None or path.split(".")[0] not in PLUGGED or is_module(path):
            continue
        parts = path.split(".")
        depth = next(n for n in range(len(parts) - 1, 0, -1) if is_module(".".join(parts[:n])))
        if depth > 1 or parts[0] in ("open_clip_train", "clip_benchmark") or parts[depth].startswith("_"):
            yield ".".join(parts[:depth]) + ":" + parts[depth]
