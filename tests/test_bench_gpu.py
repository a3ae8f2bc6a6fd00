"""`.ci/bench-gpu`: every part is run, whatever happens to the others, with options that the commands know."""

import json
import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from specdec import cli_bench
from specdec.cli import app

SCRIPT = Path(__file__).parent.parent / ".ci" / "bench-gpu"
STUB = f"""#!{sys.executable}
import json, sys
print(json.dumps(sys.argv[1:]))
sys.exit("verify" in sys.argv)
"""


def test_all_parts_run(tmp_path, monkeypatch):
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    out = tmp_path / "out"
    environment = os.environ | {"PYTHON": str(stub), "OUT": str(out), "TARGET": "MODEL"}
    ran = subprocess.run([SCRIPT], env=environment, capture_output=True, text=True)
    assert ran.returncode == 1 and ran.stdout.count("failed") == 1 and "verify.json" in ran.stdout
    tests = json.loads((out / "tests.txt").read_text())
    assert tests[:4] == ["-m", "pytest", "-q", "tests/verifiers"] and "tests/specdec/test_gpu.py" in tests
    asked = {}
    monkeypatch.setattr(cli_bench, "hand_on", lambda command, options, **read: asked.update({command: options | read}))
    for name in ("verify", "forward", "step"):
        arguments = json.loads((out / f"{name}.json").read_text())
        assert arguments[:2] == ["-c", "from specdec.cli import main; main()"]
        assert CliRunner().invoke(app, arguments[2:]).exit_code == 0
        assert asked[f"bench {name}"]["as_json"]
    assert asked["bench forward"]["target"] == asked["bench step"]["target"] == "MODEL"
