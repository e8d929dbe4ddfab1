"""The SQLite store: schema, rows, the single writer, and the checks after a crash."""
