"""YAML as plain data with positions, read strictly and within limits."""
