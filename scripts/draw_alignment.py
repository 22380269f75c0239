"""Draw the attention of a trained run over one sentence, as in the README.

python scripts/draw_alignment.py RUN "the sentence" OUTPUT.png [--saliency]
"""

import argparse
from pathlib import Path

from nmt import Translator
from nmt.config.errors import UserError
from nmt.explain.explanation import explain
from nmt.translate.heatmap import draw_alignment, save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="run directory")
    parser.add_argument("sentence", help="source sentence")
    parser.add_argument("output", type=Path, help="PNG file to write")
    parser.add_argument("--saliency", action="store_true", help="draw gradients instead of attention")
    arguments = parser.parse_args()
    try:
        print(draw(arguments.run, arguments.sentence, arguments.output, arguments.saliency))
    except (UserError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def draw(run: str | Path, sentence: str, output: Path, gradients: bool) -> str:
    """Write the picture, and return the translation. Raises UserError if there is no attention or no such folder."""
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise UserError(f"{output}: must be a file in an existing folder")
    translator = Translator.load(run)
    translation = translator.translate([sentence])[0]
    if gradients:
        shares = explain(translator, sentence, translation.tokens).saliency
        assert shares is not None  # only an ensemble has no saliency
        figure = draw_alignment(shares, translation.source_tokens, translation.tokens, meaning="share of the gradient")
    elif translation.alignment is None:
        raise UserError(f"{run} has no attention to draw, or the sentence is empty")
    else:
        figure = draw_alignment(translation.alignment, translation.source_tokens, translation.tokens)
    save(figure, output)
    return translation.text


if __name__ == "__main__":
    main()
