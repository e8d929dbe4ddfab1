"""What people write: configuration and manifests, read strictly, every fault with its place."""
