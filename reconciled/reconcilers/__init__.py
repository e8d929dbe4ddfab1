"""The built-in reconcilers, which import reconciled.api alone, as plugins do."""
