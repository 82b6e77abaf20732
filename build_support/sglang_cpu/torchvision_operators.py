"""Adds operators that SGLang's wheel expects and that torch for a CPU lacks. A line of the environment's .pth file
imports this module when Python starts, in child processes too. A module named `sitecustomize` would not work, because
Debian's Python finds its own module of this name first.

torchvision from PyPI is linked to CUDA, so its native part does not load with a torch for CPUs. Then the import of
torchvision fails, because its operators are not declared. This module declares them. The declared operators need no
code, because they are never called.
"""

import sys
from importlib.abc import MetaPathFinder

VISION_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _BeforeTorchvision(MetaPathFinder):
    """An import finder that finds no module. When the import of torchvision begins, it declares torchvision's
    operators, and removes itself from the finders.
    """

    library = None

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname != "torchvision":
            return None
        sys.meta_path.remove(self)
        import torch

        if not torch.cuda.is_available():
            library = torch.library.Library("torchvision", "DEF")
            for operator in VISION_OPERATORS:
                library.define(operator)
            # A reference to the library is stored, because the declarations end when this object is freed.
            _BeforeTorchvision.library = library
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
