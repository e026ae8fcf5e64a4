"""Write a directory of files so that its name never shows a part of them, replacing an earlier one in one step."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def write_directory(directory: Path, files: Mapping[str, bytes]) -> None:
    """Create or replace a directory that holds exactly these files.

    1. the files go to a hidden directory beside the target and are flushed to disk
    2. it takes the target's name in one step; an earlier directory is exchanged with it and then removed
    3. whatever happens, the hidden directory does not stay, unless the process is killed without notice

    Args:
        directory: the target; missing parents are created. An existing one is replaced only if it holds no other
            names than `files`.
        files: contents by file name.

    Raises:
        FileExistsError: the target is a file, or a directory with other things in it.
        OSError: the target cannot be written.

    Source: engineering choice: rename(2), and renameat2(2) with RENAME_EXCHANGE where the system has it.
    """
    target = directory.resolve()
    check_replaceable(target, files)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.parent / f".{target.name}.{secrets.token_hex(8)}.tmp"
    try:
        staging.mkdir()
        for name, content in files.items():
            _write_file(staging / name, content)
        _flush_directory(staging)
        _take_name(staging, target)
        _flush_directory(target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_replaceable(directory: Path, names: Mapping[str, object] | frozenset[str]) -> None:
    """Refuse a target that holds anything but an earlier version of the same files.

    Args:
        directory: the target; it need not exist.
        names: file names that a version of the directory consists of.

    Raises:
        FileExistsError: the target is a file, or a directory with other things in it.

    Source: engineering choice: a mistyped path must not delete a user's files.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise FileExistsError(f"{directory} is a file, not a directory; choose another directory")
    foreign = sorted(path.name for path in directory.iterdir() if path.name not in names)
    if foreign:
        raise FileExistsError(f"{directory} holds other things ({foreign[0]}); choose an empty or a new directory")


def check_writable(directory: Path, names: frozenset[str]) -> None:
    """Try, before work that takes minutes, what `write_directory` will do at its end.

    Args:
        directory: the target; missing parents are created, the target itself is not.
        names: file names that will be written.

    Raises:
        FileExistsError: see `check_replaceable`.
        OSError: the parent directory cannot be created or written.

    Source: engineering choice.
    """
    target = directory.resolve()
    check_replaceable(target, names)
    target.parent.mkdir(parents=True, exist_ok=True)
    probe = target.parent / f".{target.name}.{secrets.token_hex(8)}.tmp"
    probe.mkdir()
    probe.rmdir()


def _write_file(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take_name(staging: Path, target: Path) -> None:
    if not target.exists():
        staging.rename(target)
        return
    # After an exchange the earlier version lies at `staging`, which the caller removes.
    if _exchange(staging, target):
        return
    # Without RENAME_EXCHANGE the name is vacant for an instant; the earlier version returns if the second step fails.
    earlier = staging.with_name(f"{staging.name}.earlier")
    target.rename(earlier)
    try:
        staging.rename(target)
    except BaseException:
        earlier.rename(target)
        raise
    shutil.rmtree(earlier, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    status = renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return bool(status == 0)
