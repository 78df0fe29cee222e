"""Fork a fresh process for each request, from a parent that has imported torch and not us.

A process that imports torch and Inductor from the start takes four seconds; a fork of one that
has takes none.  A request is a line of JSON: {"step", "args", "env", "answer"}; "step" names a
function of ``steps``, and what it returns is written as JSON to the file "answer".
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import steps
import torch
import torch._inductor.compile_fx
import torch._inductor.config

torch._inductor.config.cpp_cache_precompile_headers = False  # they cost more than they save
torch.set_num_threads(1)
assert not any(name.split(".")[0] == "inductor_ext" for name in sys.modules)

for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        try:
            os.environ.update(request["env"])
            answer = {"result": getattr(steps, request["step"])(**request["args"])}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        Path(request["answer"]).write_text(json.dumps(answer))
        sys.stderr.flush()
        os._exit(0)
    os.waitpid(child, 0)
    print("done", flush=True)
