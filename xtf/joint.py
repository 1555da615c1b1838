"""A stage's forward and backward as one graph, and the two graphs that come of cutting it.

The graph is traced once on tensors without values; what a stage keeps between its halves is then a list of its nodes, chosen by
`Choose`. Nothing here runs under autograd: the halves are plain sequences of operations, to be run as they are or compiled.
"""

# pyright: reportUnknownVariableType=false
# (torch's contexts of symbolic shapes carry no types)

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from xtf.batch import PER_DOCUMENT
from xtf.stage import Params, StageFn, Values, is_differentiable

# Tagging values -----------------------------------------------------------------------------------------------------------------


def keep(name: str, x: Tensor) -> Tensor:
    """``x`` itself, under a name by which `xtf.transforms.remat` may be told to keep it for the backward.

    A stage says in `xtf.stage.Stage.named` which names its function uses. Several values may have one name.

    A value that the stage writes is kept by the stage behind it anyway, if that needs it.

    Raises:
        ValueError: for a name that is none, or what is no tensor.

    Example:
        >>> x = torch.ones(2)
        >>> keep("attention", x) is x
        True
    """
    if not isinstance(name, str) or not name or not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"keep({name!r}, a {type(x).__name__}): expected a name, and a tensor")
    if torch.compiler.is_compiling() or get_proxy_mode() is None:
        return x
    return _Keep.apply(x.view_as(x), name)  # a view: see xtf.ops.cpu


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, name: str) -> Tensor:
        return torch.ops.xtf.keep(x, name)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        return grad_outputs[0], None


def _keep(x: Tensor, name: str) -> Tensor:
    return x.clone()


_op: Any = torch.library.custom_op("xtf::keep", _keep, mutates_args=())  # pyright: ignore[reportUnknownMemberType]
_op.register_fake(_keep)

# The graph ----------------------------------------------------------------------------------------------------------------------

Choose = Callable[["Joint"], Iterable[fx.Node]]
"""Which nodes of the forward are kept for the backward; what is not, and is needed, is computed again."""


@dataclass(frozen=True)
class Joint:
    """The graph of ``(params, reads, constants, cotangents) -> (writes, gradients of params, of reads)``.

    Args:
        module: the graph.
        params: names of the parameters, in order.
        reads: which of the values read are floating.
        consts: names of the constants that are tensors, in order.
        writes: which of the values written are floating.
        names: the nodes of each name given by `keep`.
        guards: what must be true of sizes for the graph to serve.
    """

    module: fx.GraphModule
    params: tuple[str, ...]
    reads: tuple[bool, ...]
    consts: tuple[str, ...]
    writes: tuple[bool, ...]
    names: Mapping[str, tuple[fx.Node, ...]]
    guards: tuple[Any, ...]

    @property
    def inputs(self) -> list[fx.Node]:
        """All placeholders."""
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    @property
    def tangents(self) -> list[fx.Node]:
        """Those of cotangents."""
        return self.inputs[len(self.params) + len(self.reads) + len(self.consts) :]

    @property
    def outputs(self) -> tuple[Any, ...]:
        """Writes, then gradients."""
        return tuple(next(node for node in self.module.graph.nodes if node.op == "output").args[0])

    def serves(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the graph is right for tensors of these sizes: parameters, reads and constants in order."""
        return serves([node.meta["val"] for node in self.inputs], self.guards, tensors)


def serves(fakes: Sequence[Tensor], guards: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
    """Whether a graph that was traced on these tensors without values is right for those of these sizes.

    Args:
        fakes: what was traced; more may follow than is given.
        guards: what must be true of their sizes.
        tensors: in the order of ``fakes``.
    """
    sizes: dict[Any, int] = {}
    for fake, tensor in zip(fakes, tensors, strict=False):
        if fake.dtype != tensor.dtype or fake.device != tensor.device or fake.dim() != tensor.dim():
            return False
        for size, real in zip(fake.shape, map(hint, tensor.shape), strict=True):
            expression = _expression(size)
            if isinstance(expression, int):
                if expression != real:
                    return False
            elif real < 2 or sizes.setdefault(expression, real) != real:  # 0 and 1 broadcast: graphs of their own
                return False
    return all(bool(guard.subs(sizes)) for guard in guards)


def hint(size: int | torch.SymInt) -> int:
    """A size; of one without value, that with which it is traced."""
    return cast(Any, size).node.hint if isinstance(size, torch.SymInt) else size


def trace(fn: StageFn, params: Params, reads: Values, consts: Mapping[str, Any], *, rows: bool = False) -> Joint:
    """The joint graph of a stage's function.

    Args:
        fn: ``fn(params, *reads, **consts) -> writes``: pure.
        params, reads, consts: arguments of the kind it will be given; only their shapes and dtypes matter.
        rows: whether dim 0 of every read and constant is a number of rows that differs from call to call. The number of documents
            always is.

    Raises:
        RuntimeError: if the function changes a tensor in place that something else reads.
    """
    env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=env)

    def fake(value: Any, varies: bool) -> Any:
        dims = [DimDynamic.DYNAMIC if varies and dim == 0 and n > 1 else DimDynamic.STATIC for dim, n in enumerate(value.shape)]
        context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
        return mode.from_tensor(value, symbolic_context=context)

    names = tuple(name for name, value in consts.items() if isinstance(value, Tensor))
    fixed = {name: value for name, value in consts.items() if name not in names}
    own = {name: fake(value, False) for name, value in params.items()}
    given = tuple(fake(value, rows) for value in reads)
    constants = {name: fake(consts[name], rows or name in PER_DOCUMENT) for name in names}
    with mode:
        written = fn(own, *given, **constants, **fixed)
        tangents = tuple(torch.empty(w.shape, dtype=w.dtype, device=w.device) for w in written if is_differentiable(w))
    floats = tuple(is_differentiable(w) for w in written)
    read_floats = tuple(is_differentiable(r) for r in reads)

    def joint(*flat: Tensor) -> tuple[Tensor, ...]:
        rest = iter(flat)
        params = {name: next(rest) for name in own}
        reads = [next(rest) for _ in given]
        consts = {name: next(rest) for name in names}

        def of_floats(params: Params, values: Values) -> tuple[Values, Values]:
            some = iter(values)
            out = fn(params, *[next(some) if yes else r for yes, r in zip(read_floats, reads, strict=True)], **consts, **fixed)
            return tuple(w for w in out if is_differentiable(w)), tuple(w for w in out if not is_differentiable(w))

        of = tuple(r for yes, r in zip(read_floats, reads, strict=True) if yes)
        done: Any = torch.func.vjp(of_floats, params, of, has_aux=True)
        out, pullback, others = done
        dparams, dreads = pullback(tuple(rest))
        out, others = iter(out), iter(others)
        return *(next(out if yes else others) for yes in floats), *(dparams[name] for name in own), *dreads

    made: Any = make_fx(joint, tracing_mode="symbolic")
    module: fx.GraphModule = made(*own.values(), *given, *constants.values(), *tangents)
    _without_mutations(module.graph)
    guards = tuple(env.replace(guard.expr) for guard in env.guards)  # symbols that were found equal are one then
    found = Joint(module, tuple(own), read_floats, names, floats, take_names(module.graph), guards)
    for at, node in enumerate(found.inputs):  # as torch's partitioners name them
        node.target = node.name = f"tangents_{at + 1}" if node in set(found.tangents) else f"primals_{at + 1}"
    module.recompile()
    return found


def take_names(graph: fx.Graph) -> dict[str, tuple[fx.Node, ...]]:
    """The nodes that `keep` named; its own are taken out."""
    found: dict[str, tuple[fx.Node, ...]] = {}
    for node in list(graph.nodes):
        if node.target == torch.ops.xtf.keep.default:
            value, name = node.args
            found[name] = (*found.get(name, ()), value)
            node.replace_all_uses_with(value)
            graph.erase_node(node)
    return found


def _without_mutations(graph: fx.Graph) -> None:
    """Operations that change a tensor in place become those that do not. The tensor must have been made for that alone: what else
    reads it would miss the change."""
    for node in graph.nodes:
        if _schema(node) is not None and _schema(node).is_mutable:
            (target, *_) = node.args
            packet = getattr(torch.ops.aten, _schema(node).name.removeprefix("aten::").removesuffix("_"), None)
            overload = getattr(packet, node.target._overloadname, None)
            if overload is None or target.op != "call_function" or is_view(target) or len(target.users) > 1:
                raise RuntimeError(f"a stage's function must not change tensors in place, but this does: {node.format_node()}")
            node.target = overload


def _schema(node: fx.Node) -> Any:
    return getattr(node.target, "_schema", None)


def is_view(node: fx.Node) -> bool:
    """Whether a node's value shares the memory of its first argument."""
    if node.target is operator.getitem:
        return is_view(cast(fx.Node, node.args[0]))
    schema = _schema(node)
    if schema is None or not schema.arguments or schema.is_mutable:
        return False
    return schema.arguments[0].alias_info is not None or node.target == torch.ops.aten._unsafe_view.default


def needed(outputs: Iterable[Any], stop: Iterable[fx.Node] = ()) -> set[fx.Node]:
    """The nodes that outputs are computed from, up to and including those of ``stop``."""
    ends, found = set(stop), set[fx.Node]()
    waiting = [node for node in outputs if isinstance(node, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            if node not in ends and not _is_size(node):
                waiting += node.all_input_nodes
    return found


# Cutting it ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Halves:
    """A joint graph cut in two.

    Args:
        joint: the graph.
        forward: ``(*params, *reads, *consts) -> (*writes, *kept)``.
        backward: ``(*params, *kept reads, *consts, *kept, *cotangents) -> (*gradients of params, *of floating reads)``.
        reads: which of the values read are kept.
    """

    joint: Joint
    forward: fx.GraphModule
    backward: fx.GraphModule
    reads: tuple[int, ...]


def cut(joint: Joint, choose: Choose) -> Halves:
    """Cut a joint graph: the backward computes again what is not kept.

    Of a node that is a view, what it looks at is kept; nothing is kept of what the stage was given, or of what nothing was needed
    for. What sorts or picks floating numbers is always kept: another graph of the same scores may round otherwise.
    """
    n_params, n_reads = len(joint.params), len(joint.reads)
    inputs, outputs, tangents = joint.inputs, joint.outputs, joint.tangents
    primals, writes, grads = inputs[: len(inputs) - len(tangents)], outputs[: len(joint.writes)], outputs[len(joint.writes) :]
    depending = _depending(joint.module.graph, tangents)
    chosen = {root(node) for node in (*choose(joint), *_selections(joint.module.graph))}
    chosen -= {*primals, *depending}
    chosen = {node for node in chosen if not _is_size(node)}
    used = needed(grads, [*chosen, *primals])
    kept = [node for node in joint.module.graph.nodes if node in chosen & used]
    of_reads = primals[n_params : n_params + n_reads]
    taken = {size for node in used - set(kept) if _is_size(node) or _takes_size(node) for size in _symbols(node)}
    known = {s for node in (*tangents, *kept, *primals[:n_params], *primals[n_params + n_reads :]) for s in _sizes(node)}
    reads = tuple(at for at, node in enumerate(of_reads) if node in used or _sizes(node).keys() & (taken - known))
    back = [*primals[:n_params], *(of_reads[at] for at in reads), *primals[n_params + n_reads :], *kept, *tangents]
    return Halves(joint, _extract(joint, primals, (*writes, *kept)), _extract(joint, back, grads), reads)


def root(node: fx.Node) -> fx.Node:
    """What a view looks at; any other node is its own."""
    while is_view(node):
        node = cast(fx.Node, node.args[0])
    return node


def siblings(node: fx.Node) -> list[fx.Node]:
    """The node, and what else its operation gave: with only some of that, all would be computed again."""
    if node.target is not operator.getitem or is_view(node):
        return [node]
    return list(cast(fx.Node, node.args[0]).users)


def _depending(graph: fx.Graph, on: Iterable[fx.Node]) -> set[fx.Node]:
    found = set(on)
    for node in graph.nodes:
        if node.op != "output" and found & set(node.all_input_nodes):
            found.add(node)
    return found


_SELECTING = ("topk", "sort", "argsort", "argmax", "argmin", "kthvalue", "mode", "median", "max", "min")


def _selections(graph: fx.Graph) -> list[fx.Node]:
    """What comes of comparing floating numbers: integers, and the numbers they belong to."""
    found: list[fx.Node] = []
    for node in graph.nodes:
        name = _schema(node).name.removeprefix("aten::") if _schema(node) is not None else ""
        if name in _SELECTING and node.all_input_nodes and node.all_input_nodes[0].meta["val"].is_floating_point():
            results = [user for user in node.users if user.target is operator.getitem]
            found += results or [node]
    return found


def _is_size(node: fx.Node) -> bool:
    """Whether a node is a number, not a tensor: made again from the sizes of what is there."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def _takes_size(node: fx.Node) -> bool:
    return any(_is_size(given) for given in node.all_input_nodes)


def _expression(size: Any) -> Any:
    """A size as a sympy expression, or as an int."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression: Any = size.node.expr
    return int(expression) if expression.is_number else expression


def _symbols(node: fx.Node) -> set[Any]:
    """The symbols of the numbers that a node is, or takes."""
    nodes = [node] if _is_size(node) else [given for given in node.all_input_nodes if _is_size(given)]
    expressions = [_expression(n.meta["val"]) for n in nodes if isinstance(n.meta["val"], torch.SymInt)]
    return {symbol for e in expressions if not isinstance(e, int) for symbol in e.free_symbols}


def _sizes(node: fx.Node) -> dict[Any, int]:
    """Of a tensor, the dim that each symbol is the size of."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return {}
    found = {_expression(size): dim for dim, size in enumerate(value.shape)}
    return {size: dim for size, dim in found.items() if not isinstance(size, int) and size.is_symbol}


def _extract(joint: Joint, inputs: Sequence[fx.Node], outputs: Sequence[Any]) -> fx.GraphModule:
    """The part of a joint graph that makes outputs of inputs. Sizes are taken from the inputs."""
    graph, copies, symbols = fx.Graph(), dict[fx.Node, fx.Node](), dict[Any, Any]()
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in inputs:
        for symbol, dim in _sizes(node).items():
            symbols.setdefault(symbol, (copies[node], dim))
    read: dict[Any, fx.Proxy] = {}

    def number(node: fx.Node) -> Any:
        value = node.meta["val"]
        expression = _expression(value) if isinstance(value, torch.SymInt) else value
        if isinstance(expression, int | float):
            return expression
        for symbol in expression.free_symbols:
            if symbol not in read:
                read[symbol] = fx.Proxy(graph.call_function(torch.ops.aten.sym_size.int, symbols[symbol]))
        return cast(Any, sympy_interp)(PythonReferenceAnalysis, read, expression).node

    def copied(node: fx.Node) -> Any:
        if node not in copies and _is_size(node):
            return number(node)
        return copies[node]

    part = needed(outputs, inputs)
    for node in joint.module.graph.nodes:
        if node in part and node not in copies and not _is_size(node):
            copies[node] = graph.node_copy(node, copied)
    graph.output(tuple(copied(out) if isinstance(out, fx.Node) else out for out in outputs))
    module = fx.GraphModule(joint.module, graph)
    graph.lint()
    return module
