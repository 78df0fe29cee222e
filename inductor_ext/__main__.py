"""``python -m inductor_ext demo | doctor | support | bench``."""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS = {
    "demo": "embed sentences with MiniLM in FP8 and show what the plugin fuses",
    "doctor": "show versions, libraries and flags, and how to mend what is missing",
    "support": "list every op: its kernels, and what torch.compile makes of it",
    "bench": "measure the kernels and chains on this machine",
}


def main(argv: list[str]) -> int:
    """Run a command; returns the exit code."""
    if not argv or argv[0] in ("-h", "--help") or argv[0] not in COMMANDS:
        print("usage: python -m inductor_ext COMMAND [options]\n")
        for name, what in COMMANDS.items():
            print(f"  {name:8} {what}")
        print("\npython -m inductor_ext COMMAND --help shows the options of a command")
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    return int(import_module(f"inductor_ext.{argv[0]}").main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
