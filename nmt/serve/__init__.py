"""The page to try models, and the service over HTTP.

Begin with `app.py`, the routes, then `service.py`, which answers requests from a queue that they share; `server.py`
refuses what the rules do not allow and runs it all, `static/` is the page.
"""
