"""The command line: `graphrt generate`, `capture`, `replay`, `bench decode`, `bench serve`, `plan` and `env`."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Annotated

import typer

from graphrt import __version__
from graphrt.cli.options import (
    CaptureOptions,
    DecodeOptions,
    EnvOptions,
    GenerateOptions,
    PlanOptions,
    ReplayOptions,
    ServeOptions,
    add_command,
)
from graphrt.kernels.errors import GraphRTError

_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE, errno.EBADF)

app = typer.Typer(
    help="The decode step of a language model: captured CUDA graphs, paged attention, in-graph sampling.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Benchmarks, against the memory floor of the same run.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Run the command line.

    It exits with 1 and one line on standard error after a graphrt error or if its output cannot be written, and with
    130 after Ctrl-C.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # escape characters that an ASCII terminal cannot show
    if sys.stdout is None:  # as after >&-
        _fail("OutputError", "standard output is closed; redirect it to a file or to /dev/null")
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:  # while options are parsed; add_command handles it in a command
        sys.exit(130)
    except GraphRTError as error:
        _fail(type(error).__name__, str(error))
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_ERRORS:
            raise
        _discard_output()
        _fail("OutputError", f"standard output: {error.strerror}")


def _fail(kind: str, text: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # standard error cannot be written, but the exit code still reports it
            print(f"{kind}: {text}", file=sys.stderr, flush=True)
    sys.exit(1)


def _discard_output() -> None:
    """Discard buffered output, because Python would write it at exit and fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"graphrt {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


add_command(app, "generate", GenerateOptions)
add_command(app, "capture", CaptureOptions)
add_command(app, "replay", ReplayOptions)
add_command(bench_app, "decode", DecodeOptions)
add_command(bench_app, "serve", ServeOptions)
add_command(app, "plan", PlanOptions)
add_command(app, "env", EnvOptions)
