"""Attention kernels, and the choice among them. `import evocompile.kernels.attention` registers the operators.

This file imports nothing: a process that runs in the repository's root can import this folder as a top-level
`kernels`, as transformers does when it probes for a package of that name.
"""
