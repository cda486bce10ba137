"""A pytest plugin with two fixtures and a marker for testing CUDA graphs. pytest loads it automatically if graphrt is
installed.

    def test_step(graph_audit):
        graph_audit(graph, memory)                     fails if the graph uses memory without an owner

    def test_replays(graph_verify):
        graph_verify(step, make_inputs)                fails if replays differ from eager runs

    @pytest.mark.capture_safe
    def test_capture():                                fails if a capture waits, allocates outside its pool,
        ...                                            compiles a kernel, or launches on another stream

    @pytest.mark.capture_safe(compile="the autotuner runs here on purpose")

The marker watches all captures in the test's body. graphrt.testing.capture_watch describes what each rule detects.
Captures in fixtures are not watched. A marked test without a capture emits a warning.

The plugin imports only pytest until a fixture or the marker is used. `-p no:graphrt.testing.pytest_plugin` disables it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest

_MARKER = "capture_safe"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(sync=, allocate=, compile=, stream=): fail if a CUDA graph capture waits, allocates outside of its "
        "pool, compiles a kernel or launches on another stream; a rule with a reason is not checked",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    marker = item.get_closest_marker(_MARKER)
    if marker is None:
        return (yield)
    from graphrt.kernels.errors import ConfigError
    from graphrt.testing.capture_watch import CaptureWatch

    if marker.args:
        pytest.fail(f"{_MARKER}: expected keyword arguments, got {marker.args}; write compile='reason'", pytrace=False)
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
        text = f"{_MARKER}: the body of the test captures nothing; captures in fixtures are not watched"
        item.warn(pytest.PytestWarning(text))
    return result


@pytest.fixture
def graph_audit() -> Callable[..., Any]:
    """Run `graphrt.graph_checks.audit`, fail the test if there are findings, and return the Audit."""

    def audited(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        from graphrt.capture.inspect.audit import audit

        return _without_findings(audit(*args, **kwargs))

    return audited


@pytest.fixture
def graph_verify() -> Callable[..., Any]:
    """Run `graphrt.graph_checks.verify`, fail the test if there are findings, and return the VerifyReport."""

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
