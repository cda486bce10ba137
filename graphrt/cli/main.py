"""The command line: `graphrt generate`, `capture`, `replay`, `bench decode`, `bench serve` and `env`."""

from __future__ import annotations

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
    """Run the command line. Errors of graphrt, and output that cannot be written, end it with one line and code 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not None, as after >&-
            stream.reconfigure(errors="backslashreplace")  # what an ASCII terminal cannot show
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except GraphRTError as error:
        _fail(type(error).__name__, str(error))
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_ERRORS:
            raise
        _discard_output()
        _fail("OutputError", f"standard output: {error.strerror}")


def _fail(kind: str, text: str) -> None:
    if sys.stderr is not None:
        print(f"{kind}: {text}", file=sys.stderr)
    sys.exit(1)


def _discard_output() -> None:
    """Let what is still buffered go nowhere: Python writes it at exit, and would fail again."""
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
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and end.")
    ] = False,
) -> None:
    pass


# Imported when the command runs: torch and the library take seconds.


def _generate(options: GenerateOptions) -> None:
    from graphrt.cli.generate import run_generate

    run_generate(options)


def _capture(options: CaptureOptions) -> None:
    from graphrt.cli.capture import run_capture

    run_capture(options)


def _replay(options: ReplayOptions) -> None:
    from graphrt.cli.replay import run_replay

    run_replay(options)


def _bench_decode(options: DecodeOptions) -> None:
    from graphrt.cli.bench import run_bench

    run_bench(options)


def _bench_serve(options: ServeOptions) -> None:
    from graphrt.cli.serve import run_serve

    run_serve(options)


def _env(options: EnvOptions) -> None:
    from graphrt.cli.env import run_env

    run_env(options)


add_command(app, "generate", GenerateOptions, _generate)
add_command(app, "capture", CaptureOptions, _capture)
add_command(app, "replay", ReplayOptions, _replay)
add_command(bench_app, "decode", DecodeOptions, _bench_decode)
add_command(bench_app, "serve", ServeOptions, _bench_serve)
add_command(app, "env", EnvOptions, _env)
