"""The user's text: files, tables, the hub."""
