"""Types and limits of every configuration value. Its defaults and their reasons are in configs/**.yaml only."""

from nmt.config.schema.attention import *  # noqa: F403
from nmt.config.schema.commands import *  # noqa: F403
from nmt.config.schema.data import *  # noqa: F403
from nmt.config.schema.model import *  # noqa: F403
from nmt.config.schema.record import *  # noqa: F403
from nmt.config.schema.training import *  # noqa: F403
