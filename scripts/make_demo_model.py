"""Make the model that comes with the package, nmt/system/demo.nmt: `bahdanau`, trained on
the demo corpus.

    python scripts/make_demo_model.py DIR [OVERRIDE ...]

DIR is the directory of the run; an existing run continues. Takes about three minutes on two cores.
"""

import subprocess
import sys
from pathlib import Path

from runs import command

from nmt.config.errors import quoted

EPOCHS = 3
OUTPUT = Path(__file__).resolve().parents[1] / "nmt" / "system" / "demo.nmt"
SENTENCE = "the old man who does not visit the European Economic Area sees a small red house ."


def main() -> None:
    directory, *overrides = sys.argv[1:]
    recipe = [f"training.max_epochs={EPOCHS}", f"hydra.run.dir={quoted(directory)}"]
    subprocess.run([command("nmt-train"), *recipe, *overrides], check=True)
    export = [f"run={quoted(directory)}", f"output={quoted(OUTPUT)}", f"sentence={quoted(SENTENCE)}", "license=MIT"]
    subprocess.run([command("nmt-export"), *export, "precision=fp16", "overwrite=true"], check=True)


if __name__ == "__main__":
    main()
