"""Files: read, compared, replaced and removed beneath a root, never half there.

``contents`` is what a reconciler calls; ``roots`` says where a path may lead, ``replacement``
how a file is exchanged.
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
