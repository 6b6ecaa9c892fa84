# SPDX-License-Identifier: Apache-2.0
"""What `doctor` finds, in the shape of its --json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """Something that is wrong.

    Attributes:
        message: what, what was expected, and what was found.
        remedy: what to do about it.
        stops_generate: `generate` will fail, at least without further options.
    """

    message: str
    remedy: str
    stops_generate: bool = False


@dataclass(frozen=True)
class Package:
    """An installed version beside those that are required, "" for any."""

    name: str
    installed: str | None
    required: str
    fits: bool


@dataclass(frozen=True)
class Devices:
    """What JAX runs on; no backend if it does not start."""

    backend: str | None
    devices: list[str]


@dataclass(frozen=True)
class Plugin:
    """How vLLM sees this package; `platform` is the class that it will use."""

    vllm: str | None
    has_entry_point: bool
    platform: str | None


@dataclass(frozen=True)
class Cache:
    """A folder of things that can be made again; it need not exist yet."""

    name: str
    folder: str
    num_bytes: int
    is_writable: bool


@dataclass(frozen=True)
class Diagnosis:
    """Everything that `doctor` says."""

    version: str | None
    python: str
    executable: str
    packages: list[Package]
    jax: Devices
    plugin: Plugin
    caches: list[Cache]
    demo_target: str | None
    demo_draft: str | None
    problems: list[Problem]
    generate_works: bool
