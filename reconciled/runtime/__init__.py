"""The tree: what runs as tasks, who owns them, and how they end."""
