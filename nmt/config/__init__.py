"""What a user may set, and how a mistake is named.

Begin with `schema/__init__.py`: the configuration of nmt-train, section by section. `compose.py` checks composed
values against the schema and words the errors; `schema/base.py` says what a key may mean to an earlier run. The values
themselves stand in `configs/`.
"""
