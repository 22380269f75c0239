"""scripts/check_sentences.py names long sentences of prose, and counts nothing else."""

from conftest import script

LONG = "Word " * 25 + "end"
PAGE = f"""# Title

A short sentence about `nmt-train`. {LONG},
see eq. 4. Another [short one](long.md#with-an-anchor).

- {LONG}.

```bash
{LONG}
```

| {LONG} |
|---|

<!-- parts -->
{LONG}
<!-- end -->
"""


def test_long_sentences_are_found_and_nothing_but_prose_counts() -> None:
    check_sentences = script("check_sentences")
    long = [(sentence.line, sentence.words) for sentence in check_sentences.sentences(PAGE) if sentence.words > 25]
    assert long == [(3, 29), (6, 26)]
