"""Files: read, compared, atomically replaced and removed beneath a root directory.

``async_files`` holds what a reconciler calls. ``path_resolution`` confines paths to the root, and
``replacement`` compares and replaces one file.
"""

from reconciled.files.async_files import (
    Comparison,
    FileRefused,
    Removed,
    Replaced,
    compare_file,
    digest_of,
    make_directory,
    read_file,
    remove_file,
    remove_temporary,
    replace_file,
    temporary_name,
)

__all__ = [
    "Comparison",
    "FileRefused",
    "Removed",
    "Replaced",
    "compare_file",
    "digest_of",
    "make_directory",
    "read_file",
    "remove_file",
    "remove_temporary",
    "replace_file",
    "temporary_name",
]
