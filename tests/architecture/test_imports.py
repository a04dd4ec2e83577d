"""The rooms import downwards only, and the import graph has no circle."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "oxidnn"

# room -> rooms it may import at module level. "base" is every module directly in the package that is not a room of its own here.
ALLOWED: dict[str, set[str]] = {
    "base": set(),
    "ptx": {"base"},
    "emu": {"base", "ptx"},
    "codegen": {"base"},
    "ops": {"base", "codegen"},  # attributes hold expressions
    "engines": {"base", "ops", "codegen"},
    "runtime": {"base", "codegen", "emu", "ptx"},
    "plan": {"base", "ops", "codegen", "engines", "runtime"},
    "testing": {"base", "ops", "codegen", "engines", "runtime", "plan"},
    "dispatch": {"base", "ops", "engines", "codegen", "testing", "runtime", "plan", "interchange"},
    "array": {"base", "runtime", "interchange"},
    "interchange": {"base", "runtime", "array"},  # array lazily: results for frameworks without an allocator of their own
    "expr": {"codegen"},
    "handle": {"base", "ops", "codegen", "dispatch", "runtime", "array"},
    "calibration": {"base", "ops", "array", "interchange", "handle"},
    "cli": {"base", "ops", "engines", "codegen", "testing", "dispatch", "runtime", "handle", "ptx", "emu", "array", "expr"},
}
OWN_ROOMS = {"plan", "array", "interchange", "expr", "calibration"}
# references and samples must not know how kernels work
NARROWER = {"testing/reference": {"base", "ops", "testing", "codegen"}, "testing/sample": {"base", "ops", "testing", "codegen"}}
CUDA_ONLY_IN = "runtime"
FRAMEWORKS = {"torch", "cupy", "jax"}


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if len(parts) > 1:
        return parts[0]
    return parts[0] if parts[0] in OWN_ROOMS else "base"


def imports(path: Path) -> list[tuple[str, bool]]:
    """(absolute dotted name, at module level) of every import in a file that runs; those for type checkers only do not."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = ("oxidnn", *path.relative_to(PACKAGE).with_suffix("").parts)[:-1]
    lazy: set[ast.AST] = set()
    never: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            never.update(ast.walk(node))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            lazy.update(ast.walk(node))
    found = []
    for node in ast.walk(tree):
        if node in never:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, node not in lazy) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            stem = ".".join(p for p in (base, node.module) if p)
            found += [(f"{stem}.{alias.name}", node not in lazy) for alias in node.names]
    return found


def module_path(name: str) -> Path | None:
    """The file a dotted name of ours lives in."""
    parts = name.split(".")[1:]
    for end in (len(parts), len(parts) - 1):
        stem = PACKAGE.joinpath(*parts[:end]) if end >= 0 else PACKAGE
        if end > 0 and stem.with_suffix(".py").is_file():
            return stem.with_suffix(".py")
        if (stem / "__init__.py").is_file():
            return stem / "__init__.py"
    return None


FILES = sorted(PACKAGE.rglob("*.py"))


def test_rooms_import_downwards_only() -> None:
    wrong = []
    for path in FILES:
        room = room_of(path)
        where = path.relative_to(PACKAGE).as_posix()
        if where in ("__init__.py", "__main__.py"):
            continue
        allowed = ALLOWED[room] | {room}
        for prefix, narrower in NARROWER.items():
            if where.startswith(prefix):
                allowed = narrower
        for name, _ in imports(path):
            if name.split(".")[0] == "oxidnn":
                target = module_path(name)
                if target is not None and target != PACKAGE / "__init__.py" and room_of(target) not in allowed:
                    wrong.append(f"{where} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_cuda_and_frameworks_stay_in_their_rooms() -> None:
    wrong = []
    for path in FILES:
        room = room_of(path)
        for name, _ in imports(path):
            top = name.split(".")[0]
            if top == "cuda" and room != CUDA_ONLY_IN:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
            if top in FRAMEWORKS:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_import_graph_has_no_circle() -> None:
    edges: dict[Path, set[Path]] = {}
    for path in FILES:
        targets = {module_path(n) for n, eager in imports(path) if eager and n.split(".")[0] == "oxidnn"}
        edges[path] = {t for t in targets if t is not None and t != path and t != PACKAGE / "__init__.py"}
    state: dict[Path, int] = {}
    stack: list[Path] = []

    def visit(node: Path) -> None:
        state[node] = 1
        stack.append(node)
        for target in edges.get(node, ()):
            is_own_package = target.name == "__init__.py" and target.parent in node.parents
            if state.get(target) == 1 and not is_own_package:
                circle = " -> ".join(p.relative_to(PACKAGE).as_posix() for p in [*stack[stack.index(target) :], target])
                raise AssertionError(f"import circle: {circle}")
            if target not in state:
                visit(target)
        stack.pop()
        state[node] = 2

    for path in FILES:
        if path not in state:
            visit(path)


def test_only_switches_reads_the_environment() -> None:
    readers = [p.name for p in FILES if "os.environ" in p.read_text(encoding="utf-8") and p.name != "switches.py"]
    assert readers == []
