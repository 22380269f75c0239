"""COMET (Rei et al. 2020): translation quality as a neural model predicts it, with the package unbabel-comet."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch

CHECKPOINT = ".ckpt"  # ending of a model's path
BATCH = 16  # sentences


class Comet:
    """Scores translations with a COMET model, which reads source, translation and reference."""

    def __init__(self, model: Any, device: torch.device) -> None:  # noqa: ANN401
        """model: a CometModel of unbabel-comet 2."""
        self.model, self.device = model.eval().to(device), device

    @classmethod
    def load(cls, name: str, device: torch.device) -> Self:
        """Load a checkpoint (a path that ends in .ckpt), or a model of the Hugging Face hub, which is downloaded once.

        Raises ValueError without the package, or if the model cannot be loaded.
        """
        if find_spec("comet") is None:
            raise ValueError("COMET needs another package: pip install unbabel-comet")
        local = name.endswith(CHECKPOINT)
        if local and not Path(name).is_file():
            raise ValueError("no such file; give the checkpoint of a COMET model, or the name of one on the hub")
        try:
            from comet import download_model, load_from_checkpoint

            return cls(load_from_checkpoint(name if local else download_model(name)), device)
        except Exception as error:  # the package, its parts and the network raise anything
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            remedy = "is it a COMET model?" if local else "check the name and the network, or give a checkpoint's path"
            raise ValueError(f"the COMET model cannot be loaded ({reason}); {remedy}") from None

    @torch.no_grad()
    def __call__(
        self,
        sources: Sequence[str],
        hypotheses: Sequence[str],
        references: Sequence[str],
        progress: Callable[[int], object] | None = None,
    ) -> list[float]:
        """Score each sentence; their mean is the score of the corpus. Higher is better, about 1 the best."""
        triples = zip(sources, hypotheses, references, strict=True)
        samples = [dict(zip(("src", "mt", "ref"), triple, strict=True)) for triple in triples]
        order = sorted(range(len(samples)), key=lambda i: len(sources[i]))  # little padding
        scores = [0.0] * len(samples)
        # model.predict() starts a Lightning Trainer, which would join the process group of torchrun or Slurm.
        for start in range(0, len(order), BATCH):
            indices = order[start : start + BATCH]
            batch = self.model.prepare_for_inference([samples[i] for i in indices])
            batch = self.model.transfer_batch_to_device(batch, self.device, 0)
            for i, score in zip(indices, self.model.predict_step(batch)["scores"].tolist(), strict=True):
                scores[i] = score
            if progress is not None:
                progress(len(indices))
        return scores
