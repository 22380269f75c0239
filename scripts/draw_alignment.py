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
        print(draw(arguments))
    except (UserError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def draw(arguments: argparse.Namespace) -> str:
    """Write the picture, and return the translation. Raises UserError if there is no attention or no such folder."""
    if arguments.output.is_dir() or not arguments.output.absolute().parent.is_dir():
        raise UserError(f"{arguments.output}: must be a file in an existing folder")
    translator = Translator.load(arguments.run)
    translation = translator.translate([arguments.sentence])[0]
    if arguments.saliency:
        shares = explain(translator, arguments.sentence, translation.tokens).saliency
        assert shares is not None  # only an ensemble has no saliency
        figure = draw_alignment(shares, translation.source_tokens, translation.tokens, meaning="share of the gradient")
    elif translation.alignment is None:
        raise UserError(f"{arguments.run} has no attention to draw, or the sentence is empty")
    else:
        figure = draw_alignment(translation.alignment, translation.source_tokens, translation.tokens)
    save(figure, arguments.output)
    return translation.text


if __name__ == "__main__":
    main()
