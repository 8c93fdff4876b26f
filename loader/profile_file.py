"""Profiles on disk: one JSON file for each model and device, in a folder beside the store."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cacheblend.base.errors import ProfileError
from cacheblend.base.files import make_folder, private_opener

from .profile import Profile, profile_name


def read_profile(directory: Path, *, model: str, device: str) -> Profile | None:
    """The profile of a model on a device; None where none was made.

    Args:
        directory: the folder of profiles.
        model: the model's fingerprint.
        device: as `describe_device` names it.

    Raises:
        ProfileError: the file is damaged, or was measured elsewhere.
    """
    path = directory / profile_name(model, device)
    if not path.is_file():
        return None
    profile = load_profile(path)
    profile.check(model=model, device=device)
    return profile


def load_profile(path: Path) -> Profile:
    """The profile in a file, wherever it was measured.

    Raises:
        ProfileError: the file is missing or damaged.
    """
    return Profile.from_dict(read_object(path, "profile"))


def write_profile(directory: Path, profile: Profile) -> Path:
    """Keep a profile, in place of an older one of the same model and device; gives its file.

    Raises:
        ProfileError: the folder cannot be written.
    """
    path = directory / profile_name(profile.model, profile.device)
    write_object(path, profile.as_dict(), "profile")
    return path


def read_object(path: Path, command: str) -> dict[str, Any]:
    """The JSON object in a file that `cacheblend command` keeps.

    Raises:
        ProfileError: the file is missing or damaged.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path} cannot be read: {error}; run `cacheblend {command}` again") from error
    if not isinstance(values, dict):
        raise ProfileError(f"{path} is not a JSON object; run `cacheblend {command}` again")
    return values


def write_object(path: Path, values: Mapping[str, Any], what: str) -> None:
    """Write a JSON object as a whole, in place of what the file held; its folder is made when missing.

    Raises:
        ProfileError: the folder cannot be written.
    """
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        make_folder(path.parent)
        with open(temporary, "w", encoding="utf-8", opener=private_opener) as file:
            file.write(json.dumps(values, indent=1, allow_nan=False) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise ProfileError(f"the {what} cannot be written to {path.parent}: {error}; give a folder that can be") from error
