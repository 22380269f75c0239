"""Compare systems: scores, significance, BLEU by source length, examples, cost."""
