"""Wrong formulas, each put into the production code on purpose, and the test that must notice it.

A mutation is a piece of source text, what replaces it, and the test that then fails; the lists are in
``mutations_of_*.py``. ``run`` collects the tests in one process and forks it for each mutation, and once for each test
without any, so that nothing a test caches reaches another.
"""

from __future__ import annotations

import builtins
import dis
import gc
import importlib
import inspect
import json
import os
import signal
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

import ranks

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One wrong formula in one module."""

    name: str
    why: str  # the wrong formula, in a sentence
    module: str
    old: str  # source text that occurs exactly once in the module
    new: str
    killed_by: str  # node id of the test that fails, parameters included
    is_long: bool = False  # whether that test starts ranks or takes seconds

    @cached_property
    def changed_source(self) -> str:
        """The module's source with the wrong formula.

        Raises:
            AssertionError: the text to replace occurs not once, but never or several times.
        """
        spec = importlib.util.find_spec(self.module)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).read_text(encoding="utf-8")
        count = source.count(self.old)
        assert count == 1, (
            f"mutation {self.name!r} no longer matches the source of {self.module}: its text must occur exactly once, "
            f"found {count} times; update its entry in tests/mutations_of_*.py:\n{self.old}"
        )
        return source.replace(self.old, self.new)


def apply(mutation: Mutation) -> None:
    """Give the module's functions and methods the code of the changed source, whoever holds them already."""
    module = importlib.import_module(mutation.module)
    changed: dict[str, Any] = {"__name__": module.__name__, "__file__": module.__file__}
    exec(compile(mutation.changed_source, str(module.__file__), "exec", dont_inherit=True), changed)
    assert _take_code(vars(module), changed, module.__name__) > 0, f"mutation {mutation.name!r} changes no function"


def _take_code(olds: Any, news: Any, module_name: str) -> int:
    """Number of functions whose code changed."""
    count = 0
    for name, new in dict(news).items():
        old = olds.get(name)
        if inspect.isclass(new) and new.__module__ == module_name:
            count += _take_code(vars(old), vars(new), module_name)
        for before, after in zip(_functions(old), _functions(new), strict=False):
            if after.__module__ == module_name and before.__code__ != after.__code__:
                unknown = _globals_of(after.__code__) - before.__globals__.keys() - vars(builtins).keys()
                assert not unknown, (
                    f"{module_name} does not have {unknown}: the test would fail of a name, not a formula"
                )
                before.__code__ = after.__code__
                count += 1
    return count


def _globals_of(code: CodeType) -> set[str]:
    """Names that code, and code within it, looks up in its module."""
    found = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    return found.union(*(_globals_of(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _functions(value: Any) -> list[FunctionType]:
    """The plain functions behind a function, a decorated one, a static method or a property."""
    found = [value.fget] if isinstance(value, property) else [getattr(value, "__func__", value)]
    return [inspect.unwrap(f) for f in found if isinstance(f, FunctionType)]


@dataclass(slots=True)
class Outcome:
    """What became of a test under a mutation."""

    passed: list[str] = field(default_factory=list[str])  # when: setup, call, teardown
    failed: dict[str, str] = field(default_factory=dict[str, str])  # when -> why
    seconds: float = 0.0


Outcomes = dict[tuple[str, str | None], Outcome]  # (node id, name of the mutation or None)


def run(mutations: Sequence[Mutation], *, timeout_s: float) -> Outcomes:
    """Run each mutation's test under the mutation, and once without.

    Raises:
        AssertionError: the tests could not be collected, or did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        folder = Path(name)
        process = ranks.server().Process(target=_main, args=(folder, list(mutations)))
        process.start()
        process.join(timeout_s)
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)  # the tests and their ranks too
            process.join()
        output = (folder / "output").read_text(errors="replace")
        assert process.exitcode == 0, f"pytest ended with {process.exitcode} (limit {timeout_s} s):\n{output[-4000:]}"
        outcomes: Outcomes = {}
        for line in (folder / "reports").read_text().splitlines():
            node_id, mutation, when, seconds, why = json.loads(line)
            outcome = outcomes.setdefault((node_id, mutation), Outcome())
            outcome.seconds += seconds
            if why is None:
                outcome.passed.append(when)
            else:
                outcome.failed[when] = why
        return outcomes


def _main(folder: Path, mutations: list[Mutation]) -> None:
    os.setsid()
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(ROOT)
    os.environ |= {
        "CI": "1",  # hypothesis: the same examples every time, and none stored
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # loading all takes longer than most tests
    }
    ranks.start_method = "fork"
    node_ids = sorted({mutation.killed_by for mutation in mutations})
    options = ["-qs", "-m", "", "--tb=short", "--assert=plain", "-p", "no:cacheprovider", "-p", "pytest_timeout"]
    raise SystemExit(int(pytest.main([*options, *node_ids], plugins=[_Plugin(folder / "reports", mutations)])))


class _Plugin:
    """Runs the collected tests in forks of this process: all without a mutation, and one under each."""

    def __init__(self, reports: Path, mutations: list[Mutation]) -> None:
        self._reports = reports
        self._mutations = mutations
        self._current: Mutation | None = None

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.freeze()  # a collection in a fork would copy every page
        self._fork(session.items, None)
        for mutation in self._mutations:
            self._fork([item for item in session.items if item.nodeid == mutation.killed_by], mutation)
        return True

    def _fork(self, items: Sequence[pytest.Item], mutation: Mutation | None) -> None:
        if pid := os.fork():
            status = os.waitpid(pid, 0)[1]
            assert status == 0, f"the tests did not run to their end under {mutation}: wait status {status}"
            return
        is_done = False
        try:
            self._current = mutation
            if mutation is not None:
                apply(mutation)
            for item in items:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            is_done = True
        finally:
            if not is_done:
                traceback.print_exc()
            os._exit(0 if is_done else 1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        why = None if report.passed else report.longreprtext[-1500:] or report.outcome
        line = json.dumps([report.nodeid, self._current and self._current.name, report.when, report.duration, why])
        with self._reports.open("a") as file:
            file.write(line + "\n")
