# SPDX-License-Identifier: Apache-2.0
"""What this package's metadata (made of pyproject.toml) requires, and what is there."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

PACKAGE = "torchax-dflash"


@dataclass(frozen=True)
class Required:
    """A package that ours asks for.

    Attributes:
        name: its canonical name, like `huggingface-hub`.
        versions: which ones will do.
        extra: of ours that it belongs to, or "" if it is always needed.
    """

    name: str
    versions: SpecifierSet
    extra: str

    @property
    def install(self) -> str:
        """The command that installs it."""
        package = f"'{PACKAGE}[{self.extra}]'" if self.extra else PACKAGE
        return f"pip install {package}"


def required_packages() -> list[Required]:
    """Each package that is required, those without an extra first.

    One that several extras ask for is listed once, under an extra for users.

    Raises:
        PackageNotFoundError: this package is not installed.
    """
    extras = metadata.metadata(PACKAGE).get_all("Provides-Extra") or []
    extras.sort(key="dev".__eq__)  # last: it repeats others
    found: dict[str, Required] = {}
    for extra in ["", *extras]:
        for line in metadata.requires(PACKAGE) or []:
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is None or marker.evaluate({"extra": extra}):
                name = canonicalize_name(requirement.name)
                found.setdefault(name, Required(name, requirement.specifier, extra))
    return list(found.values())


def installed_version(*names: str) -> str | None:
    """The version of the first of these packages that is installed, or None."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def remedy_for(module: str) -> str | None:
    """What to do about a module that is not there, or None if it is not required."""
    name = canonicalize_name(module.partition(".")[0])
    try:
        required = [one for one in required_packages() if one.name == name]
    except metadata.PackageNotFoundError:
        return None
    return f"Install it with {required[0].install}." if required else None
