"""File formats and folders: strict YAML and JSON, atomic writes, locks."""
