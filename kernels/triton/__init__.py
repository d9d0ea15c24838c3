"""Flash attention in Triton for steps of sequence-parallel attention.

Importing `launch` or a kernel needs triton; `backend` does not, and says why the kernels do not serve a case.
"""
