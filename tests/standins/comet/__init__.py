"""Stand-in for the package unbabel-comet: its score counts the words that hypothesis and reference share.

It has the parts of a CometModel that nmt uses. Its hub has one model; a checkpoint is any file with the text "comet".
"""

from pathlib import Path
from typing import Any

import torch


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def prepare_for_inference(self, samples: list[dict[str, str]]) -> dict[str, Any]:
        assert all(sample.keys() == {"src", "mt", "ref"} for sample in samples)
        words = [(set(sample["mt"].split()), set(sample["ref"].split())) for sample in samples]
        return {"shared": torch.tensor([len(mt & ref) / max(1, len(mt | ref)) for mt, ref in words])}

    def transfer_batch_to_device(self, batch: dict[str, Any], device: torch.device, _: int) -> dict[str, Any]:
        return {name: tensor.to(device) for name, tensor in batch.items()}

    def predict_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        assert not self.training
        return {"scores": self.scale * batch["shared"]}


def download_model(name: str) -> str:
    if name != "Unbabel/wmt22-comet-da":
        raise KeyError(f"Model '{name}' not supported by COMET.")
    return __file__


def load_from_checkpoint(path: str) -> Model:
    if path != __file__ and Path(path).read_text() != "comet":
        raise RuntimeError("PytorchStreamReader failed\nfinding central directory")
    return Model().train()
