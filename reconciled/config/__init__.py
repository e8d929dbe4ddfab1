"""Configuration and manifests: read strictly, every fault with its file, line and column."""
