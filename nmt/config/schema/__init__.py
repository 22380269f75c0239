"""The configurations of the six commands (`commands.py`), made of the sections in the other modules of this folder."""

from nmt.config.schema.commands import (
    CompareConfig,
    EvaluateConfig,
    ExportConfig,
    ServeConfig,
    TrainConfig,
    TranslateConfig,
)

__all__ = ["CompareConfig", "EvaluateConfig", "ExportConfig", "ServeConfig", "TrainConfig", "TranslateConfig"]
