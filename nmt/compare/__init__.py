"""Runs side by side: ranking, tests, tables and pages.

Begin with `compare.py`; `entry.py` reads runs and other systems, `tables.py` and `report.py` write tables, `page.py`
the HTML page, `jobs.py` the table of a sweep.
"""
