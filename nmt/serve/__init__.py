"""The page to try models, and the service over HTTP.

Begin with `app.py`, which has the routes. Then read `service.py`, which answers requests: their sentences wait in one
queue and are translated in batches. `server.py` refuses requests that the rules do not allow, and runs the server.
`static/` holds the page.
"""
