"""Draw the attention of a trained run over one sentence: the picture of the README.

python scripts/draw_alignment.py RUN "the sentence" OUTPUT.png
"""

import argparse
from pathlib import Path

from nmt import Translator
from nmt.report.heatmap import draw_alignment, save


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="run directory")
    parser.add_argument("sentence", help="source sentence")
    parser.add_argument("output", type=Path, help="PNG file to write")
    arguments = parser.parse_args()
    translation = Translator.load(arguments.run).translate([arguments.sentence])[0]
    if translation.alignment is None:
        parser.error(f"{arguments.run} has no attention to draw, or the sentence is empty")
    save(draw_alignment(translation.alignment, translation.source_tokens, translation.tokens), arguments.output)
    print(translation.text)


if __name__ == "__main__":
    main()
