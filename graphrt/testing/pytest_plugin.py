"""A pytest plugin for CUDA graphs: two fixtures and a marker. It is loaded wherever graphrt is installed.

    def test_step(graph_audit):
        graph_audit(graph, memory)                     fails with the findings: pointers that the graph should not hold

    def test_replays(graph_verify):
        graph_verify(step, make_inputs)                fails with the report: replays that differ from eager runs

    @pytest.mark.capture_safe
    def test_capture():                                fails where a capture waits, allocates outside of its pool,
        ...                                            compiles a kernel, or launches on another stream

    @pytest.mark.capture_safe(compile="the autotuner runs here on purpose")

The marker watches the captures of the test's body, whoever makes them; see graphrt.testing.capture_watch for what each
rule sees, and what it cannot see. Captures in fixtures are not watched: a test whose body captures nothing warns.

Nothing is imported but pytest until a fixture or the marker is used. `-p no:graphrt.testing.pytest_plugin` switches the
plugin off.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest

_MARKER = "capture_safe"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(sync=, allocate=, compile=, stream=): fail where a CUDA graph capture waits, allocates outside of "
        "its pool, compiles a kernel or launches on another stream; a rule with a reason is left out",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    marker = item.get_closest_marker(_MARKER)
    if marker is None:
        return (yield)
    from graphrt.kernels.errors import ConfigError
    from graphrt.testing.capture_watch import CaptureWatch

    if marker.args:
        pytest.fail(f"{_MARKER}: expected rules with reasons, got {marker.args}; write compile='why'", pytrace=False)
    try:
        watch = CaptureWatch(marker.kwargs)
    except ConfigError as error:
        pytest.fail(f"{_MARKER}: {error}", pytrace=False)
    with watch:
        try:
            result = yield
        except BaseException:
            if watch.faults:
                item.add_report_section("call", _MARKER, "\n".join(map(str, watch.faults)))
            raise
    if watch.faults:
        pytest.fail("\n".join([f"{_MARKER}:", *map(str, watch.faults)]), pytrace=False)
    if not watch.captures:
        text = f"{_MARKER}: expected a capture in the body of the test, got none; captures in fixtures are not watched"
        item.warn(pytest.PytestWarning(text))
    return result


@pytest.fixture
def graph_audit() -> Callable[..., Any]:
    """`graphrt.capture.inspect.audit.audit`, whose findings fail the test. Returns the Audit."""

    def audited(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        from graphrt.capture.inspect.audit import audit

        return _without_findings(audit(*args, **kwargs))

    return audited


@pytest.fixture
def graph_verify() -> Callable[..., Any]:
    """`graphrt.testing.verify.verify`, whose findings fail the test. Returns the VerifyReport."""

    def verified(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        from graphrt.testing.verify import verify

        return _without_findings(verify(*args, **kwargs))

    return verified


def _without_findings(report: Any) -> Any:
    __tracebackhide__ = True
    if report.findings:
        pytest.fail(str(report))
    return report
