"""Scheduled sampling: the decoder learns to go on from its own words too (Bengio et al. 2015).

In two passes, which serve every decoder and attention (Mihaylova and Martins 2019): the first reads the given words and
says, without gradient, which one it would choose at each place; the second, which is trained, reads a mixture. So a
choice knows the given words before it, not the chosen ones. Shapes: B batch, T target positions.
"""

import torch
from torch import Tensor

from nmt.data.batching import Batch
from nmt.data.tokenizer import Tokenizer
from nmt.model.seq2seq import Seq2Seq
from nmt.ops.output_layer import most_probable


class ScheduledSampling:
    """Replaces previous words by the model's own, with a probability that rises linearly (Bengio et al. 2015, 2.4)."""

    def __init__(self, model: Seq2Seq, probability: float, steps: int, target: Tokenizer) -> None:
        """`probability` is reached after `steps` updates."""
        self.model, self.final, self.steps, self.pad = model, probability, steps, target.pad
        self.banned = torch.tensor([target.pad, target.bos], device=model.output.bias.device)

    def probability(self, step: int) -> float:
        """At the update number `step`, from 1."""
        return self.final * min(1.0, step / self.steps)

    def __call__(self, batch: Batch, step: int) -> Batch:
        """The batch with other words to go on from; <s> and padding stay. torch's global generator decides."""
        first, given = batch.target_in[:, :1], batch.target_in[:, 1:]
        drawn = torch.rand(given.shape, device=given.device) < self.probability(step)
        mixed = torch.where(drawn & (given != self.pad), self._own(batch)[:, :-1], given)
        return batch._replace(target_in=torch.cat([first, mixed], dim=1))

    @torch.no_grad()
    def _own(self, batch: Batch) -> Tensor:
        """int64 (B, T): what the model, without dropout, thinks most probable at each place."""
        self.model.eval()
        readouts = self.model(batch.source, batch.lengths, batch.target_in).readouts.flatten(0, 1)
        self.model.train()
        torch.clear_autocast_cache()  # torch before 2.10 would give the trained pass these copies, without a gradient
        return most_probable(*self.model.output.operands(readouts), self.banned).view(batch.target_in.shape)
