"""The version of flexkv and the build of its native core. Works even if the native core is missing."""

from __future__ import annotations

import platform
from typing import Any

import flexkv
from flexkv.observe.package import other_packages, package_folder

Facts = dict[str, Any]


def package_facts() -> Facts:
    """Returns facts about the package and its native core. `native_core` and `cuda` are None if the core is missing."""
    facts: Facts = {
        "flexkv": {
            "version": flexkv.__version__,
            "folder": str(package_folder()),
            "others": [
                {"name": other.name, "version": other.version, "folder": str(other.folder)}
                for other in other_packages()
                if not other.is_this
            ],
        },
        "python": platform.python_version(),
        "native_core": None,
        "cuda": None,
    }
    try:
        from flexkv import c_ext
    except ImportError:
        return facts
    build, cuda = c_ext.build_info(), c_ext.cuda_info()
    facts["native_core"] = {
        "variant": c_ext.__variant__,
        "compiler": build["compiler"],
        "with_cuda": bool(build["cuda"]),
    }
    facts["cuda"] = {
        "devices": cuda["device_count"],
        "driver": f"{cuda['driver'] // 1000}.{cuda['driver'] % 1000 // 10}" if cuda["device_count"] else None,
        "reason": "" if cuda["device_count"] else cuda["reason"],
    }
    return facts
