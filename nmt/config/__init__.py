"""The settings that a user may choose, and the messages for wrong ones.

Begin with `schema/commands.py`: the configuration of nmt-train, section by section. `checks.py` checks plain values
against the schema and words the errors. `schema/base.py` defines which keys may change when a run is resumed. The
default values are in the YAML files of `configs/`.
"""
