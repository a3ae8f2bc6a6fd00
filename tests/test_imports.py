"""Which package may import which, and that importing the core stays light."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "specdec": set(),
    "verifiers": {"specdec"},
    "heads": {"specdec"},
    "drafters": {"specdec", "heads"},
    "eval": {"specdec", "verifiers", "heads", "drafters"},
    "train": {"specdec", "verifiers", "heads", "drafters", "eval"},
}


def modules(root: Path) -> dict[str, Path]:
    """Dotted name of every module of our packages under `root`, and its file."""
    files = [file for package in MAY_IMPORT for file in (root / package).rglob("*.py")]
    return {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def import_graph(root: Path, only_at_import: bool = False) -> dict[str, set[str]]:
    """For every module, the modules of ours that it imports; a package's name stands for its `__init__`.

    only_at_import: leave out imports inside functions, which run later, and those for type checkers alone."""
    known = modules(root)
    graph = {}
    for name, file in known.items():
        tree = ast.parse(file.read_text())
        nodes = _run_at_import(tree) if only_at_import else ast.walk(tree)
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        wanted = {target for node in nodes for target in _targets(node, package)}
        graph[name] = {_nearest(target, known) for target in wanted if target.partition(".")[0] in MAY_IMPORT} - {name}
    return graph


def _run_at_import(node: ast.AST):
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not is_for_types and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _run_at_import(child)


def _targets(node: ast.AST, package: str) -> set[str]:
    """Absolute dotted names that an import statement names; `from a import b` may mean module a or module a.b."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*parents, *([node.module] if node.module else [])])
        return {f"{base}.{alias.name}" for alias in node.names}
    return set()


def _nearest(target: str, known: dict[str, Path]) -> str:
    """The longest prefix of `target` that is a module; the package's name where even that has no file."""
    while target not in known and "." in target:
        target = target.rpartition(".")[0]
    return target


def forbidden_arrows(root: Path) -> list[str]:
    """Imports, wherever they stand, of a package that the importing one may not know."""
    arrows = [(source, target) for source, targets in import_graph(root).items() for target in targets]
    packages = [(source, target, source.partition(".")[0], target.partition(".")[0]) for source, target in arrows]
    return sorted(f"{s} -> {t}" for s, t, here, there in packages if here != there and there not in MAY_IMPORT[here])


def modules_in_cycles(root: Path) -> set[str]:
    """Modules that reach themselves through imports that run at import time."""
    graph = import_graph(root, only_at_import=True)

    def reachable(start: str) -> set[str]:
        seen, todo = set(), [*graph.get(start, ())]
        while todo:
            if (name := todo.pop()) not in seen:
                seen.add(name)
                todo += graph.get(name, ())
        return seen

    return {name for name in graph if name in reachable(name)}


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_every_package_has_modules_to_check():
    assert {name.partition(".")[0] for name in modules(ROOT)} == set(MAY_IMPORT)
    assert "specdec.contracts" in import_graph(ROOT)["specdec.draws"] | import_graph(ROOT)["verifiers.greedy"]


def test_packages_import_only_those_above_them():
    assert forbidden_arrows(ROOT) == []


def test_no_module_imports_itself_through_others():
    assert modules_in_cycles(ROOT) == set()


@pytest.mark.parametrize(
    ("file", "text", "arrow"),
    [
        ("specdec/a.py", "import drafters.ngram", "specdec.a -> drafters.ngram"),
        ("specdec/a.py", "def f():\n    from eval import report", "specdec.a -> eval"),
        ("specdec/kernels/a.py", "from verifiers.greedy import X", "specdec.kernels.a -> verifiers.greedy"),
        ("heads/a.py", "from verifiers import greedy", "heads.a -> verifiers.greedy"),
        ("drafters/a.py", "from verifiers import greedy", "drafters.a -> verifiers.greedy"),
        ("eval/a.py", "if True:\n    import train.loop as loop", "eval.a -> train"),
    ],
)
def test_forbidden_import_is_caught(tmp_path, file, text, arrow):
    allowed = {
        "specdec/contracts.py": "",
        "drafters/ngram.py": "from specdec.contracts import Draft",
        "verifiers/greedy.py": "from specdec import contracts",
        "eval/__init__.py": "import drafters.ngram, verifiers.greedy",
        "train/__init__.py": "import eval",
    }
    write_tree(tmp_path, allowed)
    assert forbidden_arrows(tmp_path) == []
    assert forbidden_arrows(write_tree(tmp_path, {file: text})) == [arrow]


@pytest.mark.parametrize("back", ["from specdec.a import x", "from . import a", "from .a import x", "import specdec.a"])
def test_cycle_is_caught_but_not_a_later_or_type_only_import(tmp_path, back):
    forward = {"specdec/__init__.py": "", "specdec/a.py": "import specdec.b", "specdec/b.py": "from specdec import c"}
    later = f"def f():\n    {back}\nif TYPE_CHECKING:\n    {back}"
    assert modules_in_cycles(write_tree(tmp_path, forward | {"specdec/c.py": later})) == set()
    cycle = {"specdec.a", "specdec.b", "specdec.c"}
    assert modules_in_cycles(write_tree(tmp_path, {"specdec/c.py": back})) == cycle


def run_python(code: str, folder: Path = ROOT) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)


def test_importing_specdec_imports_no_other_package_of_ours_and_nothing_for_reports():
    heavy = "{'train', 'eval', 'drafters', 'verifiers', 'heads', 'matplotlib', 'datasets', 'wandb'}"
    show = f"print(sorted({heavy} & set(sys.modules)))"
    result = run_python(f"import sys, specdec; {show}; import drafters; {show}")
    assert result.stdout.splitlines() == ["[]", "['drafters']"], result.stdout + result.stderr


def test_a_users_file_of_the_same_name_is_named_in_one_sentence(tmp_path):
    code = "from specdec.registry import COMMANDS, known; known(COMMANDS, 'eval', 'command')"
    (tmp_path / "eval.py").write_text("raise SystemExit('a stray file was run')")
    result = run_python(code, tmp_path)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        f"ImportError: specdec needs its own package 'eval' but Python found {tmp_path / 'eval.py'} first: run from "
        "another folder, or rename that file or package"
    )
