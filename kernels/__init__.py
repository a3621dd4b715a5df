"""Numerics: one registry; per op a torch reference and the implementations that replace it where they win.

Importing this package fills the registry with the names in `references` and imports no torch.
"""

# From the repository root this folder also answers to the bare name `kernels`, under which transformers looks for
# another package: then it must do nothing.
if __name__ == "sgl.kernels":
    from sgl.kernels import references as references
