"""Runs side by side: ranking, tests, tables, pictures and a page.

Begin with `compare.py`, which ranks and tests; `entry.py` reads runs and other systems, `report.py` writes all files:
tables with the columns of `columns.py`, the pictures of `pictures.py`, and the HTML page. `jobs.py` reports a sweep.
"""
