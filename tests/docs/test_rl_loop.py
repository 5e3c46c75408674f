"""The page "loop by hand" quotes examples/rl_loop.py, and the example runs standalone."""

import os
import re
import subprocess
import sys

from doc_blocks import ROOT, blocks

EXAMPLE = ROOT / "examples" / "rl_loop.py"
PAGE = ROOT / "docs" / "tutorial" / "loop-by-hand.md"
VERBS = ("sample", "score", "update_weights", "forward_backward", "optim_step", "save_state", "load_state")


def test_page_quotes_the_whole_example_in_order() -> None:
    parts = [part.strip() for part in re.split(r"^# --- .*\n", EXAMPLE.read_text(), flags=re.MULTILINE)[1:]]
    quoted = [text for block in blocks(PAGE) if (text := block.text.strip()) in parts]
    assert quoted == parts


def test_example_runs_standalone_and_uses_every_verb() -> None:
    text = EXAMPLE.read_text()
    for verb in VERBS:
        assert re.search(rf"\b(?:engine|learner|other|one)\.{verb}\(", text), verb
    command = [sys.executable, str(EXAMPLE), "3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    before, after = map(float, re.findall(r"\d\.\d\d", ran.stdout)[1:])
    assert after > before  # three steps already raise the reward
