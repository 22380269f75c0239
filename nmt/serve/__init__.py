"""The page to try models, and the service over HTTP.

Begin with `app.py`, the routes, then `service.py`, which answers requests from a queue that they share; `guard.py` and
`server.py` refuse requests and connections beyond the limits, `static/` is the page.
"""
