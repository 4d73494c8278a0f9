"""A process that holds a run and writes to it: ``holder.py URL NAME LINES``.

It says ``held`` on its output once it has the lock, and ``refused: ...`` when it may not write.
"""

from __future__ import annotations

import sys
import time

from evidence.errors import ConflictError
from evidence.run import Run


def main(url: str, name: str, lines: str) -> int:
    run = Run.open(url)
    try:
        with run.lock():
            print("held", flush=True)
            for number in range(int(lines)):
                run.append("line", by=name, number=number)
                run.replace_result({"status": "running", "by": name, "number": number})
                time.sleep(0.02)
    except ConflictError as error:
        print(f"refused: {error}", flush=True)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
