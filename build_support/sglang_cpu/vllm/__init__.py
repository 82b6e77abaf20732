"""This package is not vLLM. SGLang imports kernels from a package of this name if it finds neither a GPU nor
`sgl_kernel`.
"""
