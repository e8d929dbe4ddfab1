"""The SQLite store: schema, rows, its single writer, and judging what a crash left."""
