"""What a user may set, and how a mistake is named.

Begin with `schema/__init__.py`: the configuration of nmt-train, section by section. `compose.py` checks composed
values against the schema and words the errors; `keys.py` says which keys hold paths and names. The values themselves
stand in `configs/`.
"""
