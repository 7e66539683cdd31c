"""How many small faults the tests of a folder find:

    python tests/mutants.py scheduler --count 40 --seed 1

Changes places of a wing, one after the other: a condition is negated, a number or a comparison is off by one, a
statement is left out, ``and`` and ``or`` are swapped, None or the opposite is returned. For each, those tests of the
wing that call the function run up to the first failure, the fastest first, in a fork of a process that has collected
them; a function that none calls is "uncalled". Prints a line for each mutant that is not killed, and the share that is;
exit code 1 if that is less than ``--least``. As long as the files are the same, a seed takes the same places.

Not drawn is what no behaviour hangs on: log lines, turns given to other threads, ``__repr__``, errors' texts, functions
whose statements are assertions, -1 that becomes another negative number, a bound that is a power of two or a round
figure, how much a piece of bounded work counts, and what is in `EQUIVALENT`.

Kernels are changed as Triton's interpreter runs them, which raises where memory is touched that is none of the
kernel's. Of them not drawn is what changes their speed alone: the functions that choose tiles or count shared memory,
numbers of warps and stages, hints for caches, prefetches, barriers, and that launches overlap (PDL). Nor is what a
kernel does with bfloat16 or by assembler alone (`ON_A_GPU`), neither of which the interpreter has.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
STREAMS = (
    "stream_state",
    "unread",
    "many_choices",
    "request_ends",
    "chats",
    "answer_types",
    "logprob_columns",
    "rest",
    "stream_model",
    "streams_elsewhere",
    "chat_model",
)
KERNELS = {  # files of kernels/ and kernels/triton/: files of tests/kernels
    "experts": ("expert*", "experts expert_codes"),
    "linear": ("linear* grouped* scaled* dequantise* matrix*", "fused_linear grouped_codes code_words"),
    "attention": (
        "decode_* paged_* varlen_* kv_* rotary* write_qkv*",
        "gpu_attention fp8_kv paged_attention rotary kv_write",
    ),
    "sampling": (
        "bitmask* gumbel* logit_bias* logprobs* nucleus* penalties* philox* top_k* *drafts* input_prep* staged_write*",
        "bitmask gumbel logit_bias logprobs penalties philox top_k_top_p drafts_on_device input_prep staged_write",
    ),
}
RUNNER = {  # folders of runner/: files of tests/runner, or of another folder
    "sampling": "sampling_features distributions processors registered bitmask_memory",
    "attention": "attention_layers cudnn_prefill pages_aside windows states gpu_path",
    "speculation": "drafts model_proposer draft_loading models/test_drafted_hybrids.py",
}
WINGS = {
    **{
        f"runner-{name}": (
            f"runner/{name}",
            [file if "/" in file else f"runner/test_{file}.py" for file in tests.split()],
        )
        for name, tests in RUNNER.items()
    },
    **{
        f"kernels-{name}": (
            " ".join(f"kernels/{file}.py kernels/triton/{file}.py" for file in files.split()),
            [f"kernels/test_{name}.py" for name in tests.split()],
        )
        for name, (files, tests) in KERNELS.items()
    },
    "scheduler": ("engine/scheduler", ["scheduler"]),
    "ipc": ("ipc", ["ipc"]),
    "structured": ("engine/structured", ["structured"]),
    "checkpoint": ("checkpoint", ["checkpoint", "api/test_sampling_defaults.py"]),
    "streams": ("engine/streams", [f"api/test_{name}.py" for name in STREAMS]),
    "chat": ("engine/chat", ["chat"]),
    "tokenizer": ("engine/tokenizer", ["tokenizer"]),
}
EQUIVALENT = {
    ("HostBitmasks.of_batch", "another comparison", "rows.min() < 0"),  # then all are kept
    ("_Answer._with_index", "and/or swapped", "deltas and self._index"),  # 0 replaced by 0, or a list that is empty
    ("_num_begun", "another comparison", "count < length"),  # one that has all of the end is closed
    ("KeptStates._find", "None is returned", "return []"),  # which is as empty
    ("KVGroup.longest_hit", "2 is 3", "2 * i"),  # how much further than the hits it hashes
    ("SwappedRequests.longest", "another comparison", "num_tokens <= cached.length"),  # either has all of these tokens
    ("_ByBytes._cut", "1 is 2", "1"),  # the longest token where there is none
    ("_is_exact", "0 is 1", "0"),  # of a power of ten, which is 1 there
    ("_is_exact", "another comparison", "power >= 0"),  # the same
    ("unusable_bound", "another comparison", "abs(value) < _LEAST_NEAR"),  # at which a number is not exact anyway
    ("_is_quick_schema", "another comparison", "text.count(':') <= _MAX_PROPERTIES"),  # a longer look says the same
    ("_most_levels", "another comparison", "num_places * MAX_DEPTH <= _MAX_LEVELS"),  # no multiple of 124 is 1,000
    ("_Closing._members_of_unions", "another comparison", "len(own.unions) > 1"),  # one has no others
    ("_Joined.__post_init__", "16 is 17", "16"),  # the length of a digest
    ("_Translation._unicode", "0 is 1", "0"),  # what is no second half of a pair, and neither is 1
    ("_Closing._uses", "another comparison", "use == _PART"),  # the copy may be the part's, or the place's own
    ("_Closing._uses", "the condition negated", "[(holder, end)] if use == _PART else []"),  # the same
    ("GrammarCompiler._raise_known_failure", "another comparison", "now < until"),  # times are not the same
    ("_below_kth", "another comparison", "peaks >= middle"),  # it is a lower bound either way
    ("_below_kth", "8 is 9", "8"),  # a closer one
    ("_append_tokens", "0 is 1", "other=0"),  # what is loaded there is not stored
    ("_commit_drafts", "0 is 1", "other=0"),  # the same
    ("_prepare_inputs", "0 is 1", "other=0"),  # the same, or it is not summed
    ("_top_k_top_p", "1 is 2", "top_p < 1"),  # the longer way says the same
    ("find_bracket", "0 is 1", "wanted < 0"),  # a mass of 0 is wanted of none
    ("make_candidates", "2 is 3", "2"),  # more memory than is used
    ("_model", "1 is 2", "normalizer.get(3, 1)"),  # either is true
    ("_model", "1 is 2", "normalizer.get(4, 1)"),  # the same
    ("_list_kernel", "0 is 1", "other=0"),  # what is loaded there is not stored
    ("_list_kernel", "another comparison", "i < num_banned"),  # nothing is left then
    ("_list_kernel", "another comparison", "i < num_biases"),  # the same
    ("_logprob_kernel", "another comparison", "block < num_blocks"),  # the first of those that tie is there
    ("_logprob_kernel", "another comparison", "done < _NO_INDEX"),  # a block has more than may be asked for
    ("_measure_list", "another comparison", "i < length"),  # nothing is left then
    ("_prepare_inputs", "another comparison", "i < count"),  # the same
    ("_prepare_inputs", "another comparison", "i < num_tokens"),  # the same
    ("_search_list", "another comparison", "i < length"),  # the same
    ("_draw_scored", "1 is 2", "max(1, _PIECE // vocab_size)"),  # the least rows of a piece
    ("_top_k_top_p", "1 is 2", "max(1, _PIECE // vocab_size)"),  # the same
    ("apply_staged_writes", "4 is 5", "4"),  # how many programs write a run
    ("apply_staged_writes", "1 is 2", "1"),  # the same
    ("PairKernels.multiply", "1 is 2", "1"),  # how many codes are on their way at once
    ("BitmaskFiller._fill_drafted", "another comparison", "len(forced) > 1"),  # forced ids are none, or two and more
}
"""(function, change, changed code or what it is a part of) of what no test can see."""
ELSEWHERE = {"child.py"}
"""Files that run in processes of their own, which a mutant does not reach."""
IDLE_CALLS = (
    "logger.",
    "yield_gil(",
    "launch_next",
    "wait_for_",
    "_wait(w_ptr",
    "gdc_",
    "prefetch",
    "tl.debug_barrier(",
)
IDLE_ARGUMENTS = ("stacklevel", "num_warps", "num_stages", "cache_modifier", "eviction_policy", "PDL", "STAGES")
"""Statements and arguments that no result depends on."""
ON_A_GPU = {
    "_HAS_ASM": "body",
    "PDL": "body",
    "HAS_PTX": "body",
    "_HAS_LOP3": "body",
    "HALF": "orelse",
    "WAY == 'exact'": "body",
    "dtype == tl.float16": "orelse",
    "dtype == tl.bfloat16": "body",
    "x_ptr.dtype.element_ty == tl.bfloat16": "body",
}
"""Conditions in kernels, and which branch of each no kernel reaches in the interpreter."""
OTHER = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}


class Mutant(NamedTuple):
    path: Path
    line: int
    what: str
    function: str  # its qualified name
    code: CodeType  # of the function


def changes(node: ast.AST, is_bool: bool = False) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """(name, function that changes a copy of the node) of each way to change the node itself. ``is_bool``: the function
    that it is in returns True or False."""
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield "the condition negated", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
        yield "another comparison", lambda n: n.ops.__setitem__(0, OTHER[type(n.ops[0])]())
    if isinstance(node, ast.BoolOp):
        yield "and/or swapped", lambda n: setattr(n, "op", ast.Or() if isinstance(n.op, ast.And) else ast.And())
    if isinstance(node, ast.Constant) and type(node.value) is int and (node.value < 1000 or node.value % 1000):
        yield f"{node.value} is {node.value + 1}", lambda n: setattr(n, "value", n.value + 1)
    if isinstance(node, ast.UnaryOp) and ast.unparse(node) == "-1":
        yield "-1 is 0", lambda n: n.__dict__.update(op=ast.UAdd(), operand=ast.Constant(0))
    if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        if is_bool:
            yield "the opposite is returned", lambda n: setattr(n, "value", ast.UnaryOp(ast.Not(), n.value))
        else:
            yield "None is returned", lambda n: setattr(n, "value", ast.Constant(None))
    for field in ("body", "orelse", "finalbody") if isinstance(node, ast.stmt) else ():
        for i, statement in enumerate(getattr(node, field, ())):
            is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call | ast.Await)
            if (is_call or isinstance(statement, ast.AugAssign)) and not ast.unparse(statement).startswith(IDLE_CALLS):
                text = ast.unparse(statement).splitlines()[0][:60]
                yield f"without {text}", lambda n, f=field, i=i: getattr(n, f).__setitem__(i, ast.Pass())


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All of a file, in its functions; not in their signatures, nor in asserts and errors' texts."""
    functions: list[tuple[list[str], Any]] = []

    def find(body: list[ast.stmt], outer: list[str]) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                find(node.body, [*outer, node.name])
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_idle(node):
                functions.append(([*outer, node.name], node))

    find(ast.parse(path.read_text()).body, [])
    for names, function in functions:
        is_bool = function.returns is not None and ast.unparse(function.returns) == "bool"
        parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
        for i, node in enumerate(_nodes(function)):
            around = parents.get(node, node)
            for what, change in changes(node, is_bool):
                if any((".".join(names), what, ast.unparse(code)) in EQUIVALENT for code in (node, around)):
                    continue
                other = deepcopy(function)
                change(_nodes(other)[i])
                if any(ast.unparse(one).startswith("triton.jit") for one in other.decorator_list):
                    other = _interpreted(other)
                other.decorator_list = []
                for outer in reversed(names[:-1]):  # within its classes, for what ``super()`` means
                    other = ast.ClassDef(outer, [], [], [other], [])
                code = compile(ast.fix_missing_locations(ast.Module([other], [])), str(path), "exec")
                for name in names:
                    (code,) = [c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name]
                yield Mutant(path, getattr(node, "lineno", function.lineno), what, ".".join(names), code)


def _is_idle(function: Any) -> bool:
    """Whether no behaviour hangs on the function: it is for debuggers, asserts what others did, or chooses tiles."""
    returned = "" if function.returns is None else ast.unparse(function.returns).removesuffix(" | None")
    is_tiling = returned.endswith(("Tiling", "Tile")) or function.name.startswith("_gemv_blocks")
    num_asserts = sum(isinstance(statement, ast.Assert) for statement in function.body)
    return is_tiling or "shared_bytes" in function.name or function.name == "__repr__" or num_asserts >= 2


def _interpreted(kernel: ast.FunctionDef) -> ast.AST:
    """A kernel as Triton's interpreter runs it."""
    os.environ["TRITON_INTERPRET"] = "1"  # as conftest.py does, before Triton is imported
    from triton.runtime.interpreter import ASTTransformer

    changed: ast.AST = ASTTransformer().visit(kernel)
    return changed


def _nodes(function: Any) -> list[ast.AST]:
    def below(node: ast.AST) -> Iterator[ast.AST]:
        is_text = isinstance(node, ast.Assert | ast.Raise)
        is_power = isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift) and ast.unparse(node.left) == "1"
        is_log = isinstance(node, ast.Expr) and ast.unparse(node).startswith(IDLE_CALLS)
        is_turn = isinstance(node, ast.If) and [ast.unparse(one) for one in node.body] == ["yield_gil()"]
        is_launch = isinstance(node, ast.If) and ast.unparse(node.test).startswith("PDL")
        is_level = isinstance(node, ast.keyword) and node.arg in IDLE_ARGUMENTS
        is_count = isinstance(node, ast.Call) and ast.unparse(node.func) == "self._count"
        if not (is_text or is_power or is_log or is_turn or is_launch or is_level):
            yield node
            if not is_count and ast.unparse(node) != "-1":
                unreached = ON_A_GPU.get(ast.unparse(node.test)) if isinstance(node, ast.If | ast.IfExp) else None
                for name, value in ast.iter_fields(node):
                    for child in value if isinstance(value, list) else [value]:
                        if isinstance(child, ast.AST) and name != unreached:
                            yield from below(child)

    return [function, *(node for statement in function.body for node in below(statement))]


def apply(mutant: Mutant) -> bool:
    """Give the function its other code, whoever has imported it. Returns whether it was found."""
    name = ".".join(mutant.path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    found: Any = importlib.import_module(name)
    for part in mutant.function.split("."):
        found = vars(found).get(part) if isinstance(found, type | ModuleType) else None
    found = found.rewrite() if hasattr(found, "rewrite") else found  # a kernel in Triton's interpreter
    while found is not None and (not isinstance(found, FunctionType) or hasattr(found, "__wrapped__")):
        inner = (getattr(found, name, None) for name in ("__wrapped__", "__func__", "fget", "func"))
        found = next((one for one in inner if one is not None), None)
    if found is None or len(found.__code__.co_freevars) != len(mutant.code.co_freevars):
        return False
    found.__code__ = mutant.code
    return True


def _clear_caches() -> None:
    """Let functions be called again whose results another test, or the collection of all, has kept; but for kernels,
    which take long to make."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("aengine.engine.", "aengine.checkpoint.", "aengine.ipc.")):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


class Plugin:
    """Runs the collected tests once as they are, and for each mutant those that call its function."""

    def __init__(self, mutants: list[Mutant], limit: float) -> None:
        self.mutants, self.limit, self.ends = mutants, limit, dict[Mutant, str]()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        with tempfile.NamedTemporaryFile("r") as calls:
            if (end := self._run(session.items, None, 900, calls.name)) != "survives":
                sys.exit(f"the tests fail as they are: {end} {calls.read()}")
            called: dict[str, list[tuple[float, int]]] = json.load(calls)
        for mutant in self.mutants:
            items = [session.items[i] for _, i in called.get(f"{mutant.path}:{mutant.function}", ())]
            end = self.ends[mutant] = self._run(items, mutant, self.limit) if items else "uncalled"
            if end != "killed":
                where = f"{mutant.path.relative_to(ROOT)}:{mutant.line} {mutant.function}"
                print(f"{end:8} {where}: {mutant.what} ({len(items)} tests)", flush=True)
        return True

    def _run(self, items: list[pytest.Item], mutant: Mutant | None, limit: float, calls: str = "") -> str:
        sys.stdout.flush()
        ours, theirs = os.pipe2(os.O_NONBLOCK)  # a byte for each test that has ended
        pid = os.fork()
        if not pid:
            self._work(items, mutant, calls, theirs)
        os.close(theirs)
        with open(ours, "rb", buffering=0) as progress:
            return self._await(pid, limit, progress)

    def _await(self, pid: int, limit: float, progress: Any) -> str:
        deadline = time.monotonic() + limit
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if progress.read(4096):
                deadline = time.monotonic() + limit
            if time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return "hangs"
            time.sleep(0.01)
        return {0: "survives", 3: "unfit"}.get(os.waitstatus_to_exitcode(ended[1]), "killed")

    def _work(self, items: list[pytest.Item], mutant: Mutant | None, calls: str, progress: int) -> None:
        os.setsid()
        for fd in (1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)
        if mutant is not None and not apply(mutant):
            os._exit(3)
        called: dict[str, list[tuple[float, int]]] = {}
        for i, item in enumerate(items):
            _clear_caches()
            seen: set[CodeType] = set()
            begin = time.monotonic()
            if calls:
                threading.settrace(lambda frame, event, arg: seen.add(frame.f_code))
                sys.settrace(lambda frame, event, arg: seen.add(frame.f_code))
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=(*items, None)[i + 1])
            sys.settrace(None)
            os.write(progress, b".")
            if item.session.testsfailed:
                if calls:
                    Path(calls).write_text(item.nodeid)
                os._exit(1)
            for code in seen:
                if code.co_filename.startswith(str(ROOT / "aengine")):
                    place = time.monotonic() - begin, i
                    called.setdefault(f"{code.co_filename}:{code.co_qualname}", []).append(place)
        if calls:
            Path(calls).write_text(json.dumps({name: sorted(places) for name, places in called.items()}))
        os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("wing", choices=WINGS)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--least", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=60.0, help="for one test, after which it hangs")
    args = parser.parse_args()
    files, tests = WINGS[args.wing]
    files = files if "*" in files else f"{files}/**/*.py"
    paths = {path for pattern in files.split() for path in (ROOT / "aengine").glob(pattern)}
    mutants = [m for path in sorted(paths) if path.name not in ELSEWHERE for m in mutants_of(path)]
    plugin = Plugin(random.Random(args.seed).sample(mutants, min(args.count, len(mutants))), args.seconds)
    options = ["-q", "-p", "no:cacheprovider", "--capture=no"]
    pytest.main([*options, *(str(TESTS / name) for name in tests)], plugins=[plugin])
    ends = list(plugin.ends.values())
    counts = {end: ends.count(end) for end in ("killed", "hangs", "survives", "uncalled", "unfit")}
    share = (counts["killed"] + counts["hangs"]) / max(1, len(ends) - counts["unfit"])
    print(f"{args.wing}: {len(mutants)} places, {counts}, share {share:.2f}")
    return int(share < args.least)


if __name__ == "__main__":
    sys.exit(main())
