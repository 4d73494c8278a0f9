"""Make wrong versions of a module: one small change at a time, each one a mistake people make."""

import ast
import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

SWAPPED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
"""An operator, and the one that is written by mistake for it."""


_LARGE = 1e6
"""Adding one to a larger bound is no mistake that anybody would make, or notice."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One wrong version of a module.

    Attributes:
        module: dotted name.
        line: where the change is.
        kind: what was changed, in two or three words.
        before: the code that was changed, on one line.
        after: what it became.
        text: the source line that holds it.
        place: which node of the module's tree is changed, in the order of `ast.walk`.
        variant: which of the node's operators.
    """

    module: str
    line: int
    kind: str
    before: str
    after: str
    text: str
    place: int
    variant: int

    @property
    def key(self) -> str:
        """What names this mutant as long as the changed code stays as it is."""
        return f"{self.module}: {self.text} [{self.before} -> {self.after}]"

    @property
    def order(self) -> str:
        """A fixed place in a shuffled order, the same on every machine."""
        changed = f"{self.module}: {self.before} -> {self.after}#{self.line}"
        return hashlib.sha256(changed.encode()).hexdigest()

    def tree(self, source: str) -> ast.Module:
        """The wrong module, made from the source of the right one."""
        tree = ast.parse(source)
        node = next(n for number, n in enumerate(ast.walk(tree)) if number == self.place)
        _mutate(node, self.variant)
        return ast.fix_missing_locations(tree)


def mutants(module: str, source: str) -> list[Mutant]:
    """Return every mutant of a module in a fixed, shuffled order."""
    tree = ast.parse(source)
    skipped = {id(node) for root in _skipped(tree) for node in ast.walk(root)}
    found = []
    lines = source.splitlines()
    for place, node in enumerate(ast.walk(tree)):
        if id(node) in skipped:
            continue
        variants = len(node.ops) if isinstance(node, ast.Compare) else 1
        for variant in range(variants):
            changed = copy.deepcopy(node)
            kind = _mutate(changed, variant)
            if kind is not None:
                line = getattr(node, "lineno", 0)
                ast.fix_missing_locations(changed)
                text = lines[line - 1].strip()
                before, after = _short(node), _short(changed)
                found.append(Mutant(module, line, kind, before, after, text, place, variant))
    return sorted(found, key=lambda mutant: mutant.order)


def _mutate(node: ast.AST, variant: int) -> str | None:
    """Change a node in place; what was done, or None if there is nothing to change."""
    for attempt in (_swap_operator, _drop_statement, _switch_off, _constant):
        kind = attempt(node, variant)
        if kind is not None:
            return kind
    return None


def _swap_operator(node: ast.AST, variant: int) -> str | None:
    if isinstance(node, ast.Compare):
        swap = SWAPPED.get(type(node.ops[variant]))
        if swap is None:
            return None
        node.ops[variant] = swap()
        return "comparison"
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        if _is_type_union(node) or _is_text(node.left) or _is_text(node.right):
            return None
        node.op = SWAPPED[type(node.op)]()
        return "swapped sign"
    if isinstance(node, ast.BoolOp):
        node.op = SWAPPED[type(node.op)]()
        return "and for or"
    return None


def _drop_statement(node: ast.AST, variant: int) -> str | None:
    if isinstance(node, ast.Expr) and _adds_a_reason(node.value):
        node.value = ast.Constant(value=None)
        return "missing reason"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield):
        node.value = ast.YieldFrom(value=ast.Tuple(elts=[], ctx=ast.Load()))
        return "missing reason"
    return None


def _switch_off(node: ast.AST, variant: int) -> str | None:
    if isinstance(node, ast.If):
        node.test = ast.Constant(value=False)
        return "dropped check"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        node.op = ast.UAdd()
        node.operand = ast.Call(
            func=ast.Name(id="bool", ctx=ast.Load()), args=[node.operand], keywords=[]
        )
        return "dropped not"
    return None


def _constant(node: ast.AST, variant: int) -> str | None:
    if not isinstance(node, ast.Constant):
        return None
    if isinstance(node.value, bool):
        node.value = not node.value
        return "flipped flag"
    if isinstance(node.value, int | float) and abs(node.value) < _LARGE:
        node.value = node.value + 1
        return "wrong number"
    return None


def _adds_a_reason(value: ast.AST) -> bool:
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr in ("append", "extend", "add")
    )


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _is_type_union(node: ast.BinOp) -> bool:
    return isinstance(node.op, ast.BitOr)


def _skipped(tree: ast.Module) -> Iterator[ast.AST]:
    """Annotations, and keyword defaults of dataclasses: changing them changes no behaviour."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            yield node.annotation
        elif isinstance(node, ast.FunctionDef):
            if node.returns is not None:
                yield node.returns
            arguments = node.args
            for argument in (*arguments.args, *arguments.kwonlyargs, *arguments.posonlyargs):
                if argument.annotation is not None:
                    yield argument.annotation
            yield from node.decorator_list
        elif isinstance(node, ast.ClassDef):
            yield from node.decorator_list
        elif isinstance(node, ast.keyword) and node.arg == "strict":
            yield node  # of zip: both sides have one length by construction
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield node


def _short(node: ast.AST) -> str:
    if isinstance(node, ast.If):
        return f"if {ast.unparse(node.test)}"
    return " ".join(ast.unparse(node).split())[:120]
