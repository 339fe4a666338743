"""Work done in a process of its own, so that what it imports and converts leaves no mark on the memory of the one that trains.

The child is `python -m MODULE`. It reads one request (JSON) from its standard input and writes one answer (JSON) to its standard output.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mesp_mlx.errors import UserError
from mesp_mlx.interrupt import Interrupts


def ask(module: str, request: dict[str, Any], doing: str, environment: Mapping[str, str] | None = None, quiet: bool = True) -> dict[str, Any]:
    """The child's answer. Unless quiet, what it writes to standard error is seen at once.

    Raises:
        UserError: the child's own, or that it ended without an answer; `doing` says what for.
    """
    found_as_here = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "PYTHONUTF8": "1"}
    command = [sys.executable, "-m", module]
    errors = subprocess.PIPE if quiet else None
    environment = {**os.environ, **found_as_here, **(environment or {})}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment)
    try:
        output, said = process.communicate(json.dumps(request).encode())
    except BaseException:
        _end(process)
        raise
    try:
        answer = json.loads(output)
    except ValueError:
        last = "".join((said or b"").decode(errors="replace").strip().splitlines()[-1:])
        raise UserError(f"{doing} failed: {last or f'the process that does it ended with status {process.returncode}, perhaps for lack of memory'}.") from None
    if "error" in answer:
        raise UserError(answer["error"])
    return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a child that was interrupted too to clean up; ask one that was not to; end one that does not listen."""
    for ask_for_it, seconds in ((lambda: None, 1), (process.terminate, 10), (process.kill, None)):
        ask_for_it()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return


def answer(serve: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The child's side: serve the request; a UserError travels back as the answer."""
    request = json.load(sys.stdin)
    answer_to = os.dup(1)
    os.dup2(2, 1)  # whatever libraries print goes to standard error: standard output is for the answer alone
    try:
        with Interrupts():
            result = serve(request)
    except UserError as error:
        result = {"error": str(error)}
    except KeyboardInterrupt:  # the parent was interrupted too, and says so
        sys.exit(130)
    with open(answer_to, "w") as file:
        json.dump(result, file)
