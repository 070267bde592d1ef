"""How many small faults in decisions the tests find: mutants of `planner/`, `launch/` and `data/` against their tests.

    make -C benchmarks mutation-score MUTANTS=200 SEED=0 OUT=mutation_score.json

A mutant is killed when a test fails, or no longer ends (docs/testing.md). Slow tests are left out, as are files that
fail without a mutant, which are named. mutmut and cosmic-ray run the whole suite for each mutant, or change messages.
"""

import ast
import contextlib
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report_header import report_header
from sft_play.process.signals import die_with_parent
from sft_play.runs.folder import write_json

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "sft_play"
SECONDS_MORE = 60.0
"""What a mutant's tests may take beyond five times what they take without it."""

OTHER_COMPARISON: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}  # fmt: skip
"""The boundary and the opposite of each comparison."""
OTHER_OPERATOR = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Mod: ast.FloorDiv}
OTHER_OPERATOR |= {ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
OTHER_CALL = {"min": "max", "max": "min", "any": "all", "all": "any", "median": "min"}
"""Choices among several values."""


@dataclass(frozen=True)
class Mutant:
    """One changed decision: `before` and `after` are the text of the changed expression or statement."""

    path: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    end: int
    """Offsets of `before` in the UTF-8 bytes of the file."""

    def __str__(self) -> str:
        before, after = (" ".join(text.split())[:70] for text in (self.before, self.after))
        return f"{self.path}:{self.line} {self.kind}: {before} -> {after}"

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def find_mutants(path: str, source: str) -> list[Mutant]:
    """Every mutant of a file; texts of errors and log lines, annotations and docstrings have none."""
    data = source.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    mutants = []
    for node in _decisions(ast.parse(source)):
        for kind, after in _changes(node):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
            before = data[start:end].decode()
            mutants.append(Mutant(path, node.lineno, kind, before, after, start, end))
    return mutants


def _decisions(node: ast.AST) -> Iterator[Any]:
    """The expressions and statements below a node that may be mutated."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "keywords") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, (ast.JoinedStr, ast.Raise)) or _is_talk(child):
                continue
            if isinstance(child, (ast.expr, ast.stmt)):
                yield child
            yield from _decisions(child)


def _is_talk(node: ast.AST) -> bool:
    """Whether a statement only logs, documents, or declares a type."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "logger":
        return True
    if not isinstance(node, ast.Expr):
        return False
    value = node.value
    function = value.func if isinstance(value, ast.Call) else None
    is_log = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
    return isinstance(value, ast.Constant) or (is_log and function.value.id == "logger")  # type: ignore[union-attr]


def _changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Compare(ops=[operator], left=left, comparators=[right]):
            for other in OTHER_COMPARISON[type(operator)]:
                yield "comparison", _text(ast.Compare(left, [other()], [right]))
        case ast.BoolOp(op=operator, values=values):
            yield "boolean", _text(ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", _text(operand)
        case ast.BinOp(op=operator, left=left, right=right) if type(operator) in OTHER_OPERATOR:
            if not _is_text(left) and not _is_text(right):
                yield "arithmetic", _text(ast.BinOp(left, OTHER_OPERATOR[type(operator)](), right))
        case ast.Constant(value=bool(value)):
            yield "constant", str(not value)
        case ast.Constant(value=int(value)) if value in (0, 1, 2):
            yield "constant", str(value + 1)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield "branch", _text(ast.IfExp(test, orelse, body))
        case ast.Call(func=ast.Name(id=name)) if name in OTHER_CALL:
            yield "choice", _text(ast.Call(ast.Name(OTHER_CALL[name]), node.args, node.keywords))
        case ast.Assign(targets=[ast.Subscript() | ast.Attribute()]) | ast.AugAssign():
            yield "left out", "pass"
        case ast.Continue() | ast.Break() | ast.Expr(value=ast.Call()):
            yield "left out", "pass"


def _is_text(node: ast.AST) -> bool:
    """Whether it is a text, a list or a tuple: their sums have no other operator."""
    is_constant = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    return is_constant or isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple))


def _text(node: ast.AST) -> str:
    return f"({ast.unparse(node)})"


OWN_TESTS = {
    "planner": "decisions recorded_plans plan plan_truth plan_inputs memory batching budget speed_error "
    "learning_rate own_gpus mesh training_options fp16 kernels experts compiled_plans liger_plan evaluation "
    "micro_batches sdpa repeated_keys gradients unsloth image_plan pass_work streamed",
    "launch": "decisions launch_files nodes tensorboard exported_nodes deepspeed_files own_gpus api "
    "row_survey refusals failures distributed mesh runs restarts out_of_memory_runs device "
    "stages doctor",
    "data": "data_decisions masks tool_calls ends mask_score template preview check rows splits files formats "
    "process data_story documents columns row_limit packing recorded_data options bad_inputs "
    "own_messages sources exact_match adapter_inputs new image_masks image_rows images",
}
"""The test files of each package: its mutants are run against those that execute the mutant's line."""


def own_tests(path: str) -> list[str]:
    return [f"test_{name}.py" for name in OWN_TESTS[path.split("/")[1]].split()]


@dataclass(frozen=True)
class MutantVerdict:
    """What became of a mutant: `killed`, `survived`, or `no tests`; `by` is the test file that failed."""

    mutant: Mutant
    verdict: str
    by: str = ""
    seconds: float = 0.0


def copy_of_tree(parent: Path) -> Path:
    """The tracked files and what they look for beside them, below `parent`."""
    tree = parent / "tree"
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    if (ROOT.parent / "shared").exists():
        (parent / "shared").symlink_to((ROOT.parent / "shared").resolve())
    return tree


def run_tests(
    tree: Path, tests: Sequence[str], *, timeout_s: float, coverage_file: Path | None = None
) -> tuple[bool, float]:
    """Whether tests pass in `tree`, and the seconds they took; those that do not end do not pass.

    They run in a fork of this process, which has imported the large libraries but nothing of the package.
    `coverage_file`: where coverage's data go, with the test that executed each line.
    """
    started = time.monotonic()
    # hypothesis keeps examples that failed, and would try them first on the next mutant
    shutil.rmtree(tree / ".hypothesis", ignore_errors=True)
    child = os.fork()
    if child == 0:
        _pytest_and_exit(tree, tests, coverage_file)
    while time.monotonic() - started < timeout_s:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            if code == pytest.ExitCode.USAGE_ERROR:  # no such test, or a mutant that keeps its file from being imported
                files = sorted({test.partition("::")[0] for test in tests})
                if files == [*tests]:
                    raise RuntimeError(f"pytest finds no {' '.join(tests)}")
                return run_tests(tree, files, timeout_s=timeout_s)
            return code == 0, time.monotonic() - started
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False, time.monotonic() - started


def _pytest_and_exit(tree: Path, tests: Sequence[str], coverage_file: Path | None) -> None:
    """In the fork: the tests, with their words thrown away."""
    code = 3
    try:
        die_with_parent(os.getppid(), signal.SIGKILL)
        os.setsid()  # a group of its own, so that a mutant that hangs dies with the processes that its tests started
        os.chdir(tree)
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        os.environ["PYTHONPATH"] = str(tree)
        sys.path[:] = [str(tree), *(part for part in sys.path if Path(part).resolve() != ROOT)]
        # the parent imported the package for its own use; the fork has to read the mutant
        for name in [name for name in sys.modules if name.partition(".")[0] in (PACKAGE, "tests", "benchmarks")]:
            del sys.modules[name]
        import pytest

        # what was imported ahead is not rewritten, which pytest warns of
        words = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning", *tests]
        if coverage_file is None:
            code = int(pytest.main(words))
            return
        import coverage

        watch = coverage.Coverage(data_file=str(coverage_file), source=[str(tree / PACKAGE)], config_file=False)
        watch.set_option("run:dynamic_context", "test_function")  # which test executes which line
        watch.start()
        code = int(pytest.main(words))
        watch.stop()
        watch.save()
    finally:
        os._exit(code)


@dataclass(frozen=True)
class Baseline:
    """A test file without a mutant: its seconds (None where it fails), and which test executed which line of `tree`."""

    file: str
    seconds: float | None
    tree: Path
    seen: Path

    def executing(self, mutant: Mutant, source: bytes) -> list[str]:
        """The tests that execute the mutant's lines; the whole file where they run outside of a test, while the module
        is imported or in a fixture."""
        import coverage

        data = coverage.CoverageData(basename=str(self.seen))
        data.read()
        by_line = data.contexts_by_lineno(str(self.tree / mutant.path))
        contexts = {name for line in statement_lines(mutant, source) for name in by_line.get(line, ())}
        return self.node_ids(contexts)

    def node_ids(self, contexts: Collection[str]) -> list[str]:
        """Tests as pytest names them, of the names that coverage has for them: `tests.test_x.TestY.test_z`."""
        stem = f"{self.file.removesuffix('.py')}."
        names = sorted({context.partition(stem)[2].replace(".", "::") for context in contexts if context})
        if not contexts:
            return []
        if not names or not all(names):  # outside of tests alone, or in a test of another module
            return [f"tests/{self.file}"]
        return [f"tests/{self.file}::{name}" for name in names]


def statement_lines(mutant: Mutant, source: bytes) -> range:
    """The lines of the statement that a mutant changes, or of the head of one that has a body. A trace may name any
    line of a long statement, and leaves out jumps: for these it is the statement around them."""
    around = sorted(
        (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)
         and node.lineno <= mutant.line <= (node.end_lineno or node.lineno)),
        key=lambda node: node.lineno,
    )  # fmt: skip
    statement = around[-1]
    if isinstance(statement, (ast.Continue, ast.Break)):
        statement = around[-2]
    last = statement.end_lineno or statement.lineno
    if isinstance(body := getattr(statement, "body", None), list):
        last = max(statement.lineno, body[0].lineno - 1)
    return range(statement.lineno, last + 1)


_own: dict[str, Path] = {}
"""In a worker: its folder and its copy of the tree."""


def _start_worker(parent: str) -> None:
    """A worker: a copy of the tree of its own, and the large libraries."""
    die_with_parent(os.getppid(), signal.SIGKILL)
    for name in ("torch", "transformers", "trl", "peft", "datasets", "pyarrow", "hypothesis", "pydantic"):
        with contextlib.suppress(ImportError):
            __import__(name)
    folder = Path(parent, str(os.getpid()))
    folder.mkdir()
    _own.update(folder=folder, tree=copy_of_tree(folder))


def _measure_baseline(file: str) -> Baseline:
    """In a worker: one test file without a mutant."""
    seen = _own["folder"] / f"{file}.coverage"
    for _ in range(2):  # a machine that is busy for a moment costs no file
        passed, took = run_tests(_own["tree"], [f"tests/{file}"], timeout_s=1800, coverage_file=seen)
        if passed:
            break
    return Baseline(file, took if passed else None, _own["tree"], seen)


def _judge(job: tuple[Mutant, Sequence[Baseline]]) -> MutantVerdict:
    """In a worker: what the tests say that execute the mutant's line, those of the quickest file first."""
    mutant, baselines = job
    target, seconds, asked = _own["tree"] / mutant.path, 0.0, 0
    source = target.read_bytes()
    for baseline in baselines:
        tests = baseline.executing(mutant, source)
        if not tests:
            continue
        try:
            target.write_bytes(mutant.apply(source))
            passed, took = run_tests(_own["tree"], tests, timeout_s=SECONDS_MORE + 5 * (baseline.seconds or 0))
        finally:
            target.write_bytes(source)
        seconds, asked = seconds + took, asked + 1
        if not passed:
            return MutantVerdict(mutant, "killed", baseline.file, seconds)
    return MutantVerdict(mutant, "survived" if asked else "no tests", "", seconds)


def judge_mutants(mutants: Sequence[Mutant], workers: int) -> Iterator[MutantVerdict]:
    """The verdict of every mutant, as they come; each test file is measured once without a mutant before."""
    files = sorted({file for mutant in mutants for file in own_tests(mutant.path)})
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as parent,
        ProcessPoolExecutor(workers, context, _start_worker, (parent,)) as pool,  # its workers may have children
    ):
        baselines = {}
        for future in as_completed([pool.submit(_measure_baseline, file) for file in files]):
            one = future.result()
            baselines[one.file] = one
            usual = f"{one.seconds:.0f} s" if one.seconds is not None else "fails: it is not counted"
            sys.stderr.write(f"{one.file} without a mutant: {usual}\n")
        jobs = []
        for mutant in mutants:
            there = [baselines[file] for file in own_tests(mutant.path) if baselines[file].seconds is not None]
            jobs.append((mutant, sorted(there, key=lambda one: one.seconds or 0)))
        waiting = [pool.submit(_judge, job) for job in jobs]
        for count, judged in enumerate(as_completed(waiting), 1):
            verdict = judged.result()
            result = f"{verdict.verdict} in {verdict.seconds:.0f} s: {verdict.mutant}"
            sys.stderr.write(f"[{count}/{len(mutants)}] {result}\n")
            yield verdict


def all_mutants() -> list[Mutant]:
    """Every mutant of the packages that have tests of their own, in the order of files and lines."""
    paths = [path for package in OWN_TESTS for path in sorted((ROOT / PACKAGE / package).rglob("*.py"))]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    return [mutant for path, text in texts.items() for mutant in find_mutants(path, text)]


def _is_code(mutant: Mutant) -> bool:
    try:
        ast.parse(mutant.apply((ROOT / mutant.path).read_bytes()))
    except SyntaxError:
        return False
    return True


def score(verdicts: Sequence[MutantVerdict]) -> dict[str, Any]:
    def share(some: Sequence[MutantVerdict]) -> dict[str, Any]:
        killed = sum(verdict.verdict == "killed" for verdict in some)
        return {"mutants": len(some), "killed": killed, "share": round(killed / len(some), 4) if some else None}

    packages = sorted({verdict.mutant.path.split("/")[1] for verdict in verdicts})
    by_package = {name: share([v for v in verdicts if v.mutant.path.split("/")[1] == name]) for name in packages}
    return {**share(verdicts), "by_package": by_package}


def main() -> None:
    """Draw and judge the mutants that MUTANTS= and SEED= ask for, and write the verdicts to OUT= after each."""
    seed, out = int(os.environ.get("SEED") or 0), os.environ.get("OUT")
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    everything = all_mutants()
    # shuffled whole and cut: more mutants with the same seed hold the smaller sample
    random.Random(seed).shuffle(everything)
    drawn = list(itertools.islice(filter(_is_code, everything), int(os.environ.get("MUTANTS") or 200)))
    verdicts: list[MutantVerdict] = []
    rows: list[dict[str, Any]] = []
    for verdict in judge_mutants(drawn, os.cpu_count() or 1):
        verdicts.append(verdict)
        judged = {"verdict": verdict.verdict, "by": verdict.by, "seconds": round(verdict.seconds, 1)}
        rows.append(asdict(verdict.mutant) | judged)
        if out:  # a run that is stopped leaves what it found
            rows.sort(key=lambda row: (row["path"], row["start"]))
            report = {"seed": seed, "drawn_from": len(everything), **report_header(), **score(verdicts)}
            write_json(Path(out), {**report, "verdicts": rows})
    for verdict in verdicts:
        if verdict.verdict != "killed":
            print(f"{verdict.verdict}: {verdict.mutant}")
    result = score(verdicts)
    print(f"{result['killed']} of {result['mutants']} mutants killed ({result['share']:.1%})")


if __name__ == "__main__":
    main()
