"""Profiles on disk: one JSON file for each model and device, in a folder beside the store."""

from __future__ import annotations

import json
import os
from pathlib import Path

from cacheblend.store.errors import ProfileError

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
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProfileError(f"the profile {path} cannot be read: {error}; run `cacheblend profile` again") from error
    if not isinstance(values, dict):
        raise ProfileError(f"the profile {path} is not a JSON object; run `cacheblend profile` again")
    return Profile.from_dict(values)


def write_profile(directory: Path, profile: Profile) -> Path:
    """Keep a profile, in place of an older one of the same model and device; gives its file.

    Raises:
        ProfileError: the folder cannot be written.
    """
    path = directory / profile_name(profile.model, profile.device)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(profile.as_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ProfileError(f"the profile cannot be written to {directory}: {error}; give a folder that can be") from error
    return path
