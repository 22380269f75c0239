"""Scheduled sampling: the decoder also learns to continue after its own predictions (Bengio et al. 2015).

Two passes serve every decoder and attention (Mihaylova and Martins 2019). The first reads the reference and predicts
every token, without gradient. The second, which is trained, reads a mixture of reference and predictions. So a
prediction depends on the reference's previous tokens, not on earlier predictions. Shapes: B batch, T target positions.
"""

import torch
from torch import Tensor

from nmt.data.batching import Batch
from nmt.data.tokenizer import Tokenizer
from nmt.model.seq2seq import Seq2Seq
from nmt.ops.output_loss import most_probable


class ScheduledSampling:
    """Replaces previous tokens by predictions, with a probability that rises linearly (Bengio et al. 2015, 2.4)."""

    def __init__(self, model: Seq2Seq, probability: float, steps: int, target: Tokenizer) -> None:
        """The final `probability` is reached after `steps` updates."""
        self.model, self.final, self.steps, self.pad = model, probability, steps, target.pad
        self.banned = torch.tensor([target.pad, target.bos], device=model.output.bias.device)

    def probability(self, step: int) -> float:
        """In update number `step`, from 1."""
        return self.final * min(1.0, step / self.steps)

    def __call__(self, batch: Batch, step: int) -> Batch:
        """The batch with some inputs of the decoder replaced; <s> and padding stay. Uses torch's global generator."""
        first, reference = batch.target_in[:, :1], batch.target_in[:, 1:]
        chosen = torch.rand(reference.shape, device=reference.device) < self.probability(step)
        mixed = torch.where(chosen & (reference != self.pad), self._predictions(batch)[:, :-1], reference)
        return batch._replace(target_in=torch.cat([first, mixed], dim=1))

    @torch.no_grad()
    def _predictions(self, batch: Batch) -> Tensor:
        """int64 (B, T): the most probable token at each position, without dropout."""
        self.model.eval()
        readouts = self.model(batch.source, batch.lengths, batch.target_in).readouts.flatten(0, 1)
        self.model.train()
        torch.clear_autocast_cache()  # before 2.10, torch would reuse these casts, which have no gradient, in training
        return most_probable(*self.model.output.operands(readouts), self.banned).view(batch.target_in.shape)
